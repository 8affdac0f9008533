"""The decode worker's KV cache as memory that prefill workers can write.

Life: `prepare` takes the names (main process, before the engine is built) → each rank's process
backs its cache with a file and tells where it is (connector.py) → `attach` maps every rank in the
main process, opens the fences and makes the ledger, before the engine takes a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pullfill.decode_worker.context import DecodeContext
from pullfill.engine.attention import NO_MODEL, Attention
from pullfill.engine.kv import Geometry
from pullfill.errors import OverloadedError
from pullfill.runtime import log
from pullfill.transfer.shm import ranks
from pullfill.transfer.shm.files import RegionFiles
from pullfill.wire import FenceToken

logger = log.get("decode_worker.memory")


def prepare(context: DecodeContext) -> dict[str, str]:
    """Take the file names; returns what the ranks must know of them. Raises ConfigError."""
    context.files = RegionFiles(context.instance_id)
    return {"instance_id": context.instance_id, "directory": str(context.files.directory)}


def attach(
    context: DecodeContext,
    told: Mapping[tuple[int, int], ranks.RankRegion],
    kv_heads: int,
    attention: Attention = NO_MODEL,
) -> None:
    """Every rank has told its memory: map it, open it to peers, start the ledger. Memory that no
    transport reaches stays private: the worker serves, and prefills everything itself."""
    first = next(iter(told.values()))
    layers = ranks.total_layers(told)
    context.geometry = Geometry(layers, first.page_bytes, first.device, attention)
    context.ranks = ranks.attach(told, kv_heads)
    if context.ranks and context.files is not None:
        base = ranks.base_owner(context.files, context.ranks, context.incarnation)
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
    """OwnerFences of memory that nobody else can touch: nothing to grant, nothing to prove."""

    in_use = 0

    def open(self, block_ids: Sequence[int], first_target: int = 0) -> FenceToken:
        raise OverloadedError("no transport reaches this worker's KV memory")

    def try_revoke(self, token: FenceToken) -> bool:
        return True

    def close(self) -> None:
        """Nothing to give back."""
