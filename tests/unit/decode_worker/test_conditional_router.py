"""The conditional router: its table, and what holds for every situation and setting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from msgspec.structs import replace as replace_struct

from pullfill.decode_worker.conditional_router import Decision, Forecast, Situation, decide
from pullfill.wire import RouterConfig, RouterPolicy

INELIGIBLE = (
    "resumed", "fallback", "prompt_logprobs", "multimodal", "prompt_embeds", "lora", "pooling",
    "cache_salt", "sliding_window",
)  # fmt: skip
REMOTE_REASONS = {"long_prompt", "policy_always_remote"}
LOCAL_REASONS = {
    *INELIGIBLE, "policy_always_local", "prefix_hit", "short_prompt", "draining",
    "no_prefill_worker", "queue_unavailable", "claims_stalled", "quarantine_full", "queue_full",
    "remote_full", "queue_wait", "slow_link", "job_too_large", "prompt_too_long",
}  # fmt: skip

GOOD = Situation(1000, 0, prefill_workers=1, queue_available=True)
CONFIG = RouterConfig()
LOCAL = RouterConfig(policy=RouterPolicy.ALWAYS_LOCAL)
REMOTE = RouterConfig(policy=RouterPolicy.ALWAYS_REMOTE)


@pytest.mark.parametrize(
    ("now", "config", "remote", "reason"),
    [
        (GOOD, CONFIG, True, "long_prompt"),
        (GOOD, REMOTE, True, "policy_always_remote"),
        (GOOD, LOCAL, False, "policy_always_local"),
        (replace(GOOD, prompt_tokens=513), CONFIG, True, "long_prompt"),
        (replace(GOOD, prompt_tokens=512), CONFIG, False, "short_prompt"),
        (replace(GOOD, hit_tokens=488), CONFIG, False, "prefix_hit"),
        (replace(GOOD, hit_tokens=487), CONFIG, True, "long_prompt"),
        (replace(GOOD, prompt_tokens=2), REMOTE, True, "policy_always_remote"),
        (replace(GOOD, prompt_tokens=1), REMOTE, False, "short_prompt"),
        (replace(GOOD, hit_tokens=999), REMOTE, False, "prefix_hit"),
        (replace(GOOD, ineligible="lora"), REMOTE, False, "lora"),
        (replace(GOOD, draining=True), REMOTE, False, "draining"),
        (replace(GOOD, prefill_workers=0), REMOTE, False, "no_prefill_worker"),
        (replace(GOOD, queue_available=False), REMOTE, False, "queue_unavailable"),
        # Without NATS no prefill worker pulls: the cause is told, not what follows from it.
        (replace(GOOD, queue_available=False, prefill_workers=0), REMOTE, False,
         "queue_unavailable"),
        (replace(GOOD, claims_stalled=True), REMOTE, False, "claims_stalled"),
        (replace(GOOD, quarantine_full=True), REMOTE, False, "quarantine_full"),
        (replace(GOOD, queue_jobs=63), CONFIG, True, "long_prompt"),
        (replace(GOOD, queue_jobs=64), CONFIG, False, "queue_full"),
        (GOOD, RouterConfig(max_prefill_queue_size=0), False, "queue_full"),
        (replace(GOOD, remote_kv=0.5), CONFIG, True, "long_prompt"),
        (replace(GOOD, remote_kv=0.51), CONFIG, False, "remote_full"),
        (replace(GOOD, remote_kv=0.3),
         RouterConfig(max_remote_kv_fraction=0.2), False, "remote_full"),
        # Also when it is alone: its blocks may end in quarantine, and it needs others then.
        (replace(GOOD, remote_kv=0.9), RouterConfig(max_remote_kv_fraction=1), True, "long_prompt"),
        (replace(GOOD, prompt_tokens=2), RouterConfig(max_local_prefill_length=0), True,
         "long_prompt"),
    ],
)  # fmt: skip
def test_table(now: Situation, config: RouterConfig, remote: bool, reason: str) -> None:
    assert decide(now, config) == Decision(remote, reason)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    prompt = draw(st.integers(1, 2000))
    return Situation(
        prompt_tokens=prompt,
        hit_tokens=draw(st.integers(0, prompt - 1)),
        ineligible=draw(st.sampled_from(["", "", *INELIGIBLE])),
        prefill_workers=draw(st.integers(0, 2)),
        queue_available=draw(st.booleans()),
        queue_jobs=draw(st.integers(0, 100)),
        quarantine_full=draw(st.booleans()),
        remote_kv=draw(st.floats(0, 2)),
        draining=draw(st.booleans()),
        forecast=Forecast(
            wait_s=draw(st.floats(0, 20)),
            prefill_s=draw(st.floats(0, 100)),
            write_s=draw(st.floats(0, 100)),
        ),
    )


configs = st.builds(
    RouterConfig,
    policy=st.sampled_from(RouterPolicy),
    max_local_prefill_length=st.integers(0, 1000),
    max_prefill_queue_size=st.integers(0, 100),
    max_queue_wait_s=st.floats(0.1, 100),
    max_remote_kv_fraction=st.floats(0, 1, exclude_min=True),
)


@given(situations(), configs)
def test_never_remote_where_it_cannot_be(now: Situation, config: RouterConfig) -> None:
    decision = decide(now, config)
    assert decision == decide(now, config), "pure"
    assert decision.reason in (REMOTE_REASONS if decision.remote else LOCAL_REASONS)
    if decision.remote:
        assert not now.ineligible
        assert config.policy is not RouterPolicy.ALWAYS_LOCAL
        assert now.remote_tokens > 0
        assert now.prefill_workers > 0
        assert now.queue_available
        assert not now.draining
        assert not now.quarantine_full
        assert now.queue_jobs < config.max_prefill_queue_size
        assert now.remote_kv <= config.max_remote_kv_fraction
        assert now.forecast.wait_s <= config.max_queue_wait_s


@given(situations(), configs, st.integers(0, 2000))
def test_a_larger_hit_never_makes_it_remote(
    now: Situation, config: RouterConfig, more: int
) -> None:
    better = replace(now, hit_tokens=min(now.prompt_tokens - 1, now.hit_tokens + more))
    assert decide(now, config).remote or not decide(better, config).remote


@given(situations(), configs, st.integers(0, 50))
def test_a_longer_queue_never_makes_it_remote(
    now: Situation, config: RouterConfig, more: int
) -> None:
    busier = replace(now, queue_jobs=now.queue_jobs + more)
    assert decide(now, config).remote or not decide(busier, config).remote


@given(situations(), configs)
def test_always_remote_differs_only_in_length(now: Situation, config: RouterConfig) -> None:
    """What is remote under `conditional` is remote under `always_remote` too."""
    conditional = RouterConfig(
        max_local_prefill_length=config.max_local_prefill_length,
        max_prefill_queue_size=config.max_prefill_queue_size,
        max_queue_wait_s=config.max_queue_wait_s,
        max_remote_kv_fraction=config.max_remote_kv_fraction,
    )
    always = replace_struct(conditional, policy=RouterPolicy.ALWAYS_REMOTE)
    assert not decide(now, conditional).remote or decide(now, always).remote
