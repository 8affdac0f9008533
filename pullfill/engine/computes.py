"""What decides how an engine rounds, as a digest.

Two workers of one compatibility hash exchange KV bytes. Their KV can still differ by rounding, or
by a fault of one way to compute it. The self-check compares two kinds of workers once; this digest
says which kind a worker is.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

from pullfill import __version__
from pullfill.engine.kv import executor_without_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def digest(config: VllmConfig) -> str:
    """16 hex digits; "" for a worker without a model, whose KV means nothing."""
    if executor_without_model(config) is not None:
        return ""
    text = json.dumps(_parts(config), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def dtype_of_kv(config: VllmConfig) -> str:
    """vLLM's name of the numbers in the KV cache."""
    kept = str(config.cache_config.cache_dtype)
    return str(config.model_config.dtype).removeprefix("torch.") if kept == "auto" else kept


def logprobs_are_cheap() -> bool:
    """Whether vLLM answers a question for log probabilities without compiling its helper first,
    which takes seconds on the engine thread (engine/environment.py)."""
    return os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def _parts(config: Any) -> dict[str, Any]:
    import torch
    from vllm.platforms import current_platform

    parallel, steps, compiled = (
        config.parallel_config,
        config.scheduler_config,
        config.compilation_config,
    )
    return {
        "pullfill": __version__,
        "torch": torch.__version__,
        "device": current_platform.get_device_name(),
        "role": config.kv_transfer_config.kv_role,
        "ranks": (parallel.tensor_parallel_size, parallel.pipeline_parallel_size),
        "expert_parallel": parallel.enable_expert_parallel,
        "steps": (
            steps.max_num_batched_tokens,
            steps.enable_chunked_prefill,
            steps.long_prefill_token_threshold,
        ),
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "attention": getattr(config.attention_config, "backend", None),
        "compiled": (compiled.mode, compiled.backend, sorted(compiled.custom_ops)),
        "speculation": config.speculative_config is not None,
    }
