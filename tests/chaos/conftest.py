"""One cluster per module of fault tests; each test leaves it whole for the next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster


@pytest.fixture(scope="module")
def whole(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("chaos"), model_path)
    try:
        cluster.start(decode=1, prefill=0)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(whole: Cluster) -> Iterator[Cluster]:
    """Everything prefilled remotely; no prefill worker yet: each test starts its own."""
    whole.set_router(policy="always_remote", remote_timeout_s=30)
    for worker in whole.of("prefill"):
        worker.kill()
    yield whole
    whole.assert_clean()
    for worker in whole.of("prefill"):
        worker.kill()
