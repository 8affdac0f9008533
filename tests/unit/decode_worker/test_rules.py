"""Each rule, their order, and what holds in every situation under every setting."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pullfill.decode_worker import rules
from pullfill.decode_worker.rules import (
    MAX_TIMEOUT_S,
    Decision,
    Forecast,
    Situation,
    decide,
    expected,
    timeouts,
)
from pullfill.wire import MAX_TEXT, Expected, RouterConfig, RouterPolicy
from tests.support.fakes import FakeRequest
from tests.support.features import stand_in

REQUEST = FakeRequest("r", [1])
# What the default policy, `cost`, decides about. GOOD: the same with `conditional`.
COST = Situation(1000, 0, prefill_workers=1, queue_available=True)
LOCAL, REMOTE, GOOD = (
    replace(COST, config=RouterConfig(policy=policy))
    for policy in (RouterPolicy.ALWAYS_LOCAL, RouterPolicy.ALWAYS_REMOTE, RouterPolicy.CONDITIONAL)
)


def test_each_reason_has_one_rule() -> None:
    names = [rule.__name__ for rule in rules.RULES]
    assert len(set(names)) == len(names)
    told = {rules.SELF_CHECK_FAILED, rules.SELF_CHECK_PENDING, *names}
    assert told >= rules.BY_FORECAST | rules.BY_OUTAGE | rules.LACK


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "long_prompt"),
        ({"num_output_tokens": 1}, "resumed"),
        ({"num_preemptions": 1}, "resumed"),
        ({"skip_reading_prefix_cache": True}, "prompt_logprobs"),
        ({"mm_features": [stand_in(2, 5)]}, "long_prompt"),
        ({"mm_features": [stand_in(996, 4)]}, "multimodal"),  # the last token belongs to it
        ({"mm_features": [stand_in(2, 5)], "lora_request": object()}, "multimodal"),
        ({"prompt_embeds": object()}, "prompt_embeds"),
        ({"prompt_token_ids": None}, "prompt_embeds"),
        ({"lora_request": object()}, "lora"),
        ({"pooling_params": object()}, "pooling"),
        ({"cache_salt": "x" * MAX_TEXT}, "long_prompt"),
        ({"cache_salt": "x" * (MAX_TEXT + 1)}, "cache_salt"),
    ],
)
def test_what_a_request_needs(fields: dict[str, Any], reason: str) -> None:
    request = FakeRequest("r", **({"prompt_token_ids": [1]} | fields))
    assert decide(request, replace(GOOD, takes_features=True)).reason == reason


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (REMOTE, "policy_always_remote"),
        (LOCAL, "policy_always_local"),
        (replace(LOCAL, hit_tokens=999), "policy_always_local"),
        (replace(GOOD, prompt_tokens=513), "long_prompt"),
        (replace(GOOD, prompt_tokens=512), "short_prompt"),
        (replace(GOOD, hit_tokens=488), "prefix_hit"),
        (replace(GOOD, hit_tokens=487), "long_prompt"),
        (replace(GOOD, prompt_tokens=512, queue_available=False), "short_prompt"),
        (replace(REMOTE, prompt_tokens=2), "policy_always_remote"),
        (replace(REMOTE, prompt_tokens=1), "short_prompt"),
        (replace(REMOTE, hit_tokens=999), "prefix_hit"),
        (replace(COST, prompt_tokens=1), "short_prompt"),
        (replace(REMOTE, engine="speculation"), "speculation"),
        (replace(REMOTE, fell_back=True), "fallback"),
        (replace(REMOTE, draining=True), "draining"),
        (replace(REMOTE, prefill_workers=0), "no_prefill_worker"),
        (replace(REMOTE, prefill_workers=0, self_check="self_check_failed"), "self_check_failed"),
        (replace(REMOTE, self_check="self_check_failed"), "policy_always_remote"),
        # Without NATS no prefill worker pulls: the cause is told, not what follows from it.
        (replace(REMOTE, queue_available=False, prefill_workers=0), "queue_unavailable"),
        (replace(REMOTE, oversize="job_too_large"), "job_too_large"),
        (replace(REMOTE, oversize="prompt_too_long", claims_stalled=True), "prompt_too_long"),
        (replace(REMOTE, claims_stalled=True), "claims_stalled"),
        (replace(REMOTE, quarantine_full=True), "quarantine_full"),
        (replace(GOOD, queue_jobs=63), "long_prompt"),
        (replace(GOOD, queue_jobs=64), "queue_full"),
        (replace(GOOD, config=RouterConfig(max_prefill_queue_size=0)), "queue_full"),
        (replace(GOOD, remote_kv=0.5), "long_prompt"),
        (replace(GOOD, remote_kv=0.51), "remote_full"),
        # Also when it is alone: its blocks may end in quarantine, and it needs others then.
        (replace(GOOD, remote_kv=0.9, config=RouterConfig(max_remote_kv_fraction=1)),
         "long_prompt"),
        (replace(GOOD, prompt_tokens=2, config=RouterConfig(max_local_prefill_length=0)),
         "long_prompt"),
        (replace(GOOD, forecast=Forecast(wait_s=10.0)), "long_prompt"),
        (replace(GOOD, forecast=Forecast(wait_s=10.1)), "queue_wait"),
        # 42 GB over 10 Gbit/s, and over 1 Gbit/s
        (replace(GOOD, forecast=Forecast(prefill_s=12.0, write_s=35.0)), "long_prompt"),
        (replace(GOOD, forecast=Forecast(prefill_s=12.0, write_s=336.0)), "slow_link"),
        (replace(COST, forecast=Forecast(prefill_s=12.0, write_s=336.0)), "slow_link"),
        # Short prompts go on measuring the link.
        (replace(GOOD, forecast=Forecast(prefill_s=0.1, write_s=0.9)), "long_prompt"),
        (replace(GOOD, forecast=Forecast(prefill_s=0.1, write_s=2.0)), "slow_link"),
        (replace(GOOD, forecast=Forecast(commit_within_s=MAX_TIMEOUT_S + 1)), "slow_link"),
    ],
)  # fmt: skip
def test_table(now: Situation, reason: str) -> None:
    told = decide(REQUEST, now)
    assert told == Decision(reason in ("long_prompt", "policy_always_remote"), reason)


@given(st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0.1, 3600), st.floats(0.1, 3600))
def test_deadlines_are_never_below_the_settings(
    claim_within_s: float, commit_within_s: float, remote_s: float, claim_s: float
) -> None:
    forecast = Forecast(claim_within_s=claim_within_s, commit_within_s=commit_within_s)
    config = RouterConfig(remote_timeout_s=remote_s, claim_timeout_s=claim_s)
    remote, claim = timeouts(forecast, config)
    assert remote_s <= remote <= MAX_TIMEOUT_S
    assert claim >= claim_s
    if decide(REQUEST, replace(GOOD, forecast=forecast)).remote:
        assert remote >= forecast.commit_within_s, "it has the time that it needs"


@pytest.mark.parametrize("reason", ["long_prompt", *sorted(rules.BY_FORECAST)])
def test_what_a_decision_was_made_on_can_be_shown(reason: str) -> None:
    made = Forecast(
        wait_s=4.0, prefill_s=2.0, write_s=3.0, claim_within_s=8.0, commit_within_s=40.0
    )
    decision = Decision(reason == "long_prompt", reason)
    assert expected(replace(GOOD, forecast=made), decision) == Expected(
        queue=4.0, prefill=2.0, kv_write=3.0, claim_timeout=10.0, timeout=40.0
    )
    unknown = expected(GOOD, decision)
    assert unknown == Expected(claim_timeout=10.0, timeout=30.0), "not measured, so not 0"
    assert expected(GOOD, Decision(False, "draining")) is None
