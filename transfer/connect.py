"""Connects two workers over the best transport, however each of them splits the model over ranks.

For each rank of the other worker, `choose` takes the best transport that reaches it. For each part
that goes between two ranks (`topology.plan`), `connect` opens a session. `GroupSession` makes one
session of them.

Prefill workers write to decode workers and read from them this way. Decode workers that pull read
from prefill workers this way.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence

from pullfill.config import TRANSPORTS
from pullfill.errors import IncompatibleError
from pullfill.transfer import topology
from pullfill.transfer.contract import LocalMemory, PeerSession, PeerTransport, Rect
from pullfill.transfer.group import GroupSession, Member
from pullfill.wire import RegionDescriptor

logger = logging.getLogger(__name__)

LONGEST_REASON = 300
"""Characters. A longer reason is cut, because reasons travel in every commit and a library that
fails to load may say much."""


def pulled_over(memory: LocalMemory, chosen: Collection[str] | None) -> frozenset[str]:
    """The transports that decode workers read from prefill workers over (`--kv-mode pull`): those
    that keep nothing open for a peer that never reads.

    chosen: the names that `--transports` allows. None: all."""
    names = {"shm", "tcp"} if memory.device is None else {"cuda_ipc"}
    return frozenset(names if chosen is None else names & set(chosen))


def choose(
    descriptor: RegionDescriptor, transports: Sequence[PeerTransport]
) -> tuple[PeerTransport, list[tuple[str, str]]]:
    """The best transport that both sides have and that can reach the region.

    Returns the transport, and (name, why not) for each better one. Names outside `TRANSPORTS` come
    last, in the order given. If none reaches the region, raises IncompatibleError with every
    reason; its field is "endpoints".
    """
    why_not: list[tuple[str, str]] = []
    for transport in sorted(transports, key=lambda t: _rank(t.name)):
        if transport.name not in descriptor.endpoints:
            why_not.append((transport.name, "the owner does not offer it"))
            continue
        reason = transport.can_reach(descriptor)
        if reason is None:
            return transport, why_not
        why_not.append((transport.name, reason))
    known = {name for name, _ in why_not}
    why_not += [(name, "not available here") for name in descriptor.endpoints if name not in known]
    reasons = "; ".join(f"{name}: {reason}" for name, reason in why_not) or "it offers none"
    raise IncompatibleError(
        f"no transport reaches {descriptor.instance_id} rank {descriptor.rank}: {reasons}",
        field="endpoints",
    )


def why_not_better(
    descriptor: RegionDescriptor, transports: Sequence[PeerTransport], absent: Mapping[str, str]
) -> list[str]:
    """For people: "name: reason" for each transport better than the one that `choose` takes. Empty
    if none reaches the region.

    absent: by name, why a transport is not among `transports`."""
    try:
        chosen, why_not = choose(descriptor, transports)
    except IncompatibleError:
        return []
    reasons = dict(absent) | dict(why_not)
    better = TRANSPORTS[: _rank(chosen.name)]
    return [f"{name}: {reasons[name]}"[:LONGEST_REASON] for name in better if name in reasons]


def _rank(name: str) -> int:
    return TRANSPORTS.index(name) if name in TRANSPORTS else len(TRANSPORTS)


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
