"""The prefill worker's own KV cache: read from and written into by its movers only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pullfill import log
from pullfill.engine import kv
from pullfill.prefill_worker.context import PrefillContext
from pullfill.transfer.shm.pool import describe

logger = log.get("prefill_worker.memory")


def register(context: PrefillContext, kv_caches: Mapping[str, Any], num_blocks: int) -> None:
    """Learn where vLLM's tensors are. Raises IncompatibleError when the layout is not usable.
    Memory that no transport reaches (a GPU's, so far) makes a worker that gets no jobs."""
    context.geometry = kv.geometry(kv_caches)
    if context.geometry.device != "cpu":
        logger.warning(
            "no transport reaches KV memory on %s yet: no job will come", context.geometry.device
        )
        return
    context.memory = describe(kv_caches, num_blocks)
