"""What the registry says about this worker's KV memory: one descriptor for each rank."""

from __future__ import annotations

from pullfill.decode_worker.context import DecodeContext
from pullfill.transfer.layout import describe_ranks
from pullfill.wire import Compat, RegionDescriptor


def describe(context: DecodeContext, incarnation: str, compat: Compat) -> list[RegionDescriptor]:
    """Describe the memory of each rank under `incarnation`. Empty: no transport reaches it.

    From now on sessions and descriptors of the last incarnation are refused."""
    if context.owner is None:
        return []
    context.owner.renew(incarnation)
    return describe_ranks(
        context.owner,
        context.memories,
        instance_id=context.instance_id,
        incarnation=incarnation,
        compat=compat,
    )
