"""The decode worker's KV cache as memory that prefill workers can write.

Worker half of the connector: where vLLM allocates its cache, we back it with a shared region; when
vLLM registers the tensors, we learn the strides, open the fences and make the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from pullfill import log
from pullfill.decode_worker.context import DecodeContext
from pullfill.transfer.shm.pool import SharedKvPool

logger = log.get("decode_worker.memory")


def pool_context(context: DecodeContext) -> AbstractContextManager[Any]:
    """vLLM allocates its KV cache inside this; the allocation lands in shared memory."""
    context.pool = SharedKvPool(context.instance_id, rank=0)
    result: AbstractContextManager[Any] = context.pool
    return result


def register(context: DecodeContext, kv_caches: Mapping[str, Any], num_blocks: int) -> None:
    """Learn the layout, open the region to peers, start the ledger."""
    if context.pool is None:
        context.pool = SharedKvPool(context.instance_id, rank=0)
    context.owner, context.memory = context.pool.make_owner(
        kv_caches, context.incarnation, num_blocks
    )
    context.ledger = context.make_ledger(context.owner)
    layout = context.memory.layout
    logger.info("KV cache shared: %d blocks of %d bytes", layout.num_blocks, layout.block_bytes)
