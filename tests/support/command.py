"""The `pullfill` command in a process of its own, as an operator of a test's cluster runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

PULLFILL = (sys.executable, "-c", "from pullfill.deploy.cli import main; main()")


def command(cluster: Cluster, *words: str) -> list[str]:
    """Return the arguments of `pullfill WORDS` for this cluster."""
    where = ("--etcd", cluster.etcd.url, "--nats", cluster.nats.url)
    return [*PULLFILL, *words, *where, "--namespace", cluster.namespace]


def pullfill(
    cluster: Cluster, *words: str, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run `pullfill WORDS`. Its lines are not wrapped."""
    return subprocess.run(
        command(cluster, *words),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "COLUMNS": "400"},
    )
