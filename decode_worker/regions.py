"""What the registry says about this worker's KV memory: one descriptor for each rank."""

from __future__ import annotations

from pullfill.decode_worker.context import DecodeContext
from pullfill.host import host_id
from pullfill.transfer.layout import describe_region
from pullfill.wire import Compat, RegionDescriptor


def describe(
    context: DecodeContext, incarnation: str, compat: Compat, block_size: int
) -> list[RegionDescriptor]:
    """Under `incarnation`; empty when no transport reaches the memory. Sessions and descriptors of
    the incarnation before are refused from now on."""
    if context.owner is None:
        return []
    context.owner.renew(incarnation)
    return [
        describe_region(
            memory,
            instance_id=context.instance_id,
            incarnation=incarnation,
            rank=rank,
            world_size=len(context.ranks),
            host_id=host_id(),
            epoch=0,
            block_size=block_size,
            compat=compat,
            endpoints=context.owner.endpoints(rank),
        )
        for rank, memory in enumerate(context.memories)
    ]
