"""Figures of a simulated run, and the speed of engines that fits a workload."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from benchmarks.report import percentile
from benchmarks.sim.cluster import Cluster, Setup
from benchmarks.sim.requests import Req, Workload
from benchmarks.sim.worker import Cache, Job, Speed


@dataclass(slots=True, frozen=True)
class Outcome:
    """The figures of one run. Work is prompt tokens computed plus tokens generated.

    hit: share of the prompt tokens that were in the worker's cache.
    pool: the same share, if all workers had one cache together and each prompt were computed at
    once.
    imbalance: work of the busiest worker, divided by the mean of all workers.
    excess: work of the busiest worker minus the mean, in tokens.
    stay: the imbalance of a reference choice (function `stay`).
    ttft_p50, ttft_p90: seconds.
    decision_us: median time of a decision on this machine, in microseconds.
    """

    hit: float
    pool: float
    imbalance: float
    excess: float
    stay: float
    ttft_p50: float
    ttft_p90: float
    decision_us: float
    jobs: Sequence[Job]


def run(workload: Workload, setup: Setup) -> Outcome:
    """Simulate a workload to its end."""
    cluster = Cluster(setup, workload).run()
    jobs, block = cluster.jobs, workload.block
    total = sum(job.req.tokens for job in jobs)
    work = [0] * len(cluster.workers)
    for job in jobs:
        work[job.worker] += work_of(job, block)
    mean = sum(work) / len(work)
    waits = [job.first_at - job.arrived for job in jobs]
    times = [seconds for frontend in cluster.frontends for seconds in frontend.times]
    return Outcome(
        hit=sum(job.hit for job in jobs) * block / total,
        pool=pool(workload, setup.workers * setup.blocks),
        imbalance=max(work) / mean,
        excess=max(work) - mean,
        stay=stay(jobs, len(work), block),
        ttft_p50=percentile(waits, 0.5),
        ttft_p90=percentile(waits, 0.9),
        decision_us=1e6 * percentile(times, 0.5),
        jobs=jobs,
    )


def work_of(job: Job, block: int) -> int:
    """Tokens that the worker computed or generated for a request."""
    return job.req.tokens - job.hit * block + job.req.output


def stay(jobs: Sequence[Job], workers: int, block: int) -> float:
    """Return the imbalance of a reference choice.

    The reference sends a new conversation to the worker with the least work so far. All its later
    requests go to the same worker. The reference knows the work of each worker exactly, while
    frontends only estimate it.
    """
    work = [0] * workers
    homes: dict[int, int] = {}
    for job in jobs:
        home = homes.get(job.req.session)
        if home is None:
            home = homes[job.req.session] = work.index(min(work))
        work[home] += work_of(job, block)
    return max(work) * workers / sum(work)


@lru_cache(maxsize=1)
def pool(workload: Workload, blocks: int) -> float:
    """Share of the prompt tokens that one cache of `blocks` blocks would hit."""
    total = sum(req.tokens for req in workload.requests)
    return 1.0 - uncached(in_turn(workload), workload.block, 1, blocks) / total


def in_turn(workload: Workload) -> list[Req]:
    """Return the requests in the order of `starts_of`."""
    starts = starts_of(workload)
    return sorted(workload.requests, key=lambda req: starts[req.number])


def starts_of(workload: Workload) -> dict[int, float]:
    """Return the estimated arrival of each request, in seconds, by its number.

    A request that follows another one arrives a pause after the end of that one's answer. The time
    of answers is not known before a run. The estimate leaves it out."""
    starts: dict[int, float] = {}
    for req in workload.requests:
        begin = starts[req.follows.number] if req.follows is not None else 0.0
        starts[req.number] = begin + req.at
    return starts


def uncached(requests: Iterable[Req], block: int, caches: int, blocks: int) -> int:
    """Prompt tokens to compute if requests go to `caches` caches in turn, one after the other."""
    pools = [Cache(blocks) for _ in range(caches)]
    missing = 0
    for number, req in enumerate(requests):
        cache, hashes = pools[number % caches], req.hashes + req.answer
        hit = min(cache.hit(req.hashes), (req.tokens - 1) // block)
        missing += req.tokens - hit * block
        if cache.admit(hashes, hit, len(hashes) - hit):
            cache.store(hashes[hit:])
            cache.release(hashes, 0)
            cache.take()
    return missing


def speed_for(workload: Workload, workers: int, blocks: int, load: float) -> Speed:
    """Return the speed at which round robin keeps the engines busy for a share `load` of the time.

    So every workload is an equal load, whatever engines its trace was recorded with. Arrivals are
    those of `starts_of`."""
    starts = starts_of(workload)
    span = max(1.0, max(starts.values()) - min(starts.values()))
    work = uncached(in_turn(workload), workload.block, workers, blocks)
    work += sum(req.output for req in workload.requests)
    return Speed(load * workers * span / work)


def joiner_share(outcome: Outcome, joins: int, workers: int, within: int) -> float:
    """Return the new worker's share of the sessions that begin after it joined.

    1: an equal share.

    joins: number of the request before which the worker joined.
    workers: number of workers with the new one, which is the last.
    within: only so many requests after `joins` count."""
    started = {job.req.session for job in outcome.jobs[:joins]}
    new = []
    for job in outcome.jobs[joins : joins + within]:
        if job.req.session not in started:
            started.add(job.req.session)
            new.append(job)
    return sum(job.worker == workers - 1 for job in new) * workers / len(new)


def computed_at(outcome: Outcome, prefix_blocks: int) -> int:
    """The most workers that computed the shared prefix of one group of siblings."""
    places: dict[int, set[int]] = defaultdict(set)
    for job in outcome.jobs:
        if job.req.group >= 0 and job.hit < prefix_blocks:
            places[job.req.group].add(job.worker)
    return max(len(found) for found in places.values())
