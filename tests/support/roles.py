"""A cluster with an elastic worker, orders to it, and what it leaves behind."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.cluster import Cluster, Worker, pullfill, until
from tests.support.load import Load


@contextmanager
def elastic_cluster(directory: Path, model_path: Path) -> Iterator[Cluster]:
    """One decode worker, one prefill worker, and last an elastic one that begins as decode worker.

    Every prompt is prefilled remotely."""
    with Cluster(directory, model_path) as cluster:
        processes = ("decode", "prefill", "frontend", ("decode", "--elastic"))
        yield cluster.start(*processes, policy="always_remote", max_queue_wait_s=3600)


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
