"""The shape of an engine's KV cache, as far as two workers must agree on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pullfill.errors import IncompatibleError


@dataclass(frozen=True, slots=True)
class Geometry:
    """num_layers: distinct caches. page_bytes: one layer, block and KV head, K and V.
    device: torch's device type of the memory, e.g. `cpu`, `cuda`."""

    num_layers: int
    page_bytes: int
    device: str


def geometry(kv_caches: Mapping[str, Any]) -> Geometry:
    """From the [block, head, token, K‖V] tensors that vLLM passes to `register_kv_caches`."""
    tensors = list({id(t): t for t in kv_caches.values()}.values())
    first = tensors[0]
    rows, width = first.shape[-2:]
    return Geometry(len(tensors), rows * width * first.element_size(), first.device.type)


def require_one_group(kv_cache_config: Any) -> None:
    """Raises IncompatibleError for a model whose KV cache vLLM splits into several groups: their
    block ids overlap, and a grant names blocks by id alone."""
    groups = len(kv_cache_config.kv_cache_groups)
    if groups != 1:
        raise IncompatibleError(
            f"this model needs {groups} KV cache groups; pullfill moves one: serve it with plain "
            "vLLM",
            field="kv_cache_groups",
        )
