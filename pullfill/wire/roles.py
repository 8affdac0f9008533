"""Orders to elastic workers. Part of the wire (docs/wire.md); imported through `pullfill.wire`."""

from __future__ import annotations

import enum

from pullfill.wire.codec import WIRE_VERSION, Message, Version


class WorkerRole(enum.StrEnum):
    """What an elastic worker can be."""

    DECODE = "decode"
    PREFILL = "prefill"
    BOTH = "both"

    @property
    def names(self) -> frozenset[str]:
        """The roles under which such a worker is registered."""
        return frozenset({"decode", "prefill"} if self is WorkerRole.BOTH else {str(self)})


class RoleOrder(Message, frozen=True, kw_only=True):
    """`roles/{instance_id}`: what this elastic worker must be from now on.

    The key hangs on the worker's lease of that moment, so it goes while the worker changes."""

    v: Version = WIRE_VERSION
    role: WorkerRole
