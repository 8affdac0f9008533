"""Other frontends, as far as a frontend's `Suspects` sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pullfill.registry.probations import Told


class NoProbations:
    """A `registry.probations.Probations` without other frontends."""

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

    def mine(self, fingerprint: str) -> Any:
        return None

    def take(self, fingerprint: str, instance_id: str, ttl_s: float) -> None: ...

    def release(self, fingerprint: str) -> None: ...


class Alone:
    """A `SuspectBoard` without other frontends."""

    def __init__(self, probations: NoProbations | None = None) -> None:
        self.probations = NoProbations() if probations is None else probations

    def __len__(self) -> int:
        return 0

    def left_s(self, fingerprint: str) -> float:
        return 0.0

    def post(self, fingerprint: str, deaths: int, prompt_tokens: int, ttl_s: float) -> None: ...


@dataclass
class Trial:
    instance_id: str
    ready: bool = True
    sure: bool = True
    late: bool = False


class Others(NoProbations):
    """There are other frontends. They agree to every probation at once, and keep it in mind."""

    shared = True

    def __init__(self) -> None:
        self.trials: dict[str, Trial] = {}
        self.asked: list[str] = []
        self.says = Told()

    def mine(self, fingerprint: str) -> Trial | None:
        return self.trials.get(fingerprint)

    def take(self, fingerprint: str, instance_id: str, ttl_s: float) -> None:
        self.trials[fingerprint] = Trial(instance_id)
        self.asked.append(fingerprint)

    def release(self, fingerprint: str) -> None:
        self.trials.pop(fingerprint, None)

    async def testimony(self, instance_id: str, fingerprint: str) -> Told:
        return self.says
