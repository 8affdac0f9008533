"""Two models, each in a namespace of its own, on one NATS and one etcd."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoint import TINY, tiny_checkpoint
from tests.support.cluster import Cluster, until
from tests.support.load import Load
from tests.support.oracle import Oracle

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def other(paired: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    """Workers of another model that use the servers of `paired`."""
    cluster = Cluster(tmp_path, tiny_checkpoint(recipe=replace(TINY, seed=8)), namespace="other")
    cluster.etcd, cluster.nats = paired.etcd, paired.nats
    try:
        for role in ("decode", "prefill", "frontend"):
            cluster.launch(role)
        cluster.wait_ready(*cluster.workers)
        cluster.set_router(policy="always_remote")
        yield cluster
        cluster.assert_clean()
    finally:
        for worker in cluster.workers:
            worker.kill()


def test_the_end_of_one_models_workers_is_nothing_to_the_other(
    paired: Cluster, other: Cluster, oracle: Oracle
) -> None:
    """All workers of one model are killed and started again. The other goes on, all remote."""
    with Oracle(other.model_path) as truth, Load(paired, lengths=(40, 700), seed=36_000) as load:
        until(lambda: len(load.done) > 5, 60, "load")
        for worker in (*other.of("prefill"), *other.of("decode")):
            worker.kill()
        done = len(load.done)
        until(lambda: len(load.done) > done + 10, 60, "the other model is served")
        other.wait_ready(other.launch("decode"), other.launch("prefill"))
        with Load(other, lengths=(40, 700), seed=36_000) as again:
            until(lambda: len(again.done) > 5, 60, "load on the new workers")
        again.check(truth)
    load.check(oracle)
    load.check_fallbacks()
    assert load.paths() == again.paths() == {"remote"}
    assert load.decode_instances().isdisjoint(again.decode_instances())
