"""The prefill worker's own KV cache: read from and written into by its movers only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.shm.pool import describe as _describe


def describe(kv_caches: Mapping[str, Any], num_blocks: int) -> LocalMemory:
    """Where vLLM's tensors are. Raises IncompatibleError when the layout is not usable."""
    return _describe(kv_caches, num_blocks)
