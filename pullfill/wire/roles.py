"""Orders to elastic workers. Part of the wire (docs/wire.md); imported through `pullfill.wire`."""

from __future__ import annotations

import enum

from pullfill.wire.codec import WIRE_VERSION, Finite, Id, Message, Version


class WorkerRole(enum.StrEnum):
    """What an elastic worker can be."""

    DECODE = "decode"
    PREFILL = "prefill"
    BOTH = "both"

    @property
    def names(self) -> frozenset[str]:
        """The roles under which such a worker is registered."""
        return frozenset({"decode", "prefill"} if self is WorkerRole.BOTH else {str(self)})


class RoleMove(Message, frozen=True, kw_only=True):
    """`planner`: the last order of `pullfill plan --apply`.

    A planner writes the key only if no other one has written it since. So several planners together
    move no faster than one.

    after: the new role of the worker. at: when, in seconds since 1970 by the writer's clock."""

    v: Version = WIRE_VERSION
    instance_id: Id
    after: WorkerRole
    at: Finite


class RoleOrder(Message, frozen=True, kw_only=True):
    """`roles/{instance_id}`: what this elastic worker must be from now on.

    The key hangs on the worker's lease of that moment, so it goes while the worker changes."""

    v: Version = WIRE_VERSION
    role: WorkerRole
