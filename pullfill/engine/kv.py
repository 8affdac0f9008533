"""The shape of an engine's KV cache, and how its bytes are stored: what two workers must agree on.

Each rank looks at its own attention layers once vLLM has loaded the weights
(`attention_of_rank`). The main process joins what the ranks tell (`join_attention`) into two fields
of the compatibility record.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from pullfill.engine.groups import Groups
from pullfill.errors import IncompatibleError

NO_ATTENTION = "none"
UNSCALED = "1"


@dataclass(frozen=True, slots=True)
class RankAttention:
    """What one rank knows about its layers. Holds plain types only: it is sent between processes.

    backends: vLLM's names of the attention backends.
    scales: name of a layer, its scales of K, and of V: one number, or one per KV head."""

    backends: frozenset[str] = frozenset()
    scales: frozenset[tuple[str, tuple[float, ...], tuple[float, ...]]] = frozenset()


def attention_of_rank(vllm_config: Any, layer_names: Iterable[str]) -> RankAttention:
    """Describe the layers of this process that own a KV cache. Without a model there are none."""
    layers = vllm_config.compilation_config.static_forward_context
    found = {name: layers[name] for name in layer_names if name in layers}
    return RankAttention(
        frozenset(layer.get_attn_backend().get_name() for layer in found.values()),
        frozenset(
            (
                name,
                tuple(layer._k_scale.flatten().tolist()),
                tuple(layer._v_scale.flatten().tolist()),
            )
            for name, layer in found.items()
            if hasattr(layer, "_k_scale")
        ),
    )


def join_attention(ranks: Collection[RankAttention]) -> tuple[str, str]:
    """Join what the ranks know: return `backend` and `scales` of Geometry. The result does not
    depend on how layers are split over ranks."""
    backends = sorted(frozenset[str]().union(*(rank.backends for rank in ranks)))
    # Ranks that share a layer have the same number for it. With a number for each head they do not,
    # so then only workers that split their heads alike exchange KV.
    scales = sorted(frozenset().union(*(rank.scales for rank in ranks)))
    digest = hashlib.blake2b(json.dumps(scales).encode(), digest_size=8).hexdigest()
    scaled = any({*k, *v} != {1.0} for _, k, v in scales)
    return "+".join(backends) or NO_ATTENTION, digest if scaled else UNSCALED


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of the KV cache, and how the whole model stores KV in it.

    num_layers: number of distinct caches in the whole model.
    page_bytes: bytes of K and V of one layer, block and KV head.
    backend: vLLM's name of the attention backend, or several joined by `+`. `none` without a model.
    scales: `1` if nothing is scaled, else 16 hex digits: a digest of the scales of all layers.
    groups: which layers share their blocks."""

    # The order of bytes inside a page is the backend's own. vLLM's layout name says only which page
    # comes after which: CPU_ATTN and ROCM_ATTN, for example, reorder K inside the page.
    # A quantized KV cache holds K and V divided by scales that vLLM takes from the checkpoint, or 1
    # where it has none. With other scales the same bytes are other numbers. The fingerprint of the
    # model reads samples of the weights only, and may miss the scales.

    num_layers: int
    page_bytes: int
    backend: str
    scales: str
    groups: Groups


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


def kind_without_model(vllm_config: Any) -> str:
    """What the KV of an executor that computes no model is, in one word. Empty: it computes one.

    Such a class has an attribute of ours, KV_KIND. Only workers of one kind exchange KV."""
    from vllm.v1.executor import Executor

    return str(getattr(Executor.get_class(vllm_config), "KV_KIND", ""))


def device() -> str:
    """torch's device type of this engine's KV memory, e.g. `cpu`, `cuda`."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)
