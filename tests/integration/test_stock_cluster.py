"""A frontend of ours in front of workers that are all stock `vllm serve` with one flag."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.oracle import Oracle
from tests.support.prompts import ask_all, assert_right, random_prompt

pytestmark = pytest.mark.engine

STEPS = 6
LENGTHS = [1, 31, 32, 33, 65, 200, 512, 513, 1023, 1999]


@pytest.fixture(scope="module")
def stock_cluster(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    both = frozenset({"decode", "prefill"})
    with Cluster(tmp_path_factory.mktemp("cluster"), model_path, stock=both) as cluster:
        yield cluster.start(policy="always_remote", max_queue_wait_s=3600)


def test_every_prompt_is_prefilled_remotely(stock_cluster: Cluster, oracle: Oracle) -> None:
    prompts = [random_prompt(length, seed=90) for length in LENGTHS]
    assert_right(oracle, prompts, ask_all(stock_cluster, prompts, STEPS), STEPS, 1e-5)
    stock_cluster.assert_clean()
