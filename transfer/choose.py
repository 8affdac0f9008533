"""Chooses the transport that reaches a region, and says why no better one does.

Does no I/O of its own; a transport's `can_reach` may.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pullfill.config import TRANSPORTS
from pullfill.errors import IncompatibleError
from pullfill.transfer.contract import PeerTransport
from pullfill.wire import RegionDescriptor

LONGEST_REASON = 300
"""Characters. A longer reason is cut: reasons travel in every commit, and a commit's texts are
bounded. A library that fails to load may say much."""


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
