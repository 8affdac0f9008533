"""Other frontends, as far as a frontend's `Suspects` sees them."""

from __future__ import annotations

from dataclasses import dataclass

from pullfill.frontend.board import NoProbations
from pullfill.registry.probations import Told


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
