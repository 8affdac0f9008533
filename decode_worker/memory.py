"""The decode worker's KV cache as memory that prefill workers can write.

`attach` maps every rank in the main process, opens the fences and makes the ledger, before the
engine takes a request. The rest of its life is the same in both kinds of worker (worker/memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from pullfill.decode_worker.context import DecodeContext
from pullfill.engine.kv import NO_MODEL, Attention
from pullfill.errors import OverloadedError
from pullfill.runtime import log
from pullfill.transfer.owners import base_owner
from pullfill.wire import FenceToken
from pullfill.worker import memory

logger = log.get("decode_worker.memory")


def attach(
    context: DecodeContext, told: memory.Told, kv_heads: int, attention: Attention = NO_MODEL
) -> None:
    """Map the memory of every rank, open it to peers, and make the ledger.

    If no transport reaches the memory, the worker prefills every prompt itself.

    told: what each rank has told of its memory."""
    first = memory.attach(context, told, kv_heads, attention)
    if context.ranks and context.files is not None:
        base = base_owner(context.files, context.ranks, context.incarnation)
        context.owner = context.offer(base, context.memories)
    if context.owner is None:
        logger.warning(
            "no transport reaches KV memory on %s: every prompt is prefilled by this worker%s",
            first.device, first.why_not and f" ({first.why_not})",
        )  # fmt: skip
        context.ledger = context.make_ledger(_NoFences())
        return
    context.ledger = context.make_ledger(context.owner.fences)
    layouts = [rank.memory.layout for rank in context.ranks]
    logger.info(
        "KV cache shared: %d blocks of %d bytes on %d ranks",
        layouts[0].num_blocks, sum(layout.block_bytes for layout in layouts), len(layouts),
    )  # fmt: skip


class _NoFences:
    """OwnerFences of memory that no other process can reach. Every grant is refused."""

    in_use = 0

    def open(self, block_ids: Sequence[int], first_target: int = 0) -> FenceToken:
        raise OverloadedError("no transport reaches this worker's KV memory")

    def try_revoke(self, token: FenceToken) -> bool:
        return True

    def close(self) -> None:
        """Nothing to give back."""
