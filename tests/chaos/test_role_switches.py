"""Role changes again and again, and one that dies in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, Worker, until
from tests.support.load import Load
from tests.support.oracle import Oracle
from tests.support.roles import Footprint, become, decoded_by, elastic_cluster, order, prefilled_by

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WARM = 2
"""Round trips after which threads and caches are there."""


@pytest.fixture(scope="module")
def shared(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with elastic_cluster(tmp_path_factory.mktemp("elastic"), model_path) as cluster:
        yield cluster


@pytest.fixture
def elastic(shared: Cluster) -> Cluster:
    """The last worker is elastic, and new if that of the test before has died."""
    if not shared.workers[-1].alive:
        shared.wait_ready(shared.launch("decode", "--elastic"))
    return shared


def round_trip(cluster: Cluster, worker: Worker, load: Load) -> None:
    """To prefill and back, with work done in both roles."""
    become(cluster, worker, "prefill")
    before = prefilled_by(load, worker)
    until(lambda: prefilled_by(load, worker) > before, 60, "it prefills")
    become(cluster, worker, "decode")
    before = decoded_by(load, worker)
    until(lambda: decoded_by(load, worker) > before, 60, "it decodes")


def at_rest(cluster: Cluster, worker: Worker) -> Footprint:
    """The footprint of a decode worker without requests."""
    cluster.assert_clean()
    return Footprint.of(worker)


@pytest.mark.timeout(1200)
@pytest.mark.long
@pytest.mark.parametrize("trips", [2, 20])
def test_round_trips_under_load_leave_nothing(trips: int, elastic: Cluster, oracle: Oracle) -> None:
    """No request fails, every token is right, and nothing is left: blocks, files, threads, RSS."""
    worker = elastic.workers[-1]
    with Load(elastic, seed=41_000, threads=2, lengths=(300, 700), max_tokens=4) as load:
        for _ in range(WARM):
            round_trip(elastic, worker, load)
    load.check(oracle)
    before = at_rest(elastic, worker)
    with Load(elastic, seed=42_000, threads=2, lengths=(300, 700), max_tokens=4) as load:
        for _ in range(trips):
            round_trip(elastic, worker, load)
    load.check(oracle)
    after = at_rest(elastic, worker)
    print(f"{trips} round trips: {before} -> {after}")
    assert elastic.counter("pullfill_fallback_total") == 0
    assert after.descriptors <= before.descriptors + 4
    assert after.threads <= before.threads + 2
    assert after.mappings <= before.mappings
    assert after.rss_mib < before.rss_mib + 20
    assert not elastic.log_errors()


@pytest.mark.parametrize(
    "point", [pytest.param("elastic.drained", marks=pytest.mark.long), "elastic.left"]
)
@pytest.mark.essential
def test_a_worker_that_dies_in_the_middle_harms_nobody(
    point: str, elastic: Cluster, oracle: Oracle
) -> None:
    worker = elastic.workers[-1]
    with Load(elastic, seed=43_000, lengths=(200, 600), max_tokens=4) as load:
        until(lambda: decoded_by(load, worker), 60, "it decodes")
        worker.arm(f"{point}=kill")
        assert order(elastic, worker, "prefill").returncode == 0
        worker.process.wait(60)
        done = len(load.done)
        until(lambda: len(load.done) > done + 6, 60, "load goes on")
    load.check(oracle)
    until(lambda: len(elastic.incarnations()) == 2, 20, "its lease is gone")
    elastic.assert_clean()
