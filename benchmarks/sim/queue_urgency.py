"""The order of the queue when the load exceeds what the prefill workers can compute: `make sim`.

The production code chooses lanes and turns (queue/urgency.py) and tells decode workers how long the
queue is (queue/depth.py). Prefill workers and time are simulated. If no prefill worker takes a job
within CLAIM_S, its decode worker removes the job from the queue and computes the prompt itself.

    tight    up to 2,000 tokens, 0.5 s to the first token
    normal   up to 8,000 tokens, 3 s
    loose    up to 12,000 tokens, 30 s

A prefill worker that has begun a job is not interrupted.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.report import Row, finish, row
from benchmarks.sim.world import World
from pullfill.prefill_worker.puller import budget_of
from pullfill.queue.depth import DepthCache, Snapshot
from pullfill.queue.producer import STEADY_REFRESH_S
from pullfill.queue.urgency import LANES, Lane, Turns, Urgency, lane_of, urgency_of
from pullfill.wire import RouterConfig

SECONDS = 300.0
SPEED = 40_000.0
"""Tokens per second of a prefill worker."""
WORKERS = (1, 2, 4, 16, 64)
EACH_S = 0.01
"""Seconds of work per job, whatever its length."""
CLAIM_S = RouterConfig().claim_timeout_s
BUDGET = budget_of(8192)
TARGET_MS = {Urgency.TIGHT: 500.0, Urgency.NORMAL: 3000.0, Urgency.LOOSE: 30_000.0}
LENGTHS = {Urgency.TIGHT: (520, 2000), Urgency.NORMAL: (520, 8000), Urgency.LOOSE: (2000, 12_000)}
SHARES = {Urgency.TIGHT: 0.3, Urgency.NORMAL: 0.4, Urgency.LOOSE: 0.3}
"""Share of each urgency in the offered work."""
_TIGHT = tuple(lane for lane in LANES if lane.urgency is Urgency.TIGHT)


@dataclass(slots=True)
class Job:
    """A prompt for a prefill worker.

    seq: number of its message in the queue, from 1.
    at, done_at: time of its arrival and of its end, in seconds.
    asker: number of its decode worker.
    lane: where it waits. None: no job waited when it was published, or `fifo` is set.
    taken: a prefill worker has pulled it.
    gone: its decode worker has taken it back."""

    seq: int
    at: float
    tokens: int
    urgency: Urgency
    asker: int
    lane: Lane | None = None
    taken: bool = False
    gone: bool = False
    done_at: float = float("inf")

    @property
    def in_time(self) -> bool:
        """Whether its first token comes within the target of its request."""
        return self.done_at - self.at <= TARGET_MS[self.urgency] / 1e3


@dataclass(slots=True)
class Worker:
    """A prefill worker. It computes its jobs one after another, the most urgent first.

    turns: which lane it pulls from next.
    tokens: prompt tokens of the jobs that it has pulled and not finished.
    job: the job that it computes.
    pulled: the jobs that it has pulled and not begun."""

    turns: Turns = field(default_factory=Turns)
    tokens: int = 0
    job: Job | None = None
    pulled: list[Job] = field(default_factory=list)


class Queue:
    """The job queue, its prefill workers, and as many decode workers.

    fifo: without lanes, in order of arrival. For comparison."""

    def __init__(self, workers: int, *, fifo: bool) -> None:
        self._world = World()
        self.workers = [Worker() for _ in range(workers)]
        self._fifo = fifo
        self._caches = [DepthCache(self._world) for _ in range(workers)]
        self._waiting: dict[Lane | None, deque[Job]] = defaultdict(deque)
        self._jobs = self._in_flight = self._last_seq = 0

    def run(self, jobs: Sequence[Job], until: float) -> None:
        """Simulate up to a time."""
        self._at(0.0, self._refresh)
        for job in jobs:
            self._at(job.at, self._publish, job)
        self._world.run(until)

    def _at(self, when: float, what: Callable[..., None], *args: object) -> None:
        """Call `what` at a time. Then decode workers take jobs back, and prefill workers pull."""

        def happen() -> None:
            what(*args)
            self._take_back()
            self._pull()

        self._world.at(when, happen)

    def _pull(self) -> None:
        for worker in sorted(self.workers, key=lambda one: one.tokens):
            while self._room(worker) and (job := self._next(worker)) is not None:
                self._take(worker, job)

    def _publish(self, job: Job) -> None:
        cache = self._caches[job.asker]
        lane = lane_of(job.urgency, job.tokens) if cache.waiting and not self._fifo else None
        cache.published(job.seq, job.tokens)
        self._last_seq = job.seq
        job.lane = lane
        self._waiting[lane].append(job)
        self._jobs += 1
        if lane is not None:
            for worker in self.workers:
                worker.turns.fill(lane)

    def _room(self, worker: Worker) -> bool:
        """Whether the worker may pull, by the rules of prefill_worker/puller.py."""
        if worker.tokens < BUDGET:
            return True
        if self._fifo or not worker.pulled or worker.tokens >= 2 * BUDGET:
            return False
        if not any(self._waiting[lane] for lane in _TIGHT):
            return False
        lane = worker.turns.next()
        return lane in _TIGHT and bool(self._waiting[lane])

    def _next(self, worker: Worker) -> Job | None:
        if self._waiting[None]:
            return self._waiting[None].popleft()
        while (lane := worker.turns.next()) is not None:
            if waiting := self._waiting[lane]:
                return waiting.popleft()
            worker.turns.empty(lane)
        return None

    def _take(self, worker: Worker, job: Job) -> None:
        self._in_flight += 1
        self._caches[job.asker].claimed(job.seq)
        worker.turns.took(job.urgency, job.tokens, job.lane)
        job.taken = True
        worker.tokens += job.tokens
        worker.pulled.append(job)
        self._begin(worker)

    def _begin(self, worker: Worker) -> None:
        if worker.pulled and worker.job is None:
            job = min(worker.pulled, key=lambda one: 0 if self._fifo else one.urgency)
            worker.pulled.remove(job)
            worker.job = job
            self._at(self._world.now + EACH_S + job.tokens / SPEED, self._end, worker, job)

    def _end(self, worker: Worker, job: Job) -> None:
        worker.job = None
        self._begin(worker)
        self._jobs -= 1
        self._in_flight -= 1
        self._caches[job.asker].cancelled(job.seq, job.tokens)
        worker.tokens -= job.tokens
        job.done_at = self._world.now

    def _take_back(self) -> None:
        """Remove the jobs that no prefill worker has claimed in time, as decode workers do."""
        for waiting in self._waiting.values():
            while waiting and self._world.now - waiting[0].at > CLAIM_S:
                job = waiting.popleft()
                job.gone = True
                self._jobs -= 1
                self._caches[job.asker].cancelled(job.seq, job.tokens)

    def _refresh(self) -> None:
        """Tell all decode workers the true depth. Repeats itself every STEADY_REFRESH_S."""
        self._at(self._world.now + STEADY_REFRESH_S, self._refresh)
        snapshot = Snapshot(self._jobs, 0, self._in_flight, 0.0, self._last_seq, "sim")
        for cache in self._caches:
            cache.store(snapshot, self._world.now)


def asks(workers: int, load: float, seconds: float, seed: int) -> list[Job]:
    """Return random jobs, in order of arrival.

    load: their work, divided by what the workers can compute."""
    rng = random.Random(seed)
    config = RouterConfig()
    found = []
    for urgency, share in SHARES.items():
        low, high = LENGTHS[urgency]
        mean = (low + high) / 2
        rate = load * share * workers / (mean / SPEED + EACH_S)
        at = 0.0
        while (at := at + rng.expovariate(rate)) < seconds:
            named = urgency_of(TARGET_MS[urgency], config.tight_ttft_ms, config.loose_ttft_ms)
            found.append(Job(0, at, rng.randint(low, high), named, rng.randrange(workers)))
    found.sort(key=lambda job: job.at)
    for seq, job in enumerate(found, 1):
        job.seq = seq
    return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of one run, by urgency.

    in_time: share of the jobs whose first token came within their target.
    work: share of all tokens that prefill workers took."""

    in_time: dict[Urgency, float]
    work: dict[Urgency, float]


