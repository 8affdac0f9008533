"""Which decode worker a prompt goes to: a function of what this frontend knows of the workers.

    Fleet      the load of each worker: its last report, and what this frontend has sent since
    Chooser    the policies, and what they remember
    Placer     both, and what the workers will hold of prompts that are on their way

No I/O and no clock. A simulation chose the constants (`benchmarks/results/sim.md`). The balancer
uses it for decode workers, `forward` for stock servers. Single event loop.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pullfill.prefix.index import Predicted
from pullfill.wire import DecodeChoice, DecodePolicy

# `kv` takes the worker with the least cost, in tokens of work:
#
#     queued tokens + active KV blocks + ALPHA * uncached tokens + LAG * excess of recent work
#
# - Queued, active: what the worker reported, and what this frontend has sent since (`Fleet`).
# - Uncached: the prompt less the leading blocks that the worker holds. It weighs more than queued
#   tokens, because computing a prefix again takes time and memory from all later requests too.
# - A prefix counts only if it is at least HIT_SHARE of the prompt. A shorter one saves little.
# - A prefix after which many prompts differ, as a system prompt, counts less with each of them
#   (`CROWD`). So other workers get it too, and it does not pin its prompts to one worker.
# - Recent work, as excess over the mean, decides between workers that are equal otherwise. It also
#   turns new prompts away from a worker that has had more than its share.
#
# Until the prefix index is warm, the first blocks of a prompt name two workers, the same ones at
# every frontend. The cheaper of them gets the prompt.
# Weight of a token that has to be computed for this prompt, against one that is queued.
ALPHA = 8.0
# Weight of a token of recent work beyond the mean.
LAG = 1.0
# Most tokens of recent work beyond the mean, or below it, that count.
LAG_TOKENS = 1 << 16
# A prefix that is a smaller share of the prompt does not count.
HIT_SHARE = 0.1
# KV of so many tokens costs as much as one queued token: each step reads all KV in use.
BLOCK_TOKENS = 16
# So many prompts per worker that holds a prefix may leave it before it counts less.
CROWD = 4
# So many more, and it counts half.
CROWD_HALF = 8
# For how many prefixes the prompts are counted.
MAX_CROWDS = 16_384
# Of the workers that hold most of the prompt, only so many are looked up.
KNOWN = 24
# Recent work fades with work, not with time: requests that come far apart still take turns.
# Requests per worker after which recent work counts half.
FADE = 256
# Work fades in so many steps.
_STEPS = 8
PREDICTED_BLOCKS = 1 << 18


# --------------------------------------------------------------------------- load


@dataclass(slots=True, eq=False)
class WorkerView:
    """What this frontend knows of one worker.

    number: differs from those of all other workers.
    others_tokens, others_blocks: queued prompt tokens and active blocks of other frontends.
    own_tokens: uncached tokens of this frontend's requests without a first token.
    own_blocks: KV blocks of this frontend's requests.
    free_blocks: KV blocks that a request may take. None: unknown.
    work: recent work that this frontend sent, in tokens (`Fleet`).
    """

    instance_id: str
    number: int = 0
    others_tokens: float = 0.0
    others_blocks: float = 0.0
    own_tokens: float = 0.0
    own_blocks: float = 0.0
    free_blocks: float | None = None
    work: float = 0.0


@dataclass(slots=True, eq=False)
class Share:
    """One request at a worker. `first` and `end` may be called again without effect.

    tokens, blocks: what it still adds to the worker's load."""

    view: WorkerView
    tokens: float
    blocks: float

    def first(self) -> None:
        """Its first token has come: the prompt is computed."""
        self.view.own_tokens -= self.tokens
        self.tokens = 0.0

    def end(self, made: int = 0) -> None:
        """It has left the worker. made: tokens of the answer that the worker has computed."""
        self.first()
        if self.blocks:
            self.view.work += made
            self.view.own_blocks -= self.blocks
            self.blocks = 0.0


class Fleet:
    """The views of the decode workers, by instance id.

    load now = load of others at the last report + own load now, which is counted exactly"""

    def __init__(self) -> None:
        self.views: dict[str, WorkerView] = {}
        self._numbers = itertools.count()
        self._sent = 0

    def join(self, instance_id: str) -> WorkerView:
        """Return the view of a worker. It is made if there is none."""
        view = self.views.get(instance_id)
        if view is None:
            works = [other.work for other in self.views.values()]
            # Equal to the others at once, so a worker that joins gets no flood.
            mean = sum(works) / len(works) if works else 0.0
            view = WorkerView(instance_id, next(self._numbers), work=mean)
            self.views[instance_id] = view
        return view

    def report(
        self, instance_id: str, queued_tokens: float, active_blocks: float, free_blocks: float
    ) -> None:
        """Take a worker's report. Unknown workers are ignored."""
        view = self.views.get(instance_id)
        if view is not None:
            # A report covers the requests of this frontend, too. What it says beyond them is taken
            # for the load of other frontends until the next report.
            view.others_tokens = max(0.0, queued_tokens - view.own_tokens)
            view.others_blocks = max(0.0, active_blocks - view.own_blocks)
            view.free_blocks = free_blocks

    def send(self, view: WorkerView, uncached: float, blocks: float) -> Share:
        """Count a request that goes to a worker.

        uncached: prompt tokens that the worker lacks. blocks: KV blocks of the prompt."""
        view.own_tokens += uncached
        view.own_blocks += blocks
        view.work += uncached
        if view.free_blocks is not None:
            view.free_blocks = max(0.0, view.free_blocks - blocks)
        self._sent += 1
        if self._sent * _STEPS >= FADE * len(self.views):
            self._sent = 0
            for each in self.views.values():
                each.work *= 0.5 ** (1 / _STEPS)
        return Share(view, uncached, blocks)


