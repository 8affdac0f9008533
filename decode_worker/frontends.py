"""What the shim keeps of one frontend and of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from pullfill.engine import rpc


@dataclass(slots=True, eq=False)
class Frontend:
    """One connection. clogged: it has not read what it was sent."""

    identity: bytes
    index: int
    last_seen: float
    name: str = ""
    clogged: bool = False
    requests: set[str] = field(default_factory=set)

    def silent(self, now: float) -> bool:
        """Whether it is taken for gone. One without requests says PING half as often."""
        more = 0.0 if self.requests else rpc.PING_INTERVAL_S
        return now - self.last_seen > rpc.SILENCE_S + more


@dataclass(slots=True, eq=False)
class Request:
    """One request that was taken. coming: not yet in the engine. wanted: not aborted since."""

    id: str
    frontend: Frontend
    coming: bool = True
    wanted: bool = True
