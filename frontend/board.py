"""What `Suspects` needs of other frontends. `registry.suspects.SuspectBoard` implements it.

`Alone` is the board of a frontend that has no others.
"""

from __future__ import annotations

from typing import Protocol

from pullfill.registry.probations import Probation, Told


class Probations(Protocol):
    """Deaths and probations of all frontends: `registry.probations`. No call waits but
    `testimony`."""

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
        """It has not killed the workers that we said it was at."""
        ...

    def retract(self, instance_id: str) -> None:
        """That worker had not died."""
        ...

    async def testimony(self, instance_id: str, fingerprint: str) -> Told:
        """What other frontends had at that worker. fingerprint: requests like this do not count."""
        ...

    def elsewhere(self, fingerprint: str) -> bool:
        """Whether another frontend has such a request on probation."""
        ...

    def taken(self, instance_id: str) -> bool:
        """Whether a worker has a probation, of ours or of another frontend."""
        ...

    def mine(self, fingerprint: str) -> Probation | None:
        """Our own of this fingerprint."""
        ...

    def take(self, fingerprint: str, instance_id: str, ttl_s: float) -> None:
        """Ask for a probation. `mine` shows it until it is refused, or released."""
        ...

    def release(self, fingerprint: str) -> None:
        """End ours of this fingerprint, if there is one."""
        ...


class Board(Protocol):
    """The refused fingerprints of all frontends, and their probations."""

    @property
    def probations(self) -> Probations: ...

    def __len__(self) -> int: ...

    def left_s(self, fingerprint: str) -> float:
        """How long it is refused; 0 if it is not."""
        ...

    def post(self, fingerprint: str, deaths: int, prompt_tokens: int, ttl_s: float) -> None:
        """Refuse it at every frontend. Returns at once."""
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
