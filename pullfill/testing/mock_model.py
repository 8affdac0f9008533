"""What the mock executor answers instead of a model: tokens, and how long a step takes. No vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pullfill.errors import ConfigError

KEY = "mock"
_Number = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=0)]


class MockSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the mock model."""

    # How fast prompts are computed. 0: in no time.
    prefill_tokens_per_s: _Number = 0.0
    # Seconds that each step takes besides, also if it only decodes.
    step_s: _Number = 0.0
    # The token that is always sampled.
    token: _Count = 75
    # The shape of the KV cache.
    layers: _Count = 2
    kv_heads: _Count = 1
    head_size: _Count = 8
    # Where the KV cache is. `auto`: where vLLM would put it here.
    device: Literal["auto", "cpu", "cuda"] = "auto"


def settings_of(additional_config: Any) -> MockSettings:
    """From vLLM's `--additional-config`, key `mock`. Raises ConfigError."""
    given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    try:
        return MockSettings() if given is None else msgspec.convert(given, MockSettings)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"additional config {KEY!r}: {exc}") from None


class MockModel:
    """Counts tokens. Knows each scheduled request until vLLM says that it is finished."""

    def __init__(self, settings: MockSettings) -> None:
        self._settings = settings
        self._prompts: dict[str, int] = {}

    def step(self, scheduled: Any) -> dict[str, list[int]]:
        """The tokens sampled for each request of vLLM's SchedulerOutput: one where all tokens known
        so far are computed, none where a prompt goes on in a later step."""
        for request in scheduled.finished_req_ids:
            self._prompts.pop(request, None)
        counts, one = scheduled.num_scheduled_tokens, [self._settings.token]
        sampled: dict[str, list[int]] = {}
        for new in scheduled.scheduled_new_reqs:
            tokens = len(new.prefill_token_ids or new.prompt_token_ids)
            self._prompts[new.req_id] = len(new.prompt_token_ids)
            whole = new.num_computed_tokens + counts[new.req_id] >= tokens
            sampled[new.req_id] = list(one) if whole else []
        old = scheduled.scheduled_cached_reqs
        for request, computed, outputs in zip(
            old.req_ids, old.num_computed_tokens, old.num_output_tokens, strict=True
        ):
            whole = computed + counts[request] >= self._prompts[request] + outputs
            sampled[request] = list(one) if whole else []
        return sampled

    def seconds(self, scheduled: Any) -> float:
        """How long this step takes."""
        settings, tokens = self._settings, scheduled.total_num_scheduled_tokens
        if not tokens:
            return 0.0
        speed = settings.prefill_tokens_per_s
        return settings.step_s + (tokens / speed if speed else 0.0)