# --------------------------------------------------------------------------- the policies


@dataclass(slots=True, frozen=True)
class Prompt:
    """tokens: its length. block: tokens per KV block. 0: unknown, then nothing is matched.

    hashes: chain hashes of its whole blocks. Empty: it cannot be matched."""

    tokens: int
    block: int = 0
    hashes: Sequence[int] = ()


@dataclass(slots=True)
class HeldBlocks:
    """Which workers hold the beginning of a prompt.

    blocks: instance id -> leading blocks, of KNOWN workers at most. `Placer` adds those that the
    worker will hold when it has computed what was sent to it.
    more: number of other workers that hold as much as the best of these.
    stored: most leading blocks that any worker holds already.
    warm: whether `blocks` can be relied on."""

    blocks: dict[str, int]
    more: int = 0
    stored: int = 0
    warm: bool = True


# The workers that can take a request, at least one, in the order of their instance ids.
Candidates = Mapping[str, WorkerView]


@dataclass(slots=True)
class WorkerChoice:
    """The worker, and why.

    matched_tokens: how much of the prompt it holds, as far as known.
    score: its cost in tokens. None: the policy computes none.
    reason: why this worker:
        prefix      no other holds more of the prompt
        balance     another one holds more, and costs more
        no_prefix   none holds enough of the prompt to count: the least cost
        hashed      the index is not warm
        only        there is no other
        load, turn, random      the other policies
        together    another choice of the answer is there (`balancer`)
    """

    view: WorkerView
    policy: DecodePolicy
    matched_tokens: int
    score: float | None
    reason: str

    def told(self) -> DecodeChoice:
        """Return it for `explain`."""
        return DecodeChoice(
            policy=self.policy,
            matched_tokens=self.matched_tokens,
            score=None if self.score is None else round(self.score, 1),
            reason=self.reason,
        )


