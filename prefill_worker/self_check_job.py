"""A job of a decode worker's self-check. It comes over the control channel, not from the queue.

It runs like any other job. There is no message to settle.
"""

from __future__ import annotations

from dataclasses import dataclass

from pullfill.wire import PrefillJob, decode, u32


@dataclass(slots=True)
class TrialDelivery:
    """Looks like a `Delivery`; settling it does nothing."""

    job_id: str
    body: bytes
    tokens: int
    number: int = 1
    ack_subject: str = ""

    async def ack(self) -> None:
        """See the class."""

    async def nak(self, delay_s: float = 0.0) -> None:
        """See the class."""

    async def term(self, reason: str) -> None:
        """See the class."""

    async def in_progress(self) -> None:
        """See the class."""


def delivery_of(body: bytes) -> TrialDelivery:
    """Return a delivery for `JobRunner.start`. Raises BadMessage."""
    job = decode(body, PrefillJob)
    return TrialDelivery(job.job_id, body, len(u32.unpack(job.token_ids)))
