"""Which decode worker a prompt goes to: a function of what this frontend knows of the workers.

    Fleet      the load of each worker: its last report, and what this frontend has sent since
    Chooser    the policies, and what they remember
    Placer     both, and what the workers will hold of prompts that are on their way

No I/O and no clock, so the simulator (`benchmarks/sim/`) decides with this code. Its results chose
the constants. The balancer uses it for decode workers, `forward` for stock servers. Single event
loop.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import random
import zlib
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pullfill.prefix.index import Predicted
from pullfill.wire import DecodePolicy

_T = TypeVar("_T")

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
# Of more workers than this, only so many are compared, besides those that hold the prefix.
#
# If fewer than HOLDERS workers hold the prefix, it is SAMPLE / 4: such a prompt continues a
# conversation, which seldom moves to another worker.
SAMPLE = 16
# Of the workers that hold most of the prompt, only so many are compared.
HOLDERS = 8
# Of the workers that hold most of the prompt, only so many are looked up.
KNOWN = SAMPLE + HOLDERS
# Those hold at least this share of what the best one holds.
NEAR = 0.75
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

    others_tokens, others_blocks: queued prompt tokens and active blocks of other frontends.
    own_tokens: uncached tokens of this frontend's requests without a first token.
    own_blocks: KV blocks of this frontend's requests.
    free_blocks: KV blocks that a request may take. None: unknown.
    work: recent work that this frontend sent, in tokens (`Fleet`).
    """

    instance_id: str
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

    A report covers the requests of this frontend, too. What it says beyond them is taken for the
    load of other frontends until the next report. The own load is counted exactly:

        load now = load of others at the last report + own load now"""

    def __init__(self) -> None:
        self.views: dict[str, WorkerView] = {}
        self._sent = 0

    def join(self, instance_id: str) -> WorkerView:
        """Return the view of a worker. It is made if there is none."""
        view = self.views.get(instance_id)
        if view is None:
            works = [other.work for other in self.views.values()]
            # Equal to the others at once, so a worker that joins gets no flood.
            mean = sum(works) / len(works) if works else 0.0
            view = self.views[instance_id] = WorkerView(instance_id, work=mean)
        return view

    def drop(self, instance_id: str) -> None:
        """Forget a worker. Shares of its requests may still be ended."""
        self.views.pop(instance_id, None)

    def report(
        self, instance_id: str, queued_tokens: float, active_blocks: float, free_blocks: float
    ) -> None:
        """Take a worker's report. Unknown workers are ignored."""
        view = self.views.get(instance_id)
        if view is not None:
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


@dataclass(slots=True)
class Candidates:
    """The workers that can take a request, at least one. All fields hold the same workers.

    ids: sorted instance ids."""

    views: Sequence[WorkerView]
    by_id: Mapping[str, WorkerView]
    ids: Sequence[str]

    @classmethod
    def of(cls, views: Sequence[WorkerView]) -> Candidates:
        by_id = {view.instance_id: view for view in views}
        return cls(views, by_id, sorted(by_id))


@dataclass(slots=True)
class HeldBlocks:
    """Which workers hold the beginning of a prompt.

    blocks: instance id -> leading blocks, of KNOWN workers at most. The caller may change it.
    more: number of other workers that hold as much as the best of these."""

    blocks: dict[str, int]
    more: int = 0

    def only(self, ids: Container[str]) -> None:
        """Leave out all workers but these."""
        for gone in [name for name in self.blocks if name not in ids]:
            del self.blocks[gone]


@dataclass(slots=True)
class Ask:
    """A prompt that needs a worker.

    tokens: its length.
    block: tokens per KV block. 0: unknown, then nothing is matched.
    hashes: chain hashes of its whole blocks. Empty: it cannot be matched.
    matched: instance id -> leading blocks that the worker holds, or will when it has computed what
    was sent to it.
    stored: most leading blocks that any worker holds already.
    warm: whether `matched` can be relied on.
    more: how many other workers hold `stored` blocks.
    """

    tokens: int
    block: int = 0
    hashes: Sequence[int] = ()
    matched: Mapping[str, int] = field(default_factory=dict)
    stored: int = 0
    warm: bool = True
    more: int = 0


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


