"""What a simulated run is judged by, and how fast the engines have to be for a workload."""

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
    """One run.

    hit: share of the prompt tokens that were in the worker's cache. pool: the same share, if all
    workers had one cache together and each prompt were computed at once.
    imbalance: work of the busiest worker, divided by the mean. Work is prompt tokens computed plus
    tokens generated. excess: the same as a difference, in tokens.
    stay: the imbalance of a choice that never moves a conversation, but knows all work exactly.
    ttft_p50, ttft_p90: seconds. decision_us: median time of a decision on this machine.
    redirected: share of the requests that the first worker did not take.
    """

    hit: float
    pool: float
    imbalance: float
    excess: float
    stay: float
    ttft_p50: float
    ttft_p90: float
    redirected: float
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
        redirected=sum(job.redirects for job in jobs) / len(jobs),
        decision_us=1e6 * percentile(times, 0.5),
        jobs=jobs,
    )


def work_of(job: Job, block: int) -> int:
    """Tokens that the worker computed or generated for a request."""
    return job.req.tokens - job.hit * block + job.req.output


def stay(jobs: Sequence[Job], workers: int, block: int) -> float:
    """The imbalance if each conversation stayed at one worker: the one that had the least work when
    it began."""
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
    """The requests in order of their arrival, as far as it is known before a run: without the time
    that answers take."""
    starts = starts_of(workload)
    return sorted(workload.requests, key=lambda req: starts[req.number])


def starts_of(workload: Workload) -> dict[int, float]:
    """When each request comes, in seconds, without the time that answers take."""
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
    """Engines that round robin keeps busy for a share `load` of the time.

    So a workload means the same on all: lengths and pauses of a trace fit one engine, and this is
    it. Times of requests that follow others are estimated without the time of the answers."""
    starts = starts_of(workload)
    span = max(1.0, max(starts.values()) - min(starts.values()))
    work = uncached(in_turn(workload), workload.block, workers, blocks)
    work += sum(req.output for req in workload.requests)
    return Speed(load * workers * span / work)


def joiner_share(outcome: Outcome, joins: int, workers: int, within: int) -> float:
    """New sessions that the worker that joined got, of the next `within` requests. 1: as many as
    each of `workers` workers, it included, would get."""
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
