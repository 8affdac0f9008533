"""Forecasts how long a remote prefill takes, from the reports of prefill workers and past commits.

A forecast adds three times: the wait in the queue, the computation, and the writing of the KV. What
is not measured yet counts as 0, so the first prompts go out. For deadlines the sum is doubled, the
slowest link counts, and assumed rates replace what is not measured. A deadline that is too long
costs little: a worker that dies or falls silent is noticed by its connection.

The policy `cost` (cost.py) needs more: the time to the first token, as each prefill worker was
measured. A stretch of a prompt is told as `span(start, tokens)`: two numbers that its computation
time is linear in, one for its tokens and one for what they attend to.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.rate import FORGET_S, Rate
from pullfill.wire import Load, RouterConfig, StageTimings

# No remote prefill may take longer, whatever is expected.
MAX_TIMEOUT_S = 3600.0
# A deadline is this many times the expected time.
MARGIN = 2.0
ASSUMED_TOKENS_PER_S = 2_000.0
# The rate of a link that is not measured yet: 1 Gbit/s.
ASSUMED_BYTES_PER_S = 125e6
# How long a measured link keeps prompts here. After a bad measurement no long job would go there
# and measure it again. Each one that does may take minutes.
BELIEVE_LINK_S = 10 * FORGET_S
# Decisions ignore a link with fewer writes. Otherwise a single slow one would keep all long
# prompts local for BELIEVE_LINK_S.
_SURE = 3
# How many prefill workers are remembered.
_MOST = 4096

Span = tuple[float, float]


def span(start: int, tokens: int) -> Span:
    """Return the two numbers for `tokens` tokens that follow `start` others. See the module."""
    return tokens / 256.0, tokens * (start + tokens / 2.0) / 262_144.0


# Speeds are compared at a prompt of this length.
_USUAL = span(0, 1024)


class Forecast(msgspec.Struct, frozen=True):
    """How long one remote prefill is expected to take, in seconds. 0: unknown."""

    wait_s: float = 0.0  # in the queue
    prefill_s: float = 0.0  # the computation by a prefill worker
    write_s: float = 0.0  # the writing of the KV, which happens during the computation
    # claim_within_s, commit_within_s: the least time, from the moment it is queued, that the
    # deadlines for its claim and its commit must allow.
    claim_within_s: float = 0.0
    commit_within_s: float = 0.0


def timeouts(forecast: Forecast, config: RouterConfig) -> tuple[float, float]:
    """Return (remote, claim): how long a job may take until its commit, and until its claim.

    It gets at least what the settings say, and more if the forecast is longer. Pure."""
    remote = max(config.remote_timeout_s, forecast.commit_within_s)
    return min(remote, MAX_TIMEOUT_S), max(config.claim_timeout_s, forecast.claim_within_s)


class Queue(msgspec.Struct, frozen=True):
    """What the job of a prompt would meet."""

    instances: Collection[str] = ()  # the prefill workers that pull and are connected
    workers: int = 1  # how many pull in all
    # jobs, tokens: in front of it, those in work included.
    jobs: int = 0
    tokens: int = 0
    blocks: int = 0  # to be written for it

    def ahead(self, ours: Span, our_tokens: int, our_jobs: int, own: Span) -> Span:
        """Return the part of the work in front that one prefill worker must do first.

        ours, our_tokens, our_jobs: of this worker's own jobs. own: of the prompt."""
        workers = max(1, self.workers)
        if max(self.jobs, our_jobs) < workers:
            return 0.0, 0.0  # one of them is free
        # Nobody says how long the prompts of other decode workers are. They are taken to be like
        # ours, or to be as long as this one.
        like = ours if ours[0] else own
        others = max(0, self.tokens - our_tokens) / 256.0
        attend = others * like[1] / like[0] if like[0] else 0.0
        return (ours[0] + others) / workers, (ours[1] + attend) / workers


class Measured(msgspec.Struct, frozen=True):
    """A remote prefill that was committed."""

    request_id: str
    instance: str
    stages: StageTimings
    at: float  # when, in seconds of a monotonic clock


class _Worker:
    """What was measured of one prefill worker, in seconds.

    compute: from the moment a job could begin, over its span. write: of blocks.
    more: of everything else: claim, last write, commit, last token."""

    __slots__ = ("compute", "more", "write")

    def __init__(self) -> None:
        self.compute, self.write, self.more = Rate(), Rate(), Rate()


