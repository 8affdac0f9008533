"""Simulates the choice of the decode worker: `make sim`.

The decisions are made by the code of the frontend, over the index of blocks that it uses. Workers,
network and time are simulated (worker.py, cluster.py). The same seed gives the same figures. Only
the time of a decision depends on the machine. 1,000 workers take minutes.

The speed of the engines is chosen for each workload: round robin keeps them busy for a share --load
of the time. Writes results/sim.md. Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from benchmarks.report import Row, finish, percentile, row, versus
from benchmarks.sim import workloads
from benchmarks.sim.cluster import Cluster, Net, Setup
from benchmarks.sim.worker import Cache, Job, Speed
from benchmarks.sim.workloads import Req, Workload
from pullfill.wire import DecodePolicy

TRACE = Path(__file__).parents[1] / "traces" / "mini_synthetic.jsonl"
GROW = 32
"""Our trace has the lengths of the trace that it was made from, divided by this factor."""
RR = "round robin"
STALE_S = 0.5
"""How far frontends are behind in the runs with old figures: ten times `LOAD_S`."""
REFERENCE = "a choice that knows all work and moves no conversation"
OVER_REFERENCE = 1.1
"""Target: the imbalance is at most this many times that of the reference (`measures.stay`)."""
EACH = 100
"""Conversations per worker."""
CONVERSATIONS = 10_000
"""Most conversations of a run. With 1,000 workers, that is 10 per worker. More take many minutes.
"""


@dataclass(slots=True, frozen=True)
class Outcome:
    """The figures of one run. Work is prompt tokens computed plus tokens generated.

    hit: share of the prompt tokens that were in the worker's cache.
    pool: the same share, if all workers had one cache together and each prompt were computed at
    once.
    imbalance: work of the busiest worker, divided by the mean of all workers.
    stay: the imbalance of a reference choice (function `stay`).
    ttft_p90: seconds.
    decision_us: median time of a decision on this machine, in microseconds.
    """

    hit: float
    pool: float
    imbalance: float
    stay: float
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
        stay=stay(jobs, len(work), block),
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sim",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--trace", type=Path, default=TRACE, help="JSON lines, Mooncake's format")
    add("--block", type=int, default=16, help="tokens per block of the trace")
    add("--grow", type=int, default=GROW, help="factor for lengths and blocks of the trace")
    add("--sizes", type=int, nargs="*", default=[4, 64, 1000], help="clusters of so many workers")
    add("--blocks", type=int, default=20_000, help="KV blocks of each worker")
    add("--load", type=float, default=0.8, help="how busy round robin keeps the engines")
    add("--seed", type=int, default=1)
    add("--no-save", action="store_true", help="print only")
    options = parser.parse_args(argv)
    rows = trace_rows(options)
    for workers in options.sizes:
        rows += size_rows(workers, options)
    return finish(
        "sim",
        rows,
        quiet=True,  # nothing but the time of a decision depends on the machine
        save=not options.no_save,
        title="The choice of the decode worker, simulated",
        more="Written by `make sim`. Hit, imbalance and TTFT are simulated; the seed decides.",
    )


def _setup(workload: Workload, options: argparse.Namespace, workers: int = 4) -> Setup:
    speed = speed_for(workload, workers, options.blocks, options.load)
    return Setup(DecodePolicy.KV, speed, workers, options.blocks, seed=options.seed)


def _both(label: str, workload: Workload, setup: Setup, held: bool) -> tuple[Outcome, list[Row]]:
    """Compare the policy kv with one cache for all workers, and with round robin.

    held: the rows have targets."""
    kv = run(workload, setup)
    turns = run(workload, replace(setup, policy=DecodePolicy.ROUND_ROBIN))
    hit, even, p90 = (0.96, 1.05, 0.45) if held else (None, None, None)
    rows = [
        versus(f"{label}: hit", kv.hit, "", "one cache", kv.pool, at_least=hit),
        row(f"{label}: hit, {RR}", turns.hit, ""),
        row(f"{label}: imbalance", kv.imbalance, "", at_most=even),
        row(f"{label}: imbalance, {RR}", turns.imbalance, ""),
        versus(f"{label}: TTFT p90", kv.ttft_p90, "s", RR, turns.ttft_p90, at_most=p90),
    ]
    return kv, rows


def trace_rows(options: argparse.Namespace) -> list[Row]:
    """Compare 4 workers with one cache and with round robin, then 8 frontends with one."""
    workload = workloads.trace(options.trace, block=options.block, grow=options.grow)
    label = f"{workload.name}, 4 workers"
    setup = _setup(workload, options)
    one, rows = _both(label, workload, setup, held=True)
    eight, peer = replace(setup, frontends=8), "1 frontend"
    stale = replace(eight, net=Net(events=STALE_S, report=STALE_S))
    for frontends, each in (("8 frontends", eight), (f"8 frontends, {STALE_S:g} s behind", stale)):
        name, many = f"{label}, {frontends}", run(workload, each)
        rows += [
            versus(f"{name}: hit", many.hit, "", peer, one.hit, at_least=0.97),
            versus(f"{name}: TTFT p90", many.ttft_p90, "s", peer, one.ttft_p90, at_most=1.4),
        ]
    return rows


def size_rows(workers: int, options: argparse.Namespace) -> list[Row]:
    """Simulate EACH conversations per worker, but at most CONVERSATIONS in all.

    With few conversations per worker, a single long conversation makes its worker the busiest. When
    a conversation begins, nobody knows how long it will become. So the target compares the
    imbalance with that of a reference choice (`measures.stay`), not with 1."""
    count = min(EACH * workers, CONVERSATIONS)
    workload = workloads.conversations(
        count, 300.0, seed=options.seed, prompts=max(20, workers), turns=4.0
    )
    setup = _setup(workload, options, workers)
    label = f"conversations, {workers} workers, {count / workers:g} each"
    kv, rows = _both(label, workload, setup, held=False)
    rows.append(
        versus(f"{label}: imbalance", kv.imbalance, "", REFERENCE, kv.stay, at_most=OVER_REFERENCE)
    )
    rows.append(row(f"{label}: time of a decision, median", kv.decision_us, "us", at_most=100.0))
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
