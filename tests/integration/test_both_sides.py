"""Workers with both sides (`pullfill worker`): each decodes, and prefills for the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, Worker, until
from tests.support.load import Load
from tests.support.oracle import Oracle

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def both(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One worker with both sides. Every prompt goes to the other one, if there is one. Streams
    leave time for every step: the target is 10 s between two tokens."""
    with Cluster(tmp_path_factory.mktemp("both"), model_path) as cluster:
        cluster.start("worker", "frontend")
        cluster.set_router(policy="always_remote", max_queue_wait_s=3600, itl_ms=10_000)
        yield cluster


@pytest.fixture
def other(both: Cluster) -> Worker:
    """The second worker. The test ends it."""
    return both.add("worker")


def states(cluster: Cluster, worker: Worker) -> set[tuple[str, str]]:
    """(role, state) of each record of the worker."""
    rows = cluster.status()["workers"]
    return {(row["role"], row["state"]) for row in rows if row["pid"] == worker.pid}


def each_does_both(load: Load, *workers: Worker) -> bool:
    """Whether each has answered some requests, and prefilled some prompts of others."""
    roles = ("decode_instance", "prefill_instance")
    done = Counter((role, told.get(role)) for told in load.told() for role in roles)
    return all(done[role, one.instance_id] > 2 for one in workers for role in roles)


@pytest.mark.essential
def test_a_worker_that_is_both_decodes_and_prefills(
    both: Cluster, other: Worker, oracle: Oracle
) -> None:
    """SIGTERM drains both sides under load, and fails no request."""
    first = both.of("worker")[0]
    ready = {("decode", "ready"), ("prefill", "ready")}
    until(lambda: states(both, other) == ready, 20, "its self-checks have passed")
    with Load(both, seed=3200) as load:
        until(lambda: each_does_both(load, first, other), 60, "both do both")
        assert other.stop() == 0
        load.more(5)
    load.check(oracle)
    until(lambda: states(both, other) == set(), 20, "it is gone")
    assert set(both.records("decode")) == set(both.records("prefill")) == {first.instance_id}
    both.assert_clean()
    assert not both.log_errors()


@pytest.mark.essential
def test_a_worker_that_is_killed_takes_no_request_with_it(
    both: Cluster, other: Worker, oracle: Oracle
) -> None:
    """Its own streams go on at the other worker, which also computes the prompts that it had."""
    with Load(both, seed=43_000, threads=6, max_tokens=24) as load:
        until(lambda: each_does_both(load, other), 60, "it does both")
        other.kill()
        load.more(12)
    load.check(oracle)
    assert any(other.instance_id in told["migrated_from"] for told in load.told())
    until(lambda: len(both.incarnations()) == 1, 20, "its leases are gone")
    both.assert_clean()


@pytest.mark.essential
def test_streams_move_to_a_worker_that_joins(both: Cluster, oracle: Oracle) -> None:
    """And their answers stay those of one engine."""
    first, moves = both.of("worker")[0], "pullfill_frontend_migrated_total"
    both.set_router(decode_policy="pack")
    first.arm("engine.step=sleep:0.1")  # no answer ends before the other worker has joined
    with Load(both, seed=3500, threads=16, lengths=(300,), max_tokens=300) as load:
        before = both.counter(moves, result="sent")
        other = both.add("worker")
        until(lambda: both.counter(moves, result="sent") > before, 60, "a stream moves")
        first.arm("")
    load.check(oracle)
    moved = {tuple(told["migrated_from"]) for told in load.told()} - {()}
    assert moved <= {(first.instance_id,), (other.instance_id,)}
    assert (first.instance_id,) in moved
    both.assert_clean()
    both.set_router(decode_policy="kv")
    assert other.stop() == 0


@pytest.mark.long
def test_a_worker_with_two_ranks_does_both(both: Cluster, oracle: Oracle) -> None:
    """The main process copies for all ranks, for both sides."""
    ranked = both.launch("worker", "--tensor-parallel-size=2")
    both.wait_ready(ranked, within_s=200)
    with Load(both, seed=3050) as load:
        until(lambda: each_does_both(load, ranked), 60, "it does both")
    load.check(oracle)
    both.assert_clean()
    assert ranked.stop() == 0
