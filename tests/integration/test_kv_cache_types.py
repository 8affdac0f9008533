"""A KV cache of 8-bit floats with scales from the checkpoint: a worker with other scales does not
join, and the others answer as one plain engine does."""

from __future__ import annotations

from pathlib import Path

import pytest

from pullfill.engine.compat import model_fingerprint
from tests.integration.test_joining import last_error
from tests.support.checkpoint import scaled_checkpoint
from tests.support.cluster import Cluster
from tests.support.oracle import Oracle
from tests.support.prompts import ask, assert_right, random_prompt

pytestmark = [pytest.mark.engine, pytest.mark.long]

STEPS = 6
TOLERANCE = 2e-2
"""A number that rounding moves over the border of two codes changes by 6 %."""


@pytest.mark.essential
def test_other_scales_are_refused_by_name_and_prompts_stay_local(tmp_path: Path) -> None:
    model, other = scaled_checkpoint(0.05), scaled_checkpoint(0.01)
    assert model_fingerprint(str(model)) == model_fingerprint(str(other)), "it misses the scales"
    with Oracle(model) as oracle, Cluster(tmp_path, model, lease_ttl_s=10) as cluster:
        cluster.start("decode", "frontend", policy="always_remote")
        misfit = cluster.launch("prefill", "--model", str(other))
        assert "its kv_scales is" in last_error(misfit)
        cluster.workers.remove(misfit)
        prompts = [random_prompt(length, seed=71) for length in (33, 300, 1100)]
        _check(cluster, oracle, prompts, ("local", "no_prefill_worker"))

        cluster.launch("prefill")
        cluster.wait_ready(*cluster.workers)
        for record in cluster.records("prefill").values():
            assert record.compat is not None
            assert record.compat.kv_cache_dtype.startswith("fp8")
            assert record.compat.kv_scales != "1"
        prompts = [prompt + random_prompt(200, seed=72) for prompt in prompts]
        _check(cluster, oracle, prompts, ("remote", "policy_always_remote"))
        cluster.assert_clean()


def _check(
    cluster: Cluster, oracle: Oracle, prompts: list[list[int]], how: tuple[str, str]
) -> None:
    answers = [ask(cluster, prompt, STEPS) for prompt in prompts]
    assert_right(oracle, prompts, answers, STEPS, TOLERANCE)
    for answer in answers:
        told = cluster.explain(answer.request_id)
        assert (told["path"], told["reason"]) == how
