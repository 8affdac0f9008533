"""A worker that dies while it changes its role."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import until
from tests.support.load import Load
from tests.support.oracle import Oracle
from tests.support.roles import decoded_by, elastic_cluster, order

pytestmark = [pytest.mark.engine, pytest.mark.slow]

"""Round trips after which threads and caches are there."""


@pytest.mark.essential
def test_a_worker_that_dies_in_the_middle_harms_nobody(
    tmp_path: Path, model_path: Path, oracle: Oracle
) -> None:
    with elastic_cluster(tmp_path / "elastic", model_path) as elastic:
        worker = elastic.workers[-1]
        with Load(elastic, seed=43_000, lengths=(200, 600), max_tokens=4) as load:
            until(lambda: decoded_by(load, worker), 60, "it decodes")
            worker.arm("elastic.left=kill")
            assert order(elastic, worker, "prefill").returncode == 0
            worker.process.wait(60)
            done = len(load.done)
            until(lambda: len(load.done) > done + 6, 60, "load goes on")
        load.check(oracle)
        until(lambda: len(elastic.incarnations()) == 2, 20, "its lease is gone")
        elastic.assert_clean()
