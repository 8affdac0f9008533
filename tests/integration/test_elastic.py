"""Workers come by being launched and leave by being drained, under load and without a failure."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.support.cluster import Cluster, Worker, until
from tests.support.load import Load
from tests.support.oracle import Oracle

pytestmark = pytest.mark.engine


def lease_of(cluster: Cluster, worker: Worker) -> str:
    key = f"/pullfill/{cluster.namespace}/workers/{worker.role}/{worker.instance_id}"
    fields = cluster.etcd.ctl("get", key, "-w", "fields")
    line = next(x for x in fields.splitlines() if x.startswith('"Lease"'))
    return f"{int(line.split(':')[1]):x}"


def test_second_prefill_joins_by_hand_and_leaves_by_lease_revocation(
    cluster: Cluster, oracle: Oracle
) -> None:
    with Load(cluster, seed=1000) as load:
        second = cluster.launch("prefill")
        cluster.wait_ready(second)
        until(lambda: second.instance_id in load.prefill_instances(), 30, "it takes work")
        done_before = len(load.done)
        cluster.etcd.ctl("lease", "revoke", lease_of(cluster, second))
        assert second.process.wait(30) == 0
        until(lambda: len(load.done) > done_before + 6, 30, "load goes on")
    load.check(oracle)
    assert cluster.counter("pullfill_fallback_total") == 0


def test_second_decode_joins_by_hand_and_is_drained_by_command(
    cluster: Cluster, oracle: Oracle
) -> None:
    with Load(cluster, seed=2000) as load:
        second = cluster.launch("decode")
        cluster.wait_ready(second)
        until(lambda: second.instance_id in load.decode_instances(), 30, "it takes work")
        drained = subprocess.run(
            [
                sys.executable, "-c", "from pullfill.deploy.cli import main; main()",
                "drain", second.instance_id, "--wait", "--timeout", "30",
                "--etcd", cluster.etcd.url, "--nats", cluster.nats.url,
                "--namespace", cluster.namespace,
            ],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert drained.returncode == 0, drained.stdout + drained.stderr
        assert second.process.wait(10) == 0
        done_before = len(load.done)
        until(lambda: len(load.done) > done_before + 3, 30, "load goes on")
    load.check(oracle)


def test_sigterm_finishes_running_streams(cluster: Cluster) -> None:
    second = cluster.launch("decode")
    cluster.wait_ready(second)
    client = cluster.client()

    def stream_on(worker: Worker) -> object:
        while True:  # round-robin: one of two
            stream = client.completions.create(
                model="tiny", prompt="x" * 40, max_tokens=300, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            first = next(iter(stream))
            loads = {w["instance_id"]: w["load"] for w in cluster.status()["workers"]}
            if loads[worker.instance_id]["requests"]:
                return first, stream
            for _ in stream:
                pass

    _, stream = stream_on(second)  # type: ignore[misc]
    second.signal(15)
    reasons = [c.choices[0].finish_reason for c in stream if c.choices]
    assert reasons[-1] == "length"
    assert second.process.wait(20) == 0


def test_no_prefill_worker_means_local_and_degraded(cluster: Cluster, oracle: Oracle) -> None:
    import httpx

    (only,) = cluster.of("prefill")
    assert only.stop() == 0
    until(lambda: httpx.get(f"{cluster.frontend_url}/ready").json()["degraded"], 10, "degraded")
    assert httpx.get(f"{cluster.frontend_url}/ready").status_code == 200
    with Load(cluster, threads=2, seed=3000) as load:
        time.sleep(2)
    load.check(oracle)
    assert load.paths() == {"local"}
    cluster.wait_ready(cluster.launch("prefill"))
    with Load(cluster, threads=2, seed=4000) as load:
        time.sleep(3)
    load.check(oracle)
    assert "remote" in load.paths()
