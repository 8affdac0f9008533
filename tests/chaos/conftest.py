"""One cluster for all fault tests; each test leaves it whole for the next.

A test that fails may leave anything behind: before each test the cluster is looked at, and made
anew if it does not answer or is not clean. Worker starts cost most of the time here, so `paired`
hands a prefill worker that lived through one test on to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster

USUAL = {
    "policy": "always_remote",
    "remote_timeout_s": 30,
    "claim_timeout_s": 30,
    "max_queue_wait_s": 3600,
}
"""Router settings before each test. Under load, on two cores, a job may wait long for its turn: no
test but its own is about `claim_timeout`."""


class Keeper:
    """Holds the cluster of the session, and replaces it when it cannot be brought back."""

    def __init__(self, make: Callable[[], Cluster]) -> None:
        self._make = make
        self._cluster: Cluster | None = None

    def ready(self, prefill: int) -> Cluster:
        """A clean cluster of one decode worker, one frontend and `prefill` prefill workers;
        everything is prefilled remotely."""
        if self._cluster is not None:
            try:
                self._bring_back(self._cluster, prefill)
            except Exception as exc:
                print(f"the cluster is made anew: {exc!r}")
                self.stop()
        if self._cluster is None:
            self._cluster = self._make()
            self._cluster.start("decode", *["prefill"] * prefill, "frontend", **USUAL)
        return self._cluster

    def _bring_back(self, cluster: Cluster, prefill: int) -> None:
        cluster.etcd.resume()
        cluster.nats.resume()
        assert cluster.nats.alive
        for role, keep in (("decode", 1), ("prefill", prefill)):
            good = [w for w in cluster.of(role) if not w.armed][:keep]
            for worker in cluster.of(role):
                if worker not in good:
                    worker.kill()
        assert cluster.of("decode")
        cluster.set_router(**USUAL)
        while len(cluster.of("prefill")) < prefill:
            cluster.launch("prefill")
        cluster.wait_ready(*cluster.of("decode"), *cluster.of("prefill"))
        cluster.assert_clean()

    def stop(self) -> None:
        if self._cluster is not None:
            self._cluster.stop()
            self._cluster = None


@pytest.fixture(scope="session")
def keeper(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    keeper = Keeper(lambda: Cluster(tmp_path_factory.mktemp("chaos"), model_path))
    try:
        yield keeper
    finally:
        keeper.stop()


@pytest.fixture
def cluster(keeper: Keeper) -> Iterator[Cluster]:
    """No prefill worker yet: the test starts its own."""
    whole = keeper.ready(prefill=0)
    yield whole
    whole.assert_clean()


@pytest.fixture
def paired(keeper: Keeper) -> Iterator[Cluster]:
    """With one prefill worker, which the test may arm, kill or keep."""
    whole = keeper.ready(prefill=1)
    yield whole
    whole.assert_clean()
