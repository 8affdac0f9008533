"""One real cluster (1 prefill, 1 decode, 1 frontend) and one aggregated engine for all tests here.

The aggregated engine is the oracle: what one plain vLLM engine answers is what pullfill must
answer, token for token.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pullfill.deploy.state import StateDir, is_alive, send, tagged
from tests.support.cluster import Cluster
from tests.support.frontend_http import Served, serve


@pytest.fixture(scope="session")
def shared_cluster(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), model_path) as cluster:
        yield cluster.start()


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The shared cluster, everything prefilled remotely; clean afterwards or the test fails."""
    shared_cluster.set_router(policy="always_remote", max_queue_wait_s=3600)
    yield shared_cluster
    shared_cluster.assert_clean()


@pytest.fixture
def state(state_dir: Path) -> Iterator[Path]:
    """A state directory; whatever the test left running is killed, and makes it fail."""
    yield state_dir
    launch = StateDir(state_dir).cluster()
    left = tagged(launch.cluster_id) if launch else []
    if launch is not None and is_alive(launch.supervisor):
        left.insert(0, launch.supervisor)
    for straggler in left:
        send(straggler, signal.SIGKILL)
    assert not left, f"left running: {left}"


@pytest.fixture(scope="session")
def served(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A frontend without a cluster; each test brings fake workers and takes them away again."""
    with serve(tmp_path_factory.mktemp("frontend"), model_path) as frontend:
        yield frontend
