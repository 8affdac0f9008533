"""One real cluster (1 prefill, 1 decode, 1 frontend) and one aggregated engine for all tests here.

The aggregated engine is the oracle: what one plain vLLM engine answers is what pullfill must
answer, token for token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster


@pytest.fixture(scope="session")
def shared_cluster(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), model_path)
    try:
        cluster.start_servers()
        cluster.launch("decode")
        cluster.launch("prefill")
        # Development routes: a test empties the decode worker's prefix cache through them.
        cluster.launch("frontend", env={"VLLM_SERVER_DEV_MODE": "1"})
        cluster.wait_ready(*cluster.workers)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The shared cluster, everything prefilled remotely; clean afterwards or the test fails."""
    shared_cluster.set_router(policy="always_remote")
    yield shared_cluster
    shared_cluster.assert_clean()