class Chooser:
    """Decides, and keeps what the policies remember. Owned by one event loop.

    rng: for `random`.
    peers: number of frontends. Each sees only its share of the prompts that leave a prefix."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._last = ""
        self._crowds: OrderedDict[int, int] = OrderedDict()
        self.peers = 1

    def choose(
        self, policy: DecodePolicy, prompt: Prompt, held: HeldBlocks, among: Candidates
    ) -> WorkerChoice:
        """Choose one of `among`."""
        views = list(among.values())
        if policy is DecodePolicy.ROUND_ROBIN:
            later = (view for view in views if view.instance_id > self._last)
            view = next(later, views[0])
            self._last = view.instance_id
            return _plain(policy, prompt, held, view, "turn")
        if policy is DecodePolicy.RANDOM:
            return _plain(policy, prompt, held, self._rng.choice(views), "random")
        if policy is DecodePolicy.LEAST_LOADED:
            return _least(policy, prompt, HeldBlocks({}), views, "load")
        if len(views) == 1:
            return _plain(policy, prompt, held, views[0], "only")
        least = _least_blocks(prompt)
        if not held.warm and prompt.hashes:
            two = _hashed(prompt.hashes, views)
            return _least(policy, prompt, held, two, "hashed", least)
        longest = max(held.blocks.values(), default=0)
        if longest < least:
            return _least(policy, prompt, held, views, "no_prefix")
        worth = self._worth(prompt, held, longest)
        choice = _least(policy, prompt, held, views, "prefix", least, worth)
        if held.blocks.get(choice.view.instance_id, 0) < longest:
            choice.reason = "balance"
        return choice

    def _worth(self, prompt: Prompt, held: HeldBlocks, longest: int) -> float:
        """What a held token counts: 1, or less if many prompts were equal up to there only."""
        # Prompts that come in one burst shall stay together: their blocks are only predicted.
        if held.stored != longest:
            return 1.0
        # Prompts of a conversation leave a prefix once each.
        end = prompt.hashes[longest - 1]
        seen = self._crowds.pop(end, 0)
        self._crowds[end] = seen + 1
        if len(self._crowds) > MAX_CROWDS:
            self._crowds.popitem(last=False)
        if seen * self.peers <= CROWD:
            return 1.0
        holders = list(held.blocks.values()).count(longest) + held.more
        return 1.0 / (1.0 + max(0.0, seen * self.peers / holders - CROWD) / CROWD_HALF)


def _least(
    policy: DecodePolicy,
    prompt: Prompt,
    held: HeldBlocks,
    views: Sequence[WorkerView],
    reason: str,
    least: float = math.inf,
    worth: float = 1.0,
) -> WorkerChoice:
    """The worker where the prompt costs least.

    least: leading blocks from which on they count. worth: what each of them counts."""
    block, tokens, blocks_held = prompt.block, prompt.tokens, held.blocks.get
    weight, all_of_it, saves = block / BLOCK_TOKENS, ALPHA * tokens, ALPHA * block * worth
    mean = sum([view.work for view in views]) / len(views)
    costs = []
    for view in views:
        has = blocks_held(view.instance_id, 0)
        lag = max(-LAG_TOKENS, min(LAG_TOKENS, view.work - mean))
        cost = (
            view.others_tokens
            + view.own_tokens
            + (view.others_blocks + view.own_blocks) * weight
            + all_of_it
            + LAG * lag
        )
        if has >= least:
            cost -= saves * has
        if view.free_blocks is not None and tokens > (room := (has + view.free_blocks) * block):
            cost += tokens - room  # it waits until other requests have freed the rest
        costs.append(cost)
    low = min(costs)
    view = views[costs.index(low)]
    return WorkerChoice(view, policy, blocks_held(view.instance_id, 0) * block, low, reason)


def _plain(
    policy: DecodePolicy, prompt: Prompt, held: HeldBlocks, view: WorkerView, reason: str
) -> WorkerChoice:
    matched = held.blocks.get(view.instance_id, 0) * prompt.block
    return WorkerChoice(view, policy, matched, None, reason)


def _least_blocks(prompt: Prompt) -> float:
    """From how many leading blocks on a prefix counts."""
    return max(1.0, HIT_SHARE * prompt.tokens / prompt.block) if prompt.block else math.inf


def _hashed(hashes: Sequence[int], views: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """Two workers that the first blocks of a prompt name, the same ones at every frontend."""
    # The prompts of a conversation grow. The depth is the largest of 1, 4, 16, 64, … that is not
    # over their length, so most of them have the same key. With one depth for all lengths, all
    # prompts with one long system prompt would go to two workers.
    depth = 1
    while depth * 4 <= len(hashes):
        depth *= 4
    key = zlib.crc32(hashes[depth - 1].to_bytes(8, "little"))
    return heapq.nsmallest(2, views, key=lambda view: zlib.crc32(view.instance_id.encode(), key))


# --------------------------------------------------------------------------- both together


class Placer:
    """The state of one frontend's choices: `choose` decides, `send` counts the request.

    What the workers hold is handed in (`held`). It is joined with what they will hold once they
    have computed what this frontend sent to them.

    rng: see `Chooser`.
    predicted_s: how long blocks count as held that a worker was sent, but has not reported."""

    def __init__(self, rng: random.Random, predicted_s: float = 30.0) -> None:
        self.fleet = Fleet()
        self.chooser = Chooser(rng)
        self._predicted = Predicted(PREDICTED_BLOCKS, predicted_s)
        self._names: dict[int, str] = {}

    def candidates(self, instance_ids: Iterable[str]) -> Candidates:
        """Return the views of these workers, which join if they are new."""
        return {name: self.fleet.join(name) for name in sorted(instance_ids)}

    def drop(self, instance_id: str) -> None:
        """Forget a worker."""
        view = self.fleet.views.pop(instance_id, None)  # shares of its requests may still be ended
        if view is not None and self._names.pop(view.number, ""):
            self._predicted.forget(view.number)

    def choose(
        self,
        policy: DecodePolicy,
        prompt: Prompt,
        among: Candidates,
        now: float,
        held: HeldBlocks | None = None,
    ) -> WorkerChoice:
        """Choose a worker for a prompt.

        held: what the workers hold of it; it is changed. now: monotonic seconds."""
        held = held or HeldBlocks({})
        if not prompt.hashes or not prompt.block:
            return self.chooser.choose(policy, prompt, HeldBlocks({}), among)
        known = held.blocks = {name: n for name, n in held.blocks.items() if name in among}
        held.stored = max(known.values(), default=0)
        # A hash names all blocks before it, too. So it is enough to look from the last stored on.
        begin = max(0, held.stored - 1)
        for number, blocks in self._predicted.match(prompt.hashes[begin:], now).items():
            if (name := self._names[number]) in among:
                known[name] = max(begin + blocks, known.get(name, 0))
        return self.chooser.choose(policy, prompt, held, among)

    def send(self, choice: WorkerChoice, prompt: Prompt, now: float) -> Share:
        """Count a request that goes to the chosen worker. Returns its share of the load."""
        view = choice.view
        if prompt.hashes:
            self._names[view.number] = view.instance_id
            self._predicted.add(view.number, prompt.hashes, now)
        blocks = -(-prompt.tokens // prompt.block) if prompt.block else 0
        return self.fleet.send(view, max(0, prompt.tokens - choice.matched_tokens), blocks)
