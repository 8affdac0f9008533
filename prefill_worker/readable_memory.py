"""Opens this worker's own KV memory to decode workers that read it (`--kv-mode pull`).

It is always opened, because a decode worker says its mode only with a grant. Nobody can read it
without one of our fences, and `ReadGrants` opens one for each task whose blocks are kept. The
descriptors go to the decode workers with `Hello`. Their incarnation is this process's own.

Life: `open_region` → `PrefillContext.owner`, closed by the worker when no session can be open.
"""

from __future__ import annotations

from pullfill.ids import new_incarnation
from pullfill.net.security import ClusterKey
from pullfill.prefill_worker.context import PrefillContext
from pullfill.runtime import log
from pullfill.transfer.connect import backends, pulled_over
from pullfill.transfer.layout import describe_ranks
from pullfill.transfer.owners import CombinedOwner, base_owner
from pullfill.wire import Compat, RegionDescriptor

logger = log.get("prefill_worker.readable_memory")


def open_region(
    context: PrefillContext,
    compat: Compat,
    *,
    host: str,
    port: int = 0,
    advertise: str | None = None,
    transports: frozenset[str] | None,
    key: ClusterKey | None,
) -> tuple[RegionDescriptor, ...]:
    """Open the memory, and describe that of each rank. Empty: nobody can read it.

    Raises ConfigError.

    host, port: where to listen if `tcp` is among the transports. Port 0: any.
    advertise: the address to publish instead."""
    if not context.ranks or context.files is None:
        return ()
    incarnation = new_incarnation()
    memories = context.memories
    names = pulled_over(memories[0], transports)
    owner = CombinedOwner(
        base_owner(context.files, context.ranks, incarnation),
        memories,
        instance_id=context.instance_id,
        kinds=backends(names, memories[0]),
        key=key,
        offered=names,
    )
    context.owner = owner
    owner.listen(host, port, advertise)
    described = describe_ranks(
        owner,
        memories,
        instance_id=context.instance_id,
        incarnation=incarnation,
        compat=compat,
    )
    return tuple(described)
