"""Says which prompts can never be prefilled remotely, and what the others' jobs must bring along.

A job holds token ids, a LoRA adapter and multimodal inputs. A prompt whose KV depends on more is
prefilled here. So is a prompt of which vLLM wants every logit, because a prefill worker brings KV
only. `request` is vLLM's Request. Engine thread.
"""

from __future__ import annotations

from typing import Any

from pullfill.decode_worker.context import DecodeContext
from pullfill.engine import features
from pullfill.wire import MAX_TEXT, Adapter


def ineligible(
    context: DecodeContext, request: Any, adapter: Adapter | None, local_tokens: int, never: str
) -> str:
    """Return why this request can never be prefilled remotely. Empty: it can.

    adapter: what `adapter_of` returned. local_tokens: see `Situation`.
    never: the reason why this engine prefills every prompt. Empty: there is none."""
    if request.num_output_tokens or request.num_preemptions:
        return "resumed"
    if context.traces.fallback_of(request.request_id) is not None:
        return "fallback"
    if request.skip_reading_prefix_cache:
        return "prompt_logprobs"
    if request.mm_features and not _features_may_go(context, request, local_tokens):
        return "multimodal"
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "prompt_embeds"
    if request.lora_request is not None and adapter is None:
        return "lora"
    if request.pooling_params is not None:
        return "pooling"
    if request.cache_salt is not None and len(request.cache_salt) > MAX_TEXT:
        return "cache_salt"  # the user's; a job with it would be refused as poison
    return never


def adapter_of(context: DecodeContext, request: Any) -> Adapter | None:
    """Return the request's LoRA adapter for a job. None: it has none, or it cannot be sent.

    No prefill worker may load adapters. For other reasons see `own_adapter`."""
    if request.lora_request is None or not context.adapters_elsewhere():
        return None
    return own_adapter(context, request)


def own_adapter(context: DecodeContext, request: Any) -> Adapter | None:
    """Return the request's LoRA adapter for another worker. None: it has none, or it cannot be
    told. See `Adapters.for_others`."""
    asked = request.lora_request
    return None if asked is None else context.adapters.for_others(asked)


def _features_may_go(context: DecodeContext, request: Any, local_tokens: int) -> bool:
    """Whether a prefill worker can get the multimodal inputs of this request."""
    # vLLM may compute features with an adapter. Nothing shows yet that prefill workers do the same.
    return (
        request.lora_request is None
        and context.features_elsewhere()
        and features.may_go(request.mm_features, request.num_prompt_tokens - local_tokens)
    )
