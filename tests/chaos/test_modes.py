"""Pull mode with real engines: the oracle's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checked import STEPS, checked
from tests.support.cluster import Cluster
from tests.support.oracle import Oracle
from tests.support.prompts import ask_all, random_prompt, truth

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTHS = [2, 33, 65, 96, 257, 700, 1026, 2000]
READ, WRITTEN = "pullfill_kv_read_bytes_total", "pullfill_kv_write_bytes_total"


@pytest.mark.essential
def test_pull_answers_as_the_oracle_does(model_path: Path, tmp_path: Path, oracle: Oracle) -> None:
    """Cold, then as the start of longer prompts (hits on both sides), one by one and at once."""
    cluster = Cluster(tmp_path, model_path)
    try:
        cluster.start_servers()
        cluster.launch("decode", "--kv-mode", "pull")
        cluster.launch("prefill")
        cluster.launch("frontend")
        cluster.wait_ready(*cluster.workers)
        cluster.set_router(policy="always_remote", remote_timeout_s=30)
        heads = [random_prompt(n, seed=9200) for n in LENGTHS]
        longer = [head + random_prompt(n, seed=9201) for head in heads for n in (1, 40)]
        with checked(cluster, oracle) as check:
            for prompt in heads:
                assert check.told(check.ask(prompt))["path"] == "remote"
            answers = ask_all(cluster, longer, STEPS)
            for prompt, answer, (tokens, _) in zip(
                longer, answers, truth(oracle, longer, STEPS), strict=True
            ):
                assert answer.tokens == tokens, f"prompt of {len(prompt)} tokens"
        assert cluster.counter(WRITTEN, role="prefill") == 0, "nothing is written"
        assert cluster.counter(READ, role="decode") > 0
        assert cluster.counter(READ, role="prefill") > 0, "prefix hits"
    finally:
        cluster.stop()
