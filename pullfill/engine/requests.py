"""Makers of vLLM engine requests, so that rooms need not import vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def prefill_request(
    request_id: str,
    token_ids: Sequence[int],
    *,
    cache_salt: str | None,
    priority: int,
    arrival_time: float,
) -> Any:
    """An EngineCoreRequest that computes the KV of `token_ids` and samples one token, which
    nobody reads. Sampling parameters of the user never come here."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(token_ids),
        mm_features=None,
        sampling_params=SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False
        ),
        pooling_params=None,
        arrival_time=arrival_time,
        lora_request=None,
        cache_salt=cache_salt,
        data_parallel_rank=None,
        priority=priority,
    )


def is_error(output: Any) -> bool:
    """Whether an EngineCoreOutput ends its request with an engine error."""
    from vllm.v1.engine import FinishReason

    return bool(output.finish_reason == FinishReason.ERROR)
