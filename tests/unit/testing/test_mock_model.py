"""The mock model's arithmetic: who gets a token in a step, and how long a step takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.testing.mock_model import MockModel, MockSettings, settings_of


def new(request: str, prompt: int, computed: int = 0, resumed: int = 0) -> Any:
    return SimpleNamespace(
        req_id=request,
        prompt_token_ids=list(range(prompt)),
        prefill_token_ids=list(range(prompt + resumed)) if resumed else None,
        num_computed_tokens=computed,
    )


def step(
    counts: dict[str, int],
    *fresh: Any,
    old: dict[str, tuple[int, int]] | None = None,
    finished: tuple[str, ...] = (),
) -> Any:
    """vLLM's SchedulerOutput. old: request → (computed, output tokens)."""
    old = old or {}
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_new_reqs=list(fresh),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(old),
            num_computed_tokens=[computed for computed, _ in old.values()],
            num_output_tokens=[outputs for _, outputs in old.values()],
        ),
        finished_req_ids=set(finished),
    )


def test_a_prompt_gets_its_first_token_with_its_last_chunk() -> None:
    model = MockModel(MockSettings(token=7))
    assert model.step(step({"a": 60}, new("a", 100))) == {"a": []}
    assert model.step(step({"a": 40}, old={"a": (60, 0)})) == {"a": [7]}
    assert model.step(step({"a": 1}, old={"a": (100, 1)})) == {"a": [7]}


def test_a_resumed_request_computes_its_own_tokens_first() -> None:
    model = MockModel(MockSettings())
    assert model.step(step({"a": 10}, new("a", 10, resumed=3))) == {"a": []}


@pytest.mark.parametrize(
    ("settings", "tokens", "seconds"),
    [
        (MockSettings(), 100, 0.0),
        (MockSettings(step_s=0.01), 0, 0.0),
        (MockSettings(step_s=0.01), 5, 0.01),
        (MockSettings(step_s=0.01, prefill_tokens_per_s=1000), 500, 0.51),
    ],
)
def test_a_step_takes_as_long_as_the_settings_say(
    settings: MockSettings, tokens: int, seconds: float
) -> None:
    scheduled = SimpleNamespace(total_num_scheduled_tokens=tokens)
    assert MockModel(settings).seconds(scheduled) == pytest.approx(seconds)


def test_settings_come_from_vllms_own_flag() -> None:
    assert settings_of({}) == settings_of(None) == MockSettings()
    found = settings_of({"mock": {"layers": 4, "step_s": 1}})
    assert (found.layers, found.step_s, found.kv_heads) == (4, 1.0, MockSettings().kv_heads)
