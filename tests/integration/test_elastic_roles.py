"""A running worker changes its role, without a failed request (`pullfill role`)."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, Worker, pullfill, until
from tests.support.load import Load
from tests.support.oracle import Oracle

pytestmark = pytest.mark.engine
# Below those that the kernel gives to whoever asks for any.
KV_PORT = 20_000 + 2 * (os.getpid() % 5_000)


@pytest.fixture(scope="module")
def elastic(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One decode and one prefill worker. Every prompt is prefilled remotely."""
    with Cluster(tmp_path_factory.mktemp("elastic"), model_path) as cluster:
        yield cluster.start(policy="always_remote", max_queue_wait_s=3600)


@pytest.fixture
def worker(elastic: Cluster) -> Worker:
    """The elastic worker, as decode worker. A test may end it."""
    found = elastic.workers[-1]
    if found.role == "frontend" or not found.alive:
        found = elastic.add("decode", "--elastic", f"--kv-port={KV_PORT}")
    elif elastic.load_of(found)["elastic"] != "decode":
        become(elastic, found, "decode")
    return found


def order(
    cluster: Cluster, worker: Worker, role: str, *more: str
) -> subprocess.CompletedProcess[str]:
    """`pullfill role`."""
    return pullfill(cluster, "role", worker.instance_id, role, *more, timeout_s=120)


def states(cluster: Cluster, worker: Worker) -> set[tuple[str, str]]:
    """(role, state) of each record of the worker. Empty for a moment while it changes."""
    rows = cluster.status()["workers"]
    return {(row["role"], row["state"]) for row in rows if row["pid"] == worker.pid}


def become(cluster: Cluster, worker: Worker, role: str) -> None:
    """Change the worker's role, and wait until it is ready and all workers are connected."""
    done = order(cluster, worker, role, "--wait", "--timeout", "90")
    assert done.returncode == 0, done.stdout + done.stderr
    roles = ("decode", "prefill") if role == "both" else (role,)
    wanted = {(each, "ready") for each in roles}
    until(lambda: states(cluster, worker) == wanted, 20, f"it is ready as {role}")
    until(cluster.linked, 20, "all are connected")


def prefilled_by(load: Load, worker: Worker) -> int:
    """How many prompts of others the worker has prefilled."""
    return sum(told.get("prefill_instance") == worker.instance_id for told in load.told())


def decoded_by(load: Load, worker: Worker) -> int:
    """How many requests the worker has answered."""
    return sum(told["decode_instance"] == worker.instance_id for told in load.told())


@pytest.mark.essential
def test_two_round_trips_under_load(elastic: Cluster, worker: Worker, oracle: Oracle) -> None:
    with Load(elastic, seed=3000) as load:
        for _ in range(2):
            before = decoded_by(load, worker)
            until(lambda n=before: decoded_by(load, worker) > n, 60, "it decodes")
            become(elastic, worker, "prefill")
            before = prefilled_by(load, worker)
            until(lambda n=before: prefilled_by(load, worker) > n, 60, "it prefills")
            become(elastic, worker, "decode")
    load.check(oracle)
    load.check_fallbacks()
    elastic.assert_clean()
    assert not elastic.log_errors()


@pytest.mark.essential
def test_a_worker_that_dies_in_the_middle_harms_nobody(
    elastic: Cluster, worker: Worker, oracle: Oracle
) -> None:
    with Load(elastic, seed=43_000, lengths=(200, 600), max_tokens=4) as load:
        until(lambda: decoded_by(load, worker), 60, "it decodes")
        worker.arm("elastic.left=kill")
        assert order(elastic, worker, "prefill").returncode == 0
        worker.wait(60)
        load.more(7)
    load.check(oracle)
    until(lambda: len(elastic.incarnations()) == 2, 20, "its lease is gone")
    elastic.assert_clean()


@pytest.mark.long
def test_a_worker_with_two_ranks_changes_its_role(elastic: Cluster, oracle: Oracle) -> None:
    """The main process copies for all ranks, in both roles."""
    ranked = elastic.launch("decode", "--elastic", "--tensor-parallel-size=2")
    elastic.wait_ready(ranked, within_s=200)
    with Load(elastic, seed=3050) as load:
        until(lambda: decoded_by(load, ranked), 60, "it decodes")
        become(elastic, ranked, "prefill")
        until(lambda: prefilled_by(load, ranked), 60, "it prefills")
    load.check(oracle)
    elastic.assert_clean()
    assert ranked.stop() == 0
    elastic.workers.remove(ranked)


@pytest.mark.essential
def test_a_worker_that_is_both_decodes_and_prefills(
    elastic: Cluster, worker: Worker, oracle: Oracle
) -> None:
    """Its streams leave time for every step: the target is 10 s between two tokens."""
    elastic.set_router(itl_ms=10_000)
    become(elastic, worker, "both")
    assert states(elastic, worker) == {("decode", "ready"), ("prefill", "ready")}
    for port in (KV_PORT, KV_PORT + 1):  # one for each side
        socket.create_connection(("127.0.0.1", port)).close()
    with Load(elastic, seed=3200, max_tokens=3) as load:
        until(lambda: prefilled_by(load, worker) > 2 and decoded_by(load, worker) > 2, 60, "both")
    load.check(oracle)
    elastic.assert_clean()
