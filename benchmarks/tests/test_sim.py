"""The simulator of the choice of the decode worker: its parts, and a short run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.sim import workloads
from benchmarks.sim.__main__ import GROW, TRACE, run, speed_for, stay
from benchmarks.sim.cluster import Net, Setup
from benchmarks.sim.worker import Cache, Job, Speed, Worker
from benchmarks.sim.workloads import Req, Workload, trace
from pullfill.wire import DecodePolicy

SPEED = Speed(0.001, step=100.0, stream=10.0, cached=0.0, chunk=1000)


def setup_for(workload: Workload, load: float = 0.8) -> Setup:
    return Setup(DecodePolicy.KV, speed_for(workload, 4, 20_000, load))


# ------------------------------------------------------------------------------- parts


def test_the_cache_evicts_the_ends_of_what_was_released_first() -> None:
    cache = Cache(6)
    for hashes in ([1, 2, 3], [4, 5, 6]):
        assert cache.admit(hashes, 0, 3)
        cache.store(hashes)
        cache.release(hashes, 0)
    assert cache.admit([7], 0, 1)
    assert (cache.hit([1, 2, 3]), cache.hit([4, 5, 6])) == (2, 3)
    assert cache.take() == [(True, [1, 2, 3]), (True, [4, 5, 6]), (False, [3])]
    assert not cache.admit([8], 0, 6)


def finished(worker: Worker, jobs: list[Job]) -> None:
    while worker.step is not None:
        worker.finish()
    assert all(job.ended_at >= job.first_at for job in jobs)


def test_a_worker_takes_the_time_that_its_speed_says() -> None:
    worker = Worker("a", 1000, 16, SPEED)
    job = Job(Req(0, 0.0, 1500, 3, list(range(93))), 0.0)
    worker.add(job, 0.0)
    finished(worker, [job])
    # A step of 1000 prompt tokens, one of 500, then two tokens more.
    assert job.first_at == pytest.approx(1.1 + 0.6)
    assert job.ended_at == pytest.approx(1.7 + 2 * 0.11)
    again = Job(Req(1, 0.0, 1500, 1, list(range(93))), 2.0)
    worker.add(again, 2.0)
    finished(worker, [again])
    assert again.hit == 93
    assert again.first_at == pytest.approx(2.0 + 0.112)
    assert worker.cache.free == 1000


def write(path: Path, *lines: dict[str, object]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def line(at: int, tokens: int, *ids: int) -> dict[str, object]:
    return {"timestamp": at, "input_length": tokens, "output_length": 5, "hash_ids": ids}


def test_a_trace_is_read_with_its_blocks_and_sessions(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl", line(3000, 48, 1, 2, 3), line(0, 20, 1), line(3500, 40, 7, 8, 9)
    )
    workload = trace(path, block=16, grow=2)
    assert workload.block == 32
    assert [(req.at, req.tokens) for req in workload.requests] == [(0, 40), (3, 96), (3.5, 80)]
    assert [len(req.hashes) for req in workload.requests] == [1, 3, 2]
    assert workload.requests[0].hashes == workload.requests[1].hashes[:1]
    assert [req.session for req in workload.requests] == [0, 0, 2]


def test_conversations_that_stay_are_as_uneven_as_their_lengths() -> None:
    """The third begins where the least work was: after 10 and 30 tokens, at the first worker."""
    jobs = [
        Job(Req(n, 0.0, tokens, 5, [], session=session), 0.0)
        for n, (session, tokens) in enumerate([(1, 5), (2, 25), (3, 5), (1, 45), (3, 55)])
    ]
    assert stay(jobs, 2, 16) == pytest.approx(2 * 130 / 160)
    assert stay(jobs[:2], 2, 16) == pytest.approx(2 * 30 / 40)


# ------------------------------------------------------------------------------- runs


def test_one_seed_gives_one_result() -> None:
    workload = workloads.conversations(40, 30.0, seed=3)
    setup = replace(setup_for(workload), frontends=3)
    one, other = run(workload, setup), run(workload, setup)
    assert [(j.worker, j.first_at) for j in one.jobs] == [
        (j.worker, j.first_at) for j in other.jobs
    ]
    assert len(one.jobs) == len(workload.requests)


def test_kv_holds_its_numbers_on_the_trace() -> None:
    workload = trace(TRACE, block=16, grow=GROW)
    setup = setup_for(workload)
    kv, turns = run(workload, setup), run(workload, replace(setup, policy=DecodePolicy.ROUND_ROBIN))
    assert kv.hit >= 0.96 * kv.pool
    assert kv.imbalance <= 1.05
    assert kv.ttft_p90 <= 0.45 * turns.ttft_p90
    late = replace(setup, frontends=8, net=Net(events=0.5, report=0.2))
    eight = run(workload, late)
    assert eight.hit >= 0.97 * kv.hit
    assert eight.ttft_p90 <= 1.4 * kv.ttft_p90
