"""Two decode and two prefill workers, each on a host of its own; servers on a fifth host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import Hosts, SpreadCluster, why_not

DECODE, PREFILL = ("decode0", "decode1"), ("prefill0", "prefill1")


@pytest.fixture(scope="session")
def spread(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpreadCluster]:
    if reason := why_not():
        pytest.skip(reason)
    hosts = Hosts(["servers", "front", *DECODE, *PREFILL])
    with SpreadCluster(tmp_path_factory.mktemp("hosts"), model_path, hosts) as cluster:
        cluster.start_servers()
        for host in DECODE:
            cluster.launch_on(host, "decode")
        for host in PREFILL:
            cluster.launch_on(host, "prefill")
        cluster.launch_on("front", "frontend")
        cluster.wait_ready(*cluster.workers)
        yield cluster


@pytest.fixture
def cluster(spread: SpreadCluster) -> Iterator[SpreadCluster]:
    """All wires whole and all workers connected, before and after. No fault of a wire ends a worker
    or the frontend."""
    spread.set_router(policy="always_remote", remote_timeout_s=30)
    yield spread
    try:
        spread.mend()
        spread.assert_clean()
    finally:  # `mend` waits for living workers only, and cannot say which one is missing
        spread.assert_alive()
