"""The decode worker's KV cache as memory that prefill workers can write.

Worker half of the connector: where vLLM allocates its cache, we back it with a shared region; when
vLLM registers the tensors, we learn the strides, open the fences and make the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from pullfill import log
from pullfill.decode_worker.context import DecodeContext
from pullfill.engine import kv
from pullfill.errors import OverloadedError
from pullfill.transfer.shm.pool import SharedKvPool
from pullfill.wire import FenceToken

logger = log.get("decode_worker.memory")


def pool_context(context: DecodeContext) -> AbstractContextManager[Any]:
    """vLLM allocates its KV cache inside this; the allocation lands in shared memory."""
    context.pool = SharedKvPool(context.instance_id, rank=0)
    result: AbstractContextManager[Any] = context.pool
    return result


def register(context: DecodeContext, kv_caches: Mapping[str, Any], num_blocks: int) -> None:
    """Learn the layout, open the region to peers, start the ledger. Memory that no transport
    reaches (a GPU's, so far) stays private: the worker serves, and prefills everything itself."""
    context.geometry = kv.geometry(kv_caches)
    if context.geometry.device != "cpu":
        logger.warning(
            "no transport reaches KV memory on %s yet: every prompt is prefilled by this worker",
            context.geometry.device,
        )
        context.ledger = context.make_ledger(_NoFences())
        return
    if context.pool is None:
        context.pool = SharedKvPool(context.instance_id, rank=0)
    context.owner, context.memory = context.pool.make_owner(
        kv_caches, context.incarnation, num_blocks
    )
    context.ledger = context.make_ledger(context.owner.fences)
    layout = context.memory.layout
    logger.info("KV cache shared: %d blocks of %d bytes", layout.num_blocks, layout.block_bytes)


class _NoFences:
    """OwnerFences of memory that nobody else can touch: nothing to grant, nothing to prove."""

    in_use = 0

    def open(self, block_ids: Sequence[int]) -> FenceToken:
        raise OverloadedError("no transport reaches this worker's KV memory")

    def try_revoke(self, token: FenceToken) -> bool:
        return True

    def close(self) -> None:
        """Nothing to give back."""
