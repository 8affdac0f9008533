"""Pull mode with real engines: the oracle's tokens, also after a reader was stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checked import STEPS, checked
from tests.support.cluster import Cluster
from tests.support.oracle import Oracle
from tests.support.prompts import ask_all, assert_right, random_prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTHS = [2, 33, 65, 96, 257, 700, 1026, 2000]
READ, WRITTEN = "pullfill_kv_read_bytes_total", "pullfill_kv_write_bytes_total"


@pytest.fixture(scope="module")
def pulling(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("pull"), model_path) as cluster:
        pull = ("decode", "--kv-mode", "pull")
        router = {"policy": "always_remote", "remote_timeout_s": 30}
        yield cluster.start(pull, "prefill", "frontend", **router)


@pytest.mark.essential
def test_pull_answers_as_the_oracle_does(pulling: Cluster, oracle: Oracle) -> None:
    """Cold, then as the start of longer prompts (hits on both sides), one by one and at once."""
    heads = [random_prompt(n, seed=9200) for n in LENGTHS]
    longer = [head + random_prompt(n, seed=9201) for head in heads for n in (1, 40)]
    with checked(pulling, oracle) as check:
        for prompt in heads:
            assert check.told(check.ask(prompt))["path"] == "remote"
        answers = ask_all(pulling, longer, STEPS)
        assert_right(oracle, longer, answers, STEPS)
    assert pulling.counter(WRITTEN, role="prefill") == 0, "nothing is written"
    assert pulling.counter(READ, role="decode") > 0
    assert pulling.counter(READ, role="prefill") > 0, "prefix hits"
