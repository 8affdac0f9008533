"""Which deliveries count against this worker's token budget, and how many only wait.

A job counts from its grant to its end. Before the grant a delivery counts for CLAIM_S at most.
Usually the claim is answered within that time, so the puller does not exceed the budget.

A delivery whose claim gets no answer does not count, nor does one that waits for a connection. So
jobs of a decode worker that is gone do not keep jobs of other decode workers waiting.

With `--concurrency` the puller counts jobs instead of tokens, and those only until their prompt is
computed.

asyncio thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

CLAIM_S = 0.05
"""How long a delivery counts without a grant."""


@dataclass(slots=True)
class _Charge:
    tokens: int
    timer: asyncio.TimerHandle
    counted: bool = True
    granted: bool = False
    computed: bool = False


class Budget:
    """See the module.

    tokens: sum over the deliveries that count.
    on_room: called when `tokens` has become less."""

    def __init__(self, on_room: Callable[[], None]) -> None:
        self._on_room = on_room
        self._charges: dict[str, _Charge] = {}
        self.tokens = 0

    @property
    def uncomputed(self) -> int:
        """Number of deliveries that count and whose prompt is not computed."""
        return sum(charge.counted and not charge.computed for charge in self._charges.values())

    @property
    def waiting(self) -> int:
        """Number of deliveries without a grant."""
        return sum(not charge.granted for charge in self._charges.values())

    def pulled(self, job_id: str, tokens: int) -> None:
        timer = asyncio.get_running_loop().call_later(CLAIM_S, self._slow, job_id)
        self._charges[job_id] = _Charge(tokens, timer)
        self.tokens += tokens

    def waits(self, job_id: str) -> None:
        """Note that the job must wait before it can be claimed (again)."""
        self._unanswered(self._charges[job_id])

    def granted(self, job_id: str) -> None:
        charge = self._charges[job_id]
        charge.timer.cancel()
        charge.granted = True
        if not charge.counted:
            charge.counted = True
            self.tokens += charge.tokens

    def computed(self, job_id: str) -> None:
        """Note that the prompt is computed. Its KV may not be delivered yet."""
        if (charge := self._charges.get(job_id)) is not None:
            charge.computed = True
            self._on_room()

    def over(self, job_id: str) -> None:
        charge = self._charges.pop(job_id)
        charge.timer.cancel()
        self._discount(charge)

    def _slow(self, job_id: str) -> None:
        """CLAIM_S have passed without a grant."""
        self._unanswered(self._charges[job_id])

    def _unanswered(self, charge: _Charge) -> None:
        if not charge.granted and charge.counted:
            self._discount(charge)

    def _discount(self, charge: _Charge) -> None:
        if charge.counted:
            charge.counted = False
            self.tokens -= charge.tokens
        self._on_room()
