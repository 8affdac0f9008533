"""What speculative decoding changes for a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.decode_worker import scheduler
from pullfill.engine import speculation
from pullfill.errors import BadMessage

PLAIN = SimpleNamespace(speculative_config=None, device_config=SimpleNamespace(device_type="cpu"))


def config(device: str = "cpu") -> SimpleNamespace:
    return SimpleNamespace(
        speculative_config=object(), device_config=SimpleNamespace(device_type=device)
    )


def params(**given: Any) -> SimpleNamespace:
    neutral = {"min_p": 0.0, "logit_bias": None, "trace_decode_token_ids": None, "temperature": 0.0}
    return SimpleNamespace(**{**neutral, **given})


def test_parameters_that_vllm_ignores_when_it_speculates_are_refused() -> None:
    for ignored in ({"min_p": 0.1}, {"logit_bias": {5: 1.0}}, {"trace_decode_token_ids": [5]}):
        speculation.check_params(PLAIN, params(**ignored))
        with pytest.raises(BadMessage, match=r"min_p, logit_bias.*--speculative-config"):
            speculation.check_params(config(), params(**ignored))
    for fine in (None, params(), params(min_p=1e-6, logit_bias={})):
        speculation.check_params(config(), fine)


def test_answers_that_are_not_greedy_are_refused_on_cpu_only() -> None:
    for temperature in (0.0, 1e-6):
        speculation.check_params(config(), params(temperature=temperature))
    speculation.check_params(PLAIN, params(temperature=1.0))
    speculation.check_params(config(device="cuda"), params(temperature=1.0))
    with pytest.raises(BadMessage, match="temperature above 0"):
        speculation.check_params(config(), params(temperature=0.5))


@pytest.mark.parametrize("method", ["ngram", "suffix", "eagle", "mtp", "draft_model", "unheard"])
def test_prompts_stay_local_unless_the_drafter_is_known_to_have_no_kv(method: str) -> None:
    made = SimpleNamespace(speculative_config=SimpleNamespace(method=method))
    why = "" if method in ("ngram", "suffix") else f"does not move the KV of {method} drafts"
    assert why in speculation.why_local(made)
    assert bool(speculation.why_local(made)) == bool(why)
    assert speculation.why_local(PLAIN) == ""


def test_a_decode_worker_whose_drafts_have_kv_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it decides then: tests/unit/decode_worker/test_rules.py."""
    monkeypatch.setattr(scheduler.groups, "why_local", lambda *_: "")
    made = SimpleNamespace(
        speculative_config=SimpleNamespace(method="draft_model"),
        cache_config=SimpleNamespace(block_size=16),
    )
    half = scheduler.DecodeHalf()
    manager = SimpleNamespace(block_pool=None, kv_cache_config=None)
    half.bind(manager, lambda _: (0,), lambda tables: tables)
    half.built(SimpleNamespace(config=made))  # type: ignore[arg-type]
    assert half.blocks.never == "speculation"
