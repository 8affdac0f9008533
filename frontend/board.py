"""The port through which `Suspects` works with other frontends.

`registry.suspects.SuspectBoard` implements it. `Alone` is for a frontend without others.
"""

from __future__ import annotations

from typing import Protocol

from pullfill.registry.probations import Probation, Told


class Probations(Protocol):
    """Deaths and probations of all frontends. See `registry.probations`.

    No call waits, except `testimony`."""

    @property
    def shared(self) -> bool:
        """Whether there are other frontends."""
        ...

    @property
    def any(self) -> bool:
        """Whether there is any probation."""
        ...

    def testify(self, process: str, instance_id: str, names: dict[str, bool]) -> None:
        """Tell other frontends which requests without an output we had at a worker that died."""
        ...

    def absolve(self, fingerprint: str) -> None:
        """Tell other frontends that this request did not kill the workers named with it."""
        ...

    def retract(self, instance_id: str) -> None:
        """Take back `testify`: this worker had not died."""
        ...

    async def testimony(self, instance_id: str, fingerprint: str) -> Told:
        """Return what other frontends had at that worker, except requests of this fingerprint."""
        ...

    def elsewhere(self, fingerprint: str) -> bool:
        """Whether another frontend has a request with this fingerprint on probation."""
        ...

    def taken(self, instance_id: str) -> bool:
        """Whether a worker has a probation, of ours or of another frontend."""
        ...

    def mine(self, fingerprint: str) -> Probation | None:
        """Our probation of this fingerprint, or None."""
        ...

    def take(self, fingerprint: str, instance_id: str, ttl_s: float) -> None:
        """Ask for a probation. `mine` returns it until it is refused or released."""
        ...

    def release(self, fingerprint: str) -> None:
        """End our probation of this fingerprint, if there is one."""
        ...


class Board(Protocol):
    """The refused fingerprints of all frontends, and their probations."""

    @property
    def probations(self) -> Probations: ...

    def __len__(self) -> int: ...

    def left_s(self, fingerprint: str) -> float:
        """Return how long the fingerprint is refused. 0: it is not."""
        ...

    def post(self, fingerprint: str, deaths: int, prompt_tokens: int, ttl_s: float) -> None:
        """Refuse the fingerprint at every frontend. Returns at once."""
        ...


class NoProbations:
    """There are no other frontends."""

    shared = False
    any = False

    def testify(self, process: str, instance_id: str, names: dict[str, bool]) -> None: ...

    def absolve(self, fingerprint: str) -> None: ...

    def retract(self, instance_id: str) -> None: ...

    async def testimony(self, instance_id: str, fingerprint: str) -> Told:
        return Told()

    def elsewhere(self, fingerprint: str) -> bool:
        return False

    def taken(self, instance_id: str) -> bool:
        return False

    def mine(self, fingerprint: str) -> Probation | None:
        return None

    def take(self, fingerprint: str, instance_id: str, ttl_s: float) -> None: ...

    def release(self, fingerprint: str) -> None: ...


class Alone:
    """See the module."""

    def __init__(self, probations: Probations | None = None) -> None:
        self.probations: Probations = NoProbations() if probations is None else probations

    def __len__(self) -> int:
        return 0

    def left_s(self, fingerprint: str) -> float:
        return 0.0

    def post(self, fingerprint: str, deaths: int, prompt_tokens: int, ttl_s: float) -> None: ...
