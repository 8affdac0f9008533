"""This worker's own KV memory as decode workers may read it (`--kv-mode pull`).

Opened once the engine has told its memory, whatever the modes of the decode workers are: they say
theirs only with a grant. What we publish is a region that only a fence of ours lets anybody read;
`ReadGrants` opens one for each task that is kept. It goes to the decode workers with `Hello`, so it
is known as long as the connection lasts, under an incarnation that is this process's own.

Life: `open_region` → `PrefillContext.owner`, closed by the worker when no session can be open.
"""

from __future__ import annotations

from pullfill.ids import new_incarnation
from pullfill.net.security import ClusterKey
from pullfill.prefill_worker.context import PrefillContext
from pullfill.runtime import log
from pullfill.transfer import catalogue
from pullfill.transfer.combined_owner import CombinedOwner
from pullfill.transfer.connect import pulled_over
from pullfill.transfer.layout import describe_ranks
from pullfill.transfer.shm import ranks
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
    """Describe each rank's memory; none if nobody can read it. Binds `port` of `host` (0: any) if
    `tcp` is among the transports; advertise: told instead of it. Raises ConfigError."""
    if not context.ranks or context.files is None:
        return ()
    incarnation = new_incarnation()
    memories = context.memories
    names = pulled_over(memories[0], transports)
    owner = CombinedOwner(
        ranks.base_owner(context.files, context.ranks, incarnation),
        memories,
        instance_id=context.instance_id,
        kinds=catalogue.backends(names, memories[0]),
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
