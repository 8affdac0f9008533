"""The shape of an engine's KV cache, as far as two workers must agree on it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pullfill.engine.attention import NO_MODEL, Attention
from pullfill.errors import IncompatibleError

if TYPE_CHECKING:
    from pullfill.engine.tier import Tier


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of the KV cache.

    num_layers: number of distinct caches in the whole model.
    page_bytes: bytes of K and V of one layer, block and KV head.
    device: torch's device type of the memory, e.g. `cpu`, `cuda`.
    attention: how the bytes of a page are stored."""

    num_layers: int
    page_bytes: int
    device: str
    attention: Attention = NO_MODEL


def total_heads(vllm_config: Any) -> int:
    """KV heads of the whole model, as caches hold them. Latent attention has one, on every rank.

    Raises IncompatibleError for context parallelism, which splits a block's tokens over ranks."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise IncompatibleError(
            "context parallelism splits each block over ranks by tokens; pullfill moves whole "
            "blocks: use tensor or pipeline parallelism",
            field="context_parallel_size",
        )
    model = vllm_config.model_config
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())


def executor_without_model(vllm_config: Any) -> Any:
    """The executor class that `--distributed-executor-backend` names, if it computes no model.

    Such a class has two attributes of ours:
    KV_KIND: what its KV is, in one word. Only workers of one kind exchange KV.
    kv_device: function from vLLM's config to the device of the KV memory. `auto`: that of vLLM."""
    named = vllm_config.parallel_config.distributed_executor_backend
    if isinstance(named, str) and "." in named:  # a class path; vLLM's own executors are one word
        module, _, name = named.rpartition(".")
        named = getattr(import_module(module), name)
    return named if hasattr(named, "KV_KIND") else None


def device_of(vllm_config: Any) -> str:
    """torch's device type of this engine's KV memory, e.g. `cpu`, `cuda`. Raises ConfigError."""
    from vllm.platforms import current_platform

    executor = executor_without_model(vllm_config)
    wanted = executor.kv_device(vllm_config) if executor is not None else "auto"
    if wanted != "auto":
        return str(wanted)
    return str(current_platform.device_type)


def tier_of(core: Any) -> Tier | None:
    """Return vLLM's own KV offloading beside our connector. None: this EngineCore has none."""
    if not hasattr(core.scheduler.connector, "sub_connectors"):
        return None
    from pullfill.engine.tier import Tier

    return Tier.of(core)


def free_blocks(core: Any) -> int:
    """Return the number of blocks that no request holds, cached ones included. 0: no engine."""
    if core is None:
        return 0
    return int(core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def usable_blocks(core: Any) -> int:
    """Return the number of blocks that requests can hold, which are free when none runs. 0: no
    engine."""
    if core is None:
        return 0
    # One is vLLM's null block.
    return max(0, int(core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1)
