"""Learns how fast this engine, each prefill worker and each link are, for `router.policy = cost`.

Every worker has rates of its own. They follow a change within seconds of new observations
(cost_fit.py). What was not observed for FORGET_S is no longer believed, so that one bad measurement
cannot keep prompts away from a worker for ever.

A stretch of a prompt is told as `span(start, tokens)`: two numbers that its computation time is
linear in, one for its tokens and one for what they attend to.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from pullfill.decode_worker.cost_fit import Fit

FORGET_S = 30.0
_MOST = 4096
"""How many prefill workers are remembered."""
_ASKED = 32
"""One prediction looks at fewer than twice as many workers. If there are more, it takes every
second one, every third one, and so on."""
_MIB = float(1 << 20)

Span = tuple[float, float]


def span(start: int, tokens: int) -> Span:
    """Return the two numbers for `tokens` tokens that follow `start` others. See the module."""
    return tokens / 256.0, tokens * (start + tokens / 2.0) / 262_144.0


_USUAL = span(0, 1024)
"""Speeds are compared at a prompt of this length."""


class LocalRates:
    """This worker's own engine. Engine thread.

    A step takes a time that grows with the number of streams, and more if it computes prompts."""

    def __init__(self) -> None:
        self._decode = Fit(keep=0.98, half_s=5.0)
        self._prefill = Fit(keep=0.9, half_s=5.0)
        self._least, self._most = 0, 0  # streams of a step

    def step(self, streams: int, computed: Span, seconds: float, now: float) -> None:
        """Learn from one step. streams: requests that got one token in it."""
        if computed[0] <= 0:
            if streams:
                self._decode.observe(1.0, streams / 8.0, seconds, now)
                self._least = min(self._least or streams, streams)
                self._most = max(self._most, streams)
        else:
            self._prefill.observe(*computed, max(0.0, seconds - self.base(streams)), now)

    def assume(self, each: tuple[float, float], now: float) -> None:
        """Believe that prompts are computed as fast as `each` says (`RemoteRates.each`), unless
        they were measured lately.

        Without this, a worker that computes no prompt would never learn that it could. An old
        measurement counts if it is faster. each: zeros if no prefill worker is known."""
        fit = self._prefill
        known = each[0] * _USUAL[0] + each[1] * _USUAL[1]
        if not fit.count or (now - fit.at > FORGET_S and 0 < known < fit.of(*_USUAL)):
            fit.a, fit.b = each

    def base(self, streams: int) -> float:
        """Seconds of a step that only decodes."""
        return self._decode.of(1.0, streams / 8.0)

    @property
    def alone(self) -> float:
        """Seconds of a step that only decodes, for one stream.

        0 if unknown: all steps so far had the same number of streams, and that was not one."""
        return self.base(1) if self._least == 1 or self._least < self._most else 0.0

    def work(self, of: Span) -> float:
        """Seconds that the computation of a span adds to steps."""
        return self._prefill.of(*of)

    def fits(self, seconds: float, start: int) -> float:
        """How many tokens that follow `start` others can be computed in so many seconds."""
        each = self._prefill.of(1 / 256.0, start / 262_144.0)
        return seconds / each if each > 0 else math.inf


@dataclass(slots=True)
class _Worker:
    """One prefill worker, and the link to it.

    compute: seconds from the moment a job could begin, over its span.
    more: seconds of everything else: claim, last write, commit, last token.
    links: seconds per MiB, by transport."""

    compute: Fit = field(default_factory=lambda: Fit(keep=0.7, half_s=8.0))
    more: Fit = field(default_factory=lambda: Fit(keep=0.7, half_s=8.0))
    links: dict[str, Fit] = field(default_factory=dict)

    @property
    def at(self) -> float:
        return self.compute.at


@dataclass(frozen=True, slots=True)
class Handoff:
    """What was measured of one remote prefill, in seconds.

    ahead, own: spans of what was in front of it, and of itself.
    compute: waiting and computation. write: of its KV. more: see `_Worker`."""

    instance: str
    transport: str
    ahead: Span
    own: Span
    kv_bytes: int
    compute_s: float
    write_s: float
    more_s: float


@dataclass(frozen=True, slots=True)
class Queue:
    """What a remote prefill would meet.

    instances: the prefill workers that pull and are connected. workers: how many pull in all.
    jobs: jobs in front, those in work included. ahead: the span of their tokens."""

    instances: Collection[str]
    workers: int
    jobs: int
    ahead: Span

    @property
    def share(self) -> Span:
        """The part of `ahead` that one of the workers must compute first."""
        if self.jobs < self.workers:
            return 0.0, 0.0  # one of them is free
        return self.ahead[0] / max(1, self.workers), self.ahead[1] / max(1, self.workers)


class RemoteRates:
    """All prefill workers that have worked for us. Engine thread."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}

    def observe(self, done: Handoff, now: float) -> None:
        """Learn from one remote prefill."""
        if len(self._workers) >= _MOST:
            self._workers = {}
        worker = self._workers.setdefault(done.instance, _Worker())
        x1, x2 = done.ahead[0] + done.own[0], done.ahead[1] + done.own[1]
        worker.compute.observe(x1, x2, done.compute_s, now)
        worker.more.observe(1.0, 0.0, done.more_s, now)
        if done.kv_bytes:
            link = worker.links.setdefault(done.transport, Fit(keep=0.7, half_s=8.0))
            link.observe(done.kv_bytes / _MIB, 0.0, done.write_s, now)

    def known(self, instances: Collection[str]) -> bool:
        return any(name in self._workers for name in instances)

    def fresh(self, instances: Collection[str], now: float) -> bool:
        """Whether one of these workers was measured lately."""
        return any(
            (worker := self._workers.get(name)) is not None and now - worker.at < FORGET_S
            for name in instances
        )

    def each(self, instances: Collection[str]) -> tuple[float, float]:
        """Return the seconds for each of the two numbers of a span, of the fastest worker.
        Zeros: none is known."""
        known = [w.compute for name in instances if (w := self._workers.get(name)) is not None]
        fits = [(of, fit.a, fit.b) for fit in known if (of := fit.of(*_USUAL)) > 0]
        _, a, b = min(fits, default=(0.0, 0.0, 0.0))
        return a, b

    def seconds(self, queue: Queue, own: Span, kv_bytes: float, now: float) -> float:
        """Expected seconds from the decision to the first token, over the workers that pull.

        A worker that was not measured lately counts like the others. If none was, the old
        measurements count. 0: there is none."""
        known = [w for name in queue.instances if (w := self._workers.get(name)) is not None]
        lately = [w for w in known if now - w.at < FORGET_S] or known
        lately = lately[:: max(1, len(lately) // _ASKED)]
        if not lately:
            return 0.0
        total = weights = 0.0
        wait = queue.share
        whole = wait[0] + own[0], wait[1] + own[1]
        for worker in lately:
            compute, alone = worker.compute.of(*whole), worker.compute.of(*own)
            mib = kv_bytes / _MIB
            # The KV is written while the next chunk is computed. A link that is slower decides.
            write = max((link.of(mib, 0.0) for link in worker.links.values()), default=0.0)
            seconds = compute + max(0.0, write - alone) + worker.more.of(1.0, 0.0)
            # A fast worker pulls more jobs than a slow one.
            weight = 1.0 / max(alone, 1e-6)
            total += weight * seconds
            weights += weight
        return total / weights


class Bias:
    """How far predictions of one kind were off lately, as a factor. Forgotten over FORGET_S."""

    __slots__ = ("_at", "_log")

    def __init__(self) -> None:
        self._log = self._at = 0.0

    def factor(self, now: float) -> float:
        return math.exp(self._left(now))

    def observe(self, actual: float, expected: float, now: float) -> None:
        """expected: without this factor."""
        if actual <= 0 or expected <= 0:
            return
        off: float = min(2.0, max(-2.0, math.log(actual / expected)))
        self._log, self._at = 0.7 * self._left(now) + 0.3 * off, now

    def _left(self, now: float) -> float:
        left: float = 0.5 ** (max(0.0, now - self._at) / FORGET_S)
        return self._log * left