class Chooser:
    """Decides, and keeps what the policies remember. Owned by one event loop.

    rng: for `random`, and for the workers that are compared when there are many.
    peers: number of frontends. Each sees only its share of the prompts that leave a prefix."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._last = ""
        self._crowds: OrderedDict[int, int] = OrderedDict()
        self.peers = 1

    def choose(self, policy: DecodePolicy, ask: Ask, among: Candidates) -> WorkerChoice:
        """Choose one of `among`. The time it takes hardly depends on how many there are."""
        views = among.views
        if policy is DecodePolicy.ROUND_ROBIN:
            place = bisect.bisect_right(among.ids, self._last)
            self._last = among.ids[place % len(among.ids)]
            return _plain(policy, ask, among.by_id[self._last], "turn")
        if policy is DecodePolicy.RANDOM:
            return _plain(policy, ask, self._rng.choice(views), "random")
        if policy is DecodePolicy.LEAST_LOADED:
            return _least(policy, Ask(ask.tokens, ask.block), self._some(views), "load")
        if len(views) == 1:
            return _plain(policy, ask, views[0], "only")
        if not ask.warm and len(ask.hashes):
            return _hashed(ask, views)
        return self._kv(ask, among)

    def _kv(self, ask: Ask, among: Candidates) -> WorkerChoice:
        matched, policy = ask.matched, DecodePolicy.KV
        longest = max(matched.values(), default=0)
        least = _least_blocks(ask)
        if longest < least:
            return _least(policy, ask, self._some(among.views), "no_prefix")
        worth = self._worth(ask, longest)
        near = self._near(matched, among, max(least, NEAR * longest))
        costs = _costs(ask, near, least, worth)
        low = min(costs)
        best = near[costs.index(low)]
        held = matched.get(best.instance_id, 0)
        reason = "prefix" if held == longest else "balance"
        return WorkerChoice(best, policy, held * ask.block, low, reason)

    def _worth(self, ask: Ask, longest: int) -> float:
        """What a held token counts: 1, or less if many prompts were equal up to there only.

        Prompts of a conversation leave a prefix once each. Blocks that are only predicted are not
        counted: prompts that come in one burst shall stay together."""
        if ask.stored != longest:
            return 1.0
        end = ask.hashes[longest - 1]
        seen = self._crowds.pop(end, 0)
        self._crowds[end] = seen + 1
        if len(self._crowds) > MAX_CROWDS:
            self._crowds.popitem(last=False)
        if seen * self.peers <= CROWD:
            return 1.0
        holders = list(ask.matched.values()).count(longest) + ask.more
        return 1.0 / (1.0 + max(0.0, seen * self.peers / holders - CROWD) / CROWD_HALF)

    def _some(self, views: Sequence[WorkerView], count: int = SAMPLE) -> Sequence[WorkerView]:
        """At most `count` of them, other ones at each call."""
        return views if len(views) <= count else self._spread(views, count)

    def _near(
        self, matched: Mapping[str, int], among: Candidates, deep: float
    ) -> Sequence[WorkerView]:
        """The workers to compare: some with `deep` blocks of the prompt, and some others."""
        if len(among.views) <= KNOWN:
            return among.views
        ids = [name for name, blocks in matched.items() if blocks >= deep]
        others = self._some(among.views, SAMPLE if len(ids) >= HOLDERS else SAMPLE // 4)
        if len(ids) > HOLDERS:
            ids = self._spread(ids, HOLDERS)
        return [*(among.by_id[name] for name in ids if name in among.by_id), *others]

    def _spread(self, items: Sequence[_T], count: int) -> list[_T]:
        # `randrange` takes longer.
        start, stride = int(self._rng.random() * len(items)), len(items) // count
        return [items[(start + i * stride) % len(items)] for i in range(count)]


def _costs(
    ask: Ask, views: Sequence[WorkerView], least: float = math.inf, worth: float = 1.0
) -> list[float]:
    """What it costs to send the prompt to each worker, in tokens.

    least: leading blocks from which on they count. worth: what each of them counts."""
    block, tokens, blocks_held = ask.block, ask.tokens, ask.matched.get
    weight, all_of_it, saves = block / BLOCK_TOKENS, ALPHA * tokens, ALPHA * block * worth
    mean = sum([view.work for view in views]) / len(views)
    costs = []
    for view in views:
        held = blocks_held(view.instance_id, 0)
        lag = view.work - mean
        if not -LAG_TOKENS < lag < LAG_TOKENS:
            lag = math.copysign(LAG_TOKENS, lag)
        cost = (
            view.others_tokens
            + view.own_tokens
            + (view.others_blocks + view.own_blocks) * weight
            + all_of_it
            + LAG * lag
        )
        if held >= least:
            cost -= saves * held
        if view.free_blocks is not None and tokens > (room := (held + view.free_blocks) * block):
            cost += tokens - room  # it waits until other requests have freed the rest
        costs.append(cost)
    return costs


def _least_blocks(ask: Ask) -> float:
    """From how many leading blocks on a prefix counts."""
    return max(1.0, HIT_SHARE * ask.tokens / ask.block) if ask.block else math.inf


def _least(
    policy: DecodePolicy,
    ask: Ask,
    views: Sequence[WorkerView],
    reason: str,
    least: float = math.inf,
) -> WorkerChoice:
    costs = _costs(ask, views, least)
    low = min(costs)
    view = views[costs.index(low)]
    held = ask.matched.get(view.instance_id, 0)
    return WorkerChoice(view, policy, held * ask.block, low, reason)


def _hashed(ask: Ask, views: Sequence[WorkerView]) -> WorkerChoice:
    key = ask.hashes[_key_depth(len(ask.hashes)) - 1].to_bytes(8, "little")
    two = heapq.nsmallest(
        2, views, key=lambda v: zlib.crc32(v.instance_id.encode(), zlib.crc32(key))
    )
    return _least(DecodePolicy.KV, ask, two, "hashed", _least_blocks(ask))


def _key_depth(blocks: int) -> int:
    """The largest of 1, 4, 16, 64, … that is not over `blocks`, which is at least 1.

    The prompts of a conversation grow. With this most of them have the same key. With one depth for
    all lengths, all prompts with one long system prompt would go to two workers."""
    depth = 1
    while depth * 4 <= blocks:
        depth *= 4
    return depth


def _plain(policy: DecodePolicy, ask: Ask, view: WorkerView, reason: str) -> WorkerChoice:
    held = ask.matched.get(view.instance_id, 0)
    return WorkerChoice(view, policy, held * ask.block, None, reason)


# --------------------------------------------------------------------------- both together


class Placer:
    """The state of one frontend's choices: `choose` decides, `send` counts the request.

    What the workers hold is handed in (`stored`). It is joined with what they will hold once they
    have computed what this frontend sent to them.

    rng: see `Chooser`.
    predicted_s: how long blocks count as held that a worker was sent, but has not reported."""

    def __init__(self, rng: random.Random, predicted_s: float = 30.0) -> None:
        self.fleet = Fleet()
        self.chooser = Chooser(rng)
        self._predicted = Predicted(PREDICTED_BLOCKS, predicted_s)
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._next = itertools.count()

    def candidates(self, instance_ids: Sequence[str]) -> Candidates:
        """The views of these workers, which join if they are new. To be kept while they stay."""
        return Candidates.of([self.fleet.join(name) for name in instance_ids])

    def drop(self, instance_id: str) -> None:
        """Forget a worker."""
        self.fleet.drop(instance_id)
        number = self._numbers.pop(instance_id, None)
        if number is not None:
            del self._names[number]
            self._predicted.forget(number)

    def choose(
        self,
        policy: DecodePolicy,
        tokens: int,
        among: Candidates,
        now: float,
        *,
        block: int = 0,
        hashes: Sequence[int] | None = None,
        stored: HeldBlocks | None = None,
        warm: bool = True,
    ) -> WorkerChoice:
        """Choose a worker for a prompt of `tokens` tokens.

        block, hashes: tokens per block and the chain hashes of the prompt's blocks.
        stored: what the workers hold of it. warm: whether that can be relied on.
        now: monotonic seconds."""
        if hashes is None or not len(hashes) or not block:
            return self.chooser.choose(policy, Ask(tokens, block), among)
        held = stored if stored is not None else HeldBlocks({})
        known = held.blocks
        most = max(known.values(), default=0)
        # A hash names all blocks before it, too. So it is enough to look at what comes after those
        # that are stored; and at the last of them, while few workers hold it.
        few = list(known.values()).count(most) < HOLDERS
        begin = max(0, most - few)
        for number, blocks in self._predicted.match(hashes[begin:], now).items():
            name = self._names[number]
            known[name] = max(begin + blocks, known.get(name, 0))
        ask = Ask(tokens, block, hashes, known, most, warm, held.more)
        return self.chooser.choose(policy, ask, among)

    def send(
        self,
        choice: WorkerChoice,
        tokens: int,
        now: float,
        *,
        block: int = 0,
        hashes: Sequence[int] | None = None,
    ) -> Share:
        """Count a request that goes to the chosen worker. Returns its share of the load."""
        view = choice.view
        if hashes is not None and len(hashes):
            number = self._numbers.get(view.instance_id)
            if number is None:
                number = self._numbers[view.instance_id] = next(self._next)
                self._names[number] = view.instance_id
            self._predicted.add(number, hashes, now)
        blocks = -(-tokens // block) if block else 0
        return self.fleet.send(view, max(0, tokens - choice.matched_tokens), blocks)
