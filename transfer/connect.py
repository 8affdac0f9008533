"""One session between two workers, whatever their ranks: the best transport for each rank's region,
a session for each part that goes between two ranks (`topology.plan`), and one over all of them.

Prefill workers write into and read from decode workers with it; decode workers that pull, read.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Sequence

from pullfill.transfer import topology
from pullfill.transfer.choose import choose
from pullfill.transfer.contract import LocalMemory, Part, PeerSession, PeerTransport
from pullfill.transfer.group import GroupSession, Member
from pullfill.wire import RegionDescriptor

logger = logging.getLogger(__name__)


def pulled_over(memory: LocalMemory, chosen: Collection[str] | None) -> frozenset[str]:
    """Transports that decode workers read prefill workers over (`--kv-mode pull`), of those chosen:
    the ones that keep nothing open for a peer that never reads."""
    names = {"shm", "tcp"} if memory.device is None else {"cuda_ipc"}
    return frozenset(names if chosen is None else names & set(chosen))


def connect(
    memories: Sequence[LocalMemory],
    descriptors: Sequence[RegionDescriptor],
    transports: Sequence[PeerTransport],
) -> PeerSession:
    """One session to all ranks of a worker, described in order, from all ranks of this one. Blocks:
    maps or dials. Raises IncompatibleError, PeerUnavailable, BadMessage, TransferFailed; nothing
    stays open then."""
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