class PrefillWorkers:
    """See the module. Call `wrote` on the asyncio thread, all others on the engine thread."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._workers: dict[str, _Worker] = {}

    def _worker(self, instance_id: str) -> _Worker:
        if len(self._workers) >= _MOST:
            self._workers = {}
        return self._workers.setdefault(instance_id, _Worker())

    def wrote(self, instance_id: str, blocks: int, seconds: float) -> None:
        """Note that a prefill worker has written `blocks` blocks in `seconds`."""
        if blocks > 0 and 0 < seconds < math.inf:
            write = self._worker(instance_id).write
            write.observe(blocks, 0.0, seconds, self._clock.monotonic())

    # ------------------------------------------------------------------ by reports

    def forecast(
        self,
        tokens: int,
        blocks: int,
        kv_bytes: float,
        *,
        workers: int,
        loads: Sequence[Load],
        depth_tokens: int,
        own_tokens: int,
        own_unwritten: int = 0,
        pulling: Collection[str] | None = None,
    ) -> Forecast:
        """Forecast the remote prefill of one prompt.

        tokens, blocks, kv_bytes: how much of the prompt must be computed and written.
        workers: number of prefill workers that pull.
        loads: the reports of those that are connected.
        depth_tokens: tokens of all jobs in the queue, including those in work.
        own_tokens: tokens of our own jobs that nobody has claimed.
        own_unwritten: blocks of claimed jobs of ours that are not written yet.
        pulling: instance ids of the prefill workers that may get the job. Decisions count no other
        links: a slow one may be of a worker that is gone. None: all links.
        """
        rates = [load.tokens_per_s for load in loads if load.tokens_per_s > 0]
        each = sum(rates) / len(rates) if rates else 0.0
        done = sum(load.done_tokens for load in loads)
        if workers > len(loads) > 0:
            done = done * workers // len(loads)
        ahead, many = max(depth_tokens - done, own_tokens, 0), max(1, workers)
        now, slowest, links = self._clock.monotonic(), 0.0, list[float]()
        for name, worker in list(self._workers.items()):
            link = worker.write
            if link.fresh(now, MAX_TIMEOUT_S):  # its worker may be gone by then
                slowest = max(slowest, link.a)
            if (pulling is None or name in pulling) and link.count >= _SURE:
                if link.fresh(now, BELIEVE_LINK_S):
                    links.append(link.a)
        per_block_s = sum(links) / len(links) if links else 0.0
        wait_s = ahead / (each * workers) if each and workers else 0.0
        # KV that is computed but not written yet is also in front of it. It delays the job in the
        # prefill worker, or before it, while the worker has no credit left for us (its `Credits`).
        wait_s = max(wait_s, own_unwritten * per_block_s / many)
        sure = each or ASSUMED_TOKENS_PER_S
        wait_at_most = MARGIN * max(ahead / (sure * many), own_unwritten * slowest)
        write_at_most = blocks * slowest or kv_bytes / ASSUMED_BYTES_PER_S
        return Forecast(
            wait_s=wait_s,
            prefill_s=tokens / each if each else 0.0,
            write_s=blocks * per_block_s,
            claim_within_s=wait_at_most,
            commit_within_s=wait_at_most + MARGIN * (tokens / sure + write_at_most),
        )

    # ------------------------------------------------------------------ by measurement

    def observe(self, done: Measured, ahead: Span, own: Span, began: float, now: float) -> None:
        """Learn from one remote prefill, at its first token.

        ahead, own: spans of what was in front of it when it was decided, and of itself.
        began: when the computation of all this began."""
        stages, worker = done.stages, self._worker(done.instance)
        # Everything until the end of the computation, without the way of the claim.
        compute = done.at - began - (stages.tail_ms + stages.claim_ms) / 1e3
        # Writing happens during the computation. Only what takes longer counts beside it.
        beside = max(0.0, stages.kv_write_ms - stages.prefill_ms) / 1e3
        worker.compute.observe(ahead[0] + own[0], ahead[1] + own[1], max(0.0, compute), now)
        worker.more.observe(1.0, 0.0, max(0.0, now - began - compute - beside), now)

    def _measured(self, instances: Collection[str]) -> list[_Worker]:
        found = (self._workers.get(name) for name in instances)
        return [worker for worker in found if worker is not None and worker.compute.count]

    def known(self, instances: Collection[str]) -> bool:
        """Whether one of these workers was measured."""
        return bool(self._measured(instances))

    def fresh(self, instances: Collection[str], now: float) -> bool:
        """Whether one of these workers was measured lately."""
        return any(worker.compute.fresh(now) for worker in self._measured(instances))

    def fastest(self, instances: Collection[str]) -> tuple[float, float]:
        """Return the seconds for each of the two numbers of a span, of the fastest worker.
        Zeros: none is known."""
        fits = [
            (of, worker.compute.a, worker.compute.b)
            for worker in self._measured(instances)
            if (of := worker.compute.of(*_USUAL)) > 0
        ]
        _, a, b = min(fits, default=(0.0, 0.0, 0.0))
        return a, b

    def seconds(
        self, queue: Queue, ahead: Span, own: Span, now: float, done_s: float = 0.0
    ) -> float:
        """Expected seconds from the decision to the first token, over the workers that pull.

        done_s: how long the computation of what is ahead has been going on.
        A worker that was not measured lately counts like the others. If none was, the old
        measurements count. 0: there is none."""
        known = self._measured(queue.instances)
        lately = [worker for worker in known if worker.compute.fresh(now)] or known
        total = weights = 0.0
        for worker in lately:
            alone = worker.compute.of(*own)
            compute = worker.compute.of(ahead[0] + own[0], ahead[1] + own[1])
            compute = max(alone, compute - done_s)
            # A link that is slower than the computation decides.
            seconds = compute + max(0.0, worker.write.of(queue.blocks) - alone) + worker.more.a
            # A fast worker pulls more jobs than a slow one.
            weight = 1.0 / max(alone, 1e-6)
            total += weight * seconds
            weights += weight
        return total / weights if weights else 0.0
