"""Connects two workers, however each of them splits the model over ranks.

For each rank of the other worker it takes the best transport (`choose.py`). For each part that goes
between two ranks (`topology.plan`) it opens a session. `GroupSession` makes one of them.

Prefill workers write to decode workers and read from them this way. Decode workers that pull read
from prefill workers this way.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Sequence

from pullfill.transfer import topology
from pullfill.transfer.choose import choose
from pullfill.transfer.contract import LocalMemory, PeerSession, PeerTransport, Rect
from pullfill.transfer.group import GroupSession, Member
from pullfill.wire import RegionDescriptor

logger = logging.getLogger(__name__)


def pulled_over(memory: LocalMemory, chosen: Collection[str] | None) -> frozenset[str]:
    """The transports that decode workers read from prefill workers over (`--kv-mode pull`): those
    that keep nothing open for a peer that never reads.

    chosen: the names that `--transports` allows. None: all."""
    names = {"shm", "tcp"} if memory.device is None else {"cuda_ipc"}
    return frozenset(names if chosen is None else names & set(chosen))


def connect(
    memories: Sequence[LocalMemory],
    descriptors: Sequence[RegionDescriptor],
    transports: Sequence[PeerTransport],
) -> PeerSession:
    """One session from all ranks of this worker to all ranks of another one. Blocks: maps or dials.

    descriptors: of the other worker's ranks, in order.

    Raises IncompatibleError, PeerUnavailable, BadMessage, TransferFailed. Then nothing stays open.
    """
    chosen = []
    for descriptor in descriptors:
        transport, why_not = choose(descriptor, transports)
        for name, reason in why_not:
            logger.info("%s: not over %s: %s", descriptor.instance_id, name, reason)
        chosen.append(transport)
    members: list[Member] = []
    try:
        for (here, there, part), (writes, reads) in _parts(memories, descriptors).items():
            session = chosen[there].connect(memories[here], descriptors[there], part)
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
) -> dict[tuple[int, int, Rect], tuple[bool, bool]]:
    """(rank here, rank there, part) → whether it is needed for writing, for reading."""
    ours, theirs = [m.rect for m in memories], topology.rects_described(descriptors)
    writes = [(r.source, r.target, r.part) for r in topology.plan(ours, theirs)]
    reads = [(r.target, r.source, r.part) for r in topology.plan(theirs, ours)]
    return {key: (key in writes, key in reads) for key in [*writes, *reads]}
