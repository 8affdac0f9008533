"""Which decode worker a prompt goes to: a function of what this frontend knows of the workers.

`Placer` knows the load of each worker (its last report, and what this frontend has sent since),
what the policies remember, and what the workers will hold of prompts that are on their way.

No I/O and no clock. A simulation chose the constants (`benchmarks/results/sim.md`). The balancer
uses it for decode workers, `forward` for stock servers. Single event loop.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pullfill.engine.front_wire import LOAD_S, LoadReport
from pullfill.frontend.routing.few import few
from pullfill.prefix.index import Predicted
from pullfill.wire import DecodeChoice, DecodePolicy

# `kv` takes the worker with the least cost, in tokens of work:
#
#     queued tokens + active KV blocks + ALPHA * uncached tokens + LAG * excess of recent work
#
# - Queued, active: what the worker reported, and what this frontend has sent since.
# - Uncached: the prompt less the leading blocks that the worker holds. It weighs more than queued
#   tokens, because computing a prefix again takes time and memory from all later requests too.
# - A prefix counts only if it is at least HIT_SHARE of the prompt. A shorter one saves little.
# - A prefix after which many prompts differ, as a system prompt, counts less with each of them
#   (`CROWD`). So other workers get it too, and it does not pin its prompts to one worker.
# - Recent work, as excess over the mean, decides between workers that are equal otherwise. It also
#   turns new prompts away from a worker that has had more than its share.
# `pack` chooses in the same way among the first few workers (few.py), in the order of their ids,
# which is the same for all frontends. Recent work does not count, as others may have had no
# requests for long.
# Policies that look for workers which hold a prefix of the prompt.
BY_PREFIX = frozenset({DecodePolicy.KV, DecodePolicy.PACK})
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
# Under `pack`, streams move if they are unevenly spread for so long. One moves, then the next.
_UNEVEN_S, MOVE_S = 1.0, 4 * LOAD_S
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


@dataclass(slots=True, eq=False)
class WorkerView:
    """What this frontend knows of one worker.

    others_tokens, others_blocks: queued prompt tokens and active blocks of other frontends.
    own_tokens: uncached tokens of this frontend's requests without a first token.
    own_blocks: KV blocks of this frontend's requests.
    free_blocks: KV blocks that a request may take. None: unknown.
    work: recent work that this frontend sent, in tokens.
    told, told_at: the last report of a decode worker, and when it came (monotonic seconds).
    """

    instance_id: str
    others_tokens: float = 0.0
    others_blocks: float = 0.0
    own_tokens: float = 0.0
    own_blocks: float = 0.0
    free_blocks: float | None = None
    work: float = 0.0
    told: LoadReport | None = None
    told_at: float = 0.0


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


@dataclass(slots=True, frozen=True)
class Prompt:
    """tokens: its length. block: tokens per KV block. 0: unknown, then nothing is matched.

    hashes: chain hashes of its whole blocks. Empty: it cannot be matched."""

    tokens: int
    block: int = 0
    hashes: Sequence[int] = ()


class Placer:
    """The workers and the choices of one frontend: `choose` decides, `send` counts the request.

    load now = load of others at the last report + own load now, which is counted exactly

    rng: for the policy `random`.
    predicted_s: how long blocks count as held that a worker was sent, but has not reported.
    views: the workers, by instance id.
    peers: number of frontends. Each sees only its share of the prompts that leave a prefix."""

    def __init__(self, rng: random.Random, predicted_s: float = 30.0) -> None:
        self.views: dict[str, WorkerView] = {}
        self.peers = 1
        self._rng = rng
        self._predicted = Predicted(PREDICTED_BLOCKS, predicted_s)
        self._crowds: OrderedDict[int, int] = OrderedDict()
        self._last = ""
        self._sent = 0
        # How many workers get streams, and until when that holds.
        self._few, self._few_until = 1, 0.0
        # When a stream moves, if they are unevenly spread until then.
        self._move_at = math.inf
        # The worker that a stream was last to leave.
        self._source = ""

    # ---------------------------------------------------------------- workers

    def join(self, instance_id: str) -> WorkerView:
        """Return the view of a worker. It is made if there is none."""
        view = self.views.get(instance_id)
        if view is None:
            works = [other.work for other in self.views.values()]
            # Equal to the others at once, so a worker that joins gets no flood.
            mean = sum(works) / len(works) if works else 0.0
            view = self.views[instance_id] = WorkerView(instance_id, work=mean)
        return view

    def report(
        self,
        instance_id: str,
        queued_tokens: float,
        active_blocks: float,
        free_blocks: float | None,
    ) -> WorkerView:
        """Take a worker's report. It joins if it is new."""
        view = self.join(instance_id)
        # A report covers the requests of this frontend, too. What it says beyond them is taken for
        # the load of other frontends until the next report.
        view.others_tokens = max(0.0, queued_tokens - view.own_tokens)
        view.others_blocks = max(0.0, active_blocks - view.own_blocks)
        view.free_blocks = free_blocks
        return view

    def drop(self, instance_id: str) -> None:
        """Forget a worker. Shares of its requests may still be ended."""
        if self.views.pop(instance_id, None) is not None:
            self._predicted.forget(instance_id)

    # ---------------------------------------------------------------- requests

    def choose(
        self,
        policy: DecodePolicy,
        prompt: Prompt,
        names: Iterable[str],
        now: float,
        held: Mapping[str, int] | None = None,
        more: int = 0,
    ) -> tuple[WorkerView, DecodeChoice]:
        """Choose one of these workers, of at least one. Those that are new join.

        held: how many leading blocks of the prompt workers hold already, of KNOWN at most.
        more: number of other workers that hold as much as the best of these.
        now: monotonic seconds.

        Reasons why a worker is chosen:
            prefix      no other holds more of the prompt
            balance     another one holds more, and costs more
            no_prefix   none holds enough of the prompt to count: the least cost
            only        there is no other
            packed      the same of the few workers that get streams
            load, turn, random      the other policies
            together    another choice of the answer is there (`balancer`)"""
        among = {name: self.join(name) for name in sorted(names)}
        views, blocks, stored = list(among.values()), dict[str, int](), 0
        if prompt.hashes and prompt.block:
            blocks = {name: count for name, count in (held or {}).items() if name in among}
            stored = max(blocks.values(), default=0)
            # A hash names all blocks before it, too. So it is enough to look from the last stored
            # on.
            begin = max(0, stored - 1)
            for name, count in self._predicted.match(prompt.hashes[begin:], now).items():
                if name in among:
                    blocks[name] = max(begin + count, blocks.get(name, 0))
        score = None
        if policy is DecodePolicy.ROUND_ROBIN:
            later = (view for view in views if view.instance_id > self._last)
            view, reason = next(later, views[0]), "turn"
            self._last = view.instance_id
        elif policy is DecodePolicy.RANDOM:
            view, reason = self._rng.choice(views), "random"
        elif policy is DecodePolicy.LEAST_LOADED:
            (view, score), reason = _cheapest(prompt, blocks, views), "load"
        elif len(views) == 1:
            view, reason = views[0], "only"
        elif policy is DecodePolicy.PACK:
            among_few = views[: self._fewest(views, now)]
            view, score, reason = self._by_prefix(prompt, blocks, among_few, stored, more, lag=0.0)
            reason = "packed" if reason == "no_prefix" else reason
        else:
            view, score, reason = self._by_prefix(prompt, blocks, views, stored, more)
        return view, DecodeChoice(
            policy=policy,
            matched_tokens=blocks.get(view.instance_id, 0) * prompt.block,
            score=None if score is None else round(score, 1),
            reason=reason,
        )

    def _fewest(self, views: Sequence[WorkerView], now: float) -> int:
        """How many of these workers get streams. All, if none tells its load: stock servers."""
        if now >= self._few_until:
            self._few_until = now + LOAD_S
            told = [(v.told, now - v.told_at) for v in views if v.told is not None]
            self._few = few(told) if told else len(views)
        return self._few

    def uneven(self, names: Iterable[str], now: float) -> tuple[str, str] | None:
        """Which of these workers has a stream too many under `pack`, and which one shall have it.

        A burst of prompts goes to few workers, because the others compute it. Soon more workers
        have time for streams. But each answer would stay where it began."""
        views = [self.join(name) for name in sorted(names)]
        each = {view.instance_id: view.told.streams for view in views if view.told is not None}
        if len(each) < len(views) or len(each) < 2:
            return None
        count, ordered = self._fewest(views, now), [*each]
        to = min(ordered[:count], key=each.__getitem__)
        # One of the others computes more prompts once its last streams have moved.
        sources = [name for name in ordered[:count] if each[name] > each[to] + 1]
        sources += [name for name in ordered[count:] if each[name]]
        # A stream that moves to a worker without a free seat would wait there.
        full = (told := self.views[to].told) is not None and 0 < told.seats <= told.requests
        if full or not sources:
            self._move_at = math.inf
            return None
        self._move_at = min(self._move_at, now + _UNEVEN_S)
        if now < self._move_at:
            return None
        self._move_at = now + MOVE_S * self.peers
        # They take turns, because all streams of one may have to stay.
        self._source = next((name for name in sources if name > self._source), sources[0])
        return self._source, to

    def _by_prefix(
        self,
        prompt: Prompt,
        blocks: Mapping[str, int],
        views: Sequence[WorkerView],
        stored: int,
        more: int,
        lag: float = LAG,
    ) -> tuple[WorkerView, float, str]:
        """The policy `kv`. blocks: stored or predicted. stored: the most that one has stored."""
        # From so many leading blocks on a prefix counts.
        least = max(1.0, HIT_SHARE * prompt.tokens / prompt.block) if prompt.block else math.inf
        longest = max((blocks.get(view.instance_id, 0) for view in views), default=0)
        if longest < least:
            return *_cheapest(prompt, blocks, views, lag=lag), "no_prefix"
        # Prompts that come in one burst shall stay together: their blocks are only predicted.
        holders = list(blocks.values()).count(longest) + more
        worth = self._worth(prompt.hashes[longest - 1], holders) if stored == longest else 1.0
        view, score = _cheapest(prompt, blocks, views, least, worth, lag)
        return view, score, "prefix" if blocks.get(view.instance_id) == longest else "balance"

    def _worth(self, end: int, holders: int) -> float:
        """What a held token counts: 1, or less if many prompts were equal up to there only.

        end: hash of the last block that is held. Prompts of a conversation leave it once each."""
        seen = self._crowds.pop(end, 0)
        self._crowds[end] = seen + 1
        if len(self._crowds) > MAX_CROWDS:
            self._crowds.popitem(last=False)
        if seen * self.peers <= CROWD:
            return 1.0
        return 1.0 / (1.0 + max(0.0, seen * self.peers / holders - CROWD) / CROWD_HALF)

    def send(self, view: WorkerView, matched_tokens: int, prompt: Prompt, now: float) -> Share:
        """Count a request that goes to this worker. Returns its share of the load.

        matched_tokens: how much of the prompt the worker holds."""
        if prompt.hashes:
            self._predicted.add(view.instance_id, prompt.hashes, now)
        uncached = max(0, prompt.tokens - matched_tokens)
        blocks = -(-prompt.tokens // prompt.block) if prompt.block else 0
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


def _cheapest(
    prompt: Prompt,
    held: Mapping[str, int],
    views: Sequence[WorkerView],
    least: float = math.inf,
    worth: float = 1.0,
    lag: float = LAG,
) -> tuple[WorkerView, float]:
    """The worker where the prompt costs least, and what it costs there.

    least: leading blocks from which on they count. worth: what each of them counts.
    lag: weight of recent work."""
    block, tokens = prompt.block, prompt.tokens
    weight, all_of_it, saves = block / BLOCK_TOKENS, ALPHA * tokens, ALPHA * block * worth
    mean = sum([view.work for view in views]) / len(views)
    costs = []
    for view in views:
        has = held.get(view.instance_id, 0)
        excess = max(-LAG_TOKENS, min(LAG_TOKENS, view.work - mean))
        cost = (
            view.others_tokens
            + view.own_tokens
            + (view.others_blocks + view.own_blocks) * weight
            + all_of_it
            + lag * excess
        )
        if has >= least:
            cost -= saves * has
        if view.free_blocks is not None and tokens > (room := (has + view.free_blocks) * block):
            cost += tokens - room  # it waits until other requests have freed the rest
        costs.append(cost)
    low = min(costs)
    return views[costs.index(low)], low
