"""Which deliveries count against this worker's token budget, and how many only wait.

A job counts from its grant to its end. While its claim is under way a delivery counts for CLAIM_S
at most. Usually the claim is answered within that time. Without this the puller would pull the next
jobs before it knows that this one fills the budget, and other workers would get none.

A delivery whose claim gets no answer does not count, nor does one that waits for a connection. If a
decode worker leaves a claim unanswered for SILENT_CLAIM_S, its later deliveries do not count at all
before their grant. So jobs of a decode worker that is gone do not keep jobs of other decode workers
waiting, not even if its host vanished and the connection still stands. A delivery with multimodal
inputs counts while the decode worker sends those of other jobs, because its turn comes.

With `--concurrency` the puller counts jobs instead of tokens, and those only until their prompt is
computed.

asyncio thread only.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

CLAIM_S = 0.05
"""How long a delivery counts without a grant."""
SILENT_CLAIM_S = 0.5
"""A decode worker that is only busy answers within this time."""


@dataclass(slots=True)
class _Charge:
    tokens: int
    timer: asyncio.TimerHandle
    decode_instance: str = ""
    asked_at: float = math.inf
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
        """Charge a delivery."""
        timer = asyncio.get_running_loop().call_later(CLAIM_S, self._slow, job_id)
        self._charges[job_id] = _Charge(tokens, timer)
        self.tokens += tokens

    def claims(self, job_id: str, decode_instance: str) -> None:
        """Note that the job is about to be claimed over a connection that is up."""
        charge, now = self._charges[job_id], asyncio.get_running_loop().time()
        for other in self._charges.values():
            late = now - other.asked_at > SILENT_CLAIM_S
            if late and other.decode_instance == decode_instance:
                self._unanswered(charge)
                break
        charge.decode_instance, charge.asked_at = decode_instance, now

    def waits(self, job_id: str) -> None:
        """Note that the job must wait before it can be claimed (again)."""
        charge = self._charges[job_id]
        charge.asked_at = math.inf
        self._unanswered(charge)

    def granted(self, job_id: str) -> None:
        charge = self._charges[job_id]
        charge.granted = True
        self.in_line(job_id)

    def in_line(self, job_id: str) -> None:
        """Note that the job is granted, or will be once the inputs of other jobs are sent."""
        charge = self._charges[job_id]
        charge.timer.cancel()
        charge.asked_at = math.inf
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
