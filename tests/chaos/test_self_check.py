"""Row 29: if the remote prefills of a pair of workers differ from local ones, prompts stay local.
The result is kept and shown. tests/contract/test_registry.py clears it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pullfill.registry import keys
from pullfill.wire import SelfCheck
from tests.support.cluster import Cluster, pullfill, until
from tests.support.prompts import ask, random_prompt
from tests.support.zoo import ZOO

WRONG = '--compilation-config={"custom_ops": ["+rotary_embedding"]}'
"""vLLM's CPU kernel for rotary embeddings is wrong for this model. What it computes depends on the
number of tokens in a step, so a remote prefill differs from a local one."""


class Deepseek(Cluster):
    up_states = ("ready", "checking")

    def linked(self) -> bool:
        """Connected, whatever the self-check says."""
        entries = self.status()["workers"]
        decode = [w for w in entries if w["role"] == "decode"]
        return all(w["load"].get("self_checks") for w in decode)


@pytest.fixture
def wrong(tmp_path: Path) -> Iterator[Cluster]:
    with Deepseek(tmp_path, ZOO["DeepSeek-V3"].checkpoint()) as cluster:
        yield cluster.start(("decode", WRONG), ("prefill", WRONG), "frontend")


@pytest.mark.engine
@pytest.mark.essential
def test_row_29_workers_that_differ_hand_nothing_over(wrong: Cluster) -> None:
    (decode,) = wrong.of("decode")
    until(lambda: wrong.load_of(decode)["self_check"] == "self_check_failed", 60, "checked")
    assert wrong.counter("pullfill_self_check_total", result="failed") == 1
    assert wrong.counter("pullfill_decision_total") == 0
    # It is written after the counter has moved.
    asked = ("get", "--prefix", keys.record(wrong.namespace, "self_checks"), "--print-value-only")
    kept = until(lambda: wrong.etcd.ctl(*asked).strip().splitlines(), 20, "kept")
    (result,) = (msgspec.json.decode(line, type=SelfCheck) for line in kept)
    assert not result.passed
    assert result.kv_difference > 10 * result.kv_tolerance

    wrong.set_router(policy="always_remote")
    answer = ask(wrong, random_prompt(300, seed=1))
    told = wrong.explain(answer.request_id)
    size = f"{result.kv_difference:.3g}"
    assert (told["path"], told["reason"]) == ("local", "self_check_failed")
    states = {row["role"]: row["state"] for row in wrong.status()["workers"]}
    assert states == {"decode": "ready", "prefill": "checking"}
    assert size in told["outage"]

    doctor = pullfill(wrong, "doctor")
    assert doctor.returncode == 1
    status = pullfill(wrong, "status")
    explained = pullfill(wrong, "explain", answer.request_id)
    for said in (doctor.stdout, status.stdout, explained.stdout):
        assert "self_check_failed" in said
        assert size in said
        assert "pullfill recheck" in said
    wrong.assert_clean()
