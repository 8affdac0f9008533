"""How this worker reaches a decode worker's KV memory: descriptors, transports, sessions.

Each rank of the decode worker has a region of its own, and so does each rank here; all are mapped
in this process. `topology.plan` says which parts go between which ranks, a session moves each part,
and the mover sees one session over all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from pullfill import log
from pullfill.errors import BadMessage, IncompatibleError
from pullfill.prefill_worker.context import PrefillContext
from pullfill.prefill_worker.mover import Mover
from pullfill.registry.directory import Directory
from pullfill.transfer import topology
from pullfill.transfer.choose import choose
from pullfill.transfer.contract import LocalMemory, Part, PeerSession, PeerTransport
from pullfill.transfer.group import GroupSession, Member
from pullfill.wire import Compat, RegionDescriptor, WorkerRecord

logger = log.get("prefill_worker.reach")

MAX_RANKS = 1024
"""More than any engine has; a descriptor that says more is nonsense, not a reason to ask etcd."""


async def open_mover(
    record: WorkerRecord,
    context: PrefillContext,
    directory: Directory,
    compat: Compat,
    transports: Sequence[PeerTransport],
) -> Mover:
    """Connect to a decode worker's KV memory by its descriptors from the registry, each rank over
    the best of `transports`. Raises IncompatibleError, PeerUnavailable, BadMessage,
    TransferFailed."""
    memories = context.memories
    if not memories:
        raise IncompatibleError("no transport reaches this worker's KV memory", field="device")
    name = record.instance_id
    first = await directory.descriptor(name, 0, expect=compat)
    if first.world_size > MAX_RANKS:
        raise BadMessage(f"{name} says it has {first.world_size} ranks")
    others = [
        await directory.descriptor(name, rank, expect=compat) for rank in range(1, first.world_size)
    ]
    session = await asyncio.to_thread(connect, memories, [first, *others], transports)
    logger.info("writing to %s over %s", name, session.transport)
    return Mover(session, name, memories)


def connect(
    memories: Sequence[LocalMemory],
    descriptors: Sequence[RegionDescriptor],
    transports: Sequence[PeerTransport],
) -> PeerSession:
    """One session to all ranks of a decode worker, described in order, from all ranks of this one.
    Blocks: maps or dials. Raises as `open_mover`; nothing stays open then."""
    chosen = []
    for descriptor in descriptors:
        transport, why_not = choose(descriptor, transports)
        for name, reason in why_not:
            logger.info("%s: not over %s: %s", descriptor.instance_id, name, reason)
        chosen.append(transport)
    members: list[Member] = []
    try:
        for (here, there, part), (writes, reads) in _parts(memories, descriptors).items():
            whole = part == _whole(memories[here]) and part == _whole_of(descriptors[there])
            session = chosen[there].connect(
                memories[here], descriptors[there], None if whole else part
            )
            members.append(Member(session, writes, reads))
    except BaseException:
        for member in members:
            with contextlib.suppress(Exception):
                member.session.close()
        raise
    if len(members) == 1 and members[0].writes and members[0].reads:
        return members[0].session
    return GroupSession(members)


def _parts(
    memories: Sequence[LocalMemory], descriptors: Sequence[RegionDescriptor]
) -> dict[tuple[int, int, Part], tuple[bool, bool]]:
    """(rank here, rank there, part) → whether it is needed for writing, for reading."""
    ours, theirs = topology.rects_of(memories), topology.rects_described(descriptors)
    writes = [(r.source, r.target, r.part) for r in topology.plan(ours, theirs)]
    reads = [(r.target, r.source, r.part.swapped()) for r in topology.plan(theirs, ours)]
    return {key: (key in writes, key in reads) for key in [*writes, *reads]}


def _whole(memory: LocalMemory) -> Part:
    layout = memory.layout
    return Part(0, 0, layout.num_kv_heads, 0, 0, layout.num_layers)


def _whole_of(descriptor: RegionDescriptor) -> Part:
    return Part(0, 0, descriptor.num_kv_heads, 0, 0, descriptor.num_layers)