def simulate(
    workers: int, load: float, fifo: bool = False, seconds: float = SECONDS, seed: int = 1
) -> Outcome:
    """Run once.

    Jobs of the last 30 s do not count, because the run may end before the time of their targets."""
    jobs = asks(workers, load, seconds, seed)
    Queue(workers, fifo=fifo).run(jobs, seconds)
    counted = [job for job in jobs if job.at < seconds - 30.0]
    in_time, work = {}, {}
    total = sum(job.tokens for job in counted if job.taken)
    for urgency in Urgency:
        mine = [job for job in counted if job.urgency is urgency]
        in_time[urgency] = sum(job.in_time for job in mine) / len(mine)
        taken = sum(job.tokens for job in mine if job.taken)
        work[urgency] = taken / total
    return Outcome(in_time, work)


def rows(load: float, seed: int, seconds: float = SECONDS) -> list[Row]:
    """Return rows that compare order by urgency with order of arrival, for each of WORKERS."""
    found = []
    for workers in WORKERS:
        run, fifo = (simulate(workers, load, fifo, seconds, seed) for fifo in (False, True))
        label = f"{load:g}x load, {workers} prefill worker{'s' * (workers > 1)}"
        for urgency in Urgency:
            least = 0.95 if urgency is Urgency.TIGHT else None
            metric = f"{label}: {urgency.label} in time"
            found.append(row(metric, run.in_time[urgency], "", at_least=least))
            found.append(row(f"{metric}, in order of arrival", fifo.in_time[urgency], ""))
        found.append(row(f"{label}: share of loose", run.work[Urgency.LOOSE], "", at_least=0.10))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sim.queue_urgency",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--load", type=float, default=1.2, help="of what the workers can compute")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write results/sim-queue.json and .md")
    options = parser.parse_args(argv)
    return finish(
        "sim-queue",
        rows(options.load, options.seed),
        quiet=True,  # nothing depends on the machine
        save=options.save,
        title="Urgency in the queue, simulated",
        more="Written by `make sim`. All figures are simulated; the seed decides.",
    )


if __name__ == "__main__":
    raise SystemExit(main())
