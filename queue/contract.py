"""What the queue room promises: one prefill job is delivered, kept alive and settled.

Life of a job: `publish` → pending → `pull` → in flight, kept alive by `in_progress` → settled by
`ack` (done), `term` (poison, leaves a dead letter) or `nak` (back to pending). If its worker is
silent for `ack_wait_s`, the job is pending again. After `max_deliver` deliveries it becomes a dead
letter. Jobs of one urgency are delivered in the order in which they were published. `Turns` says
which urgency is next.

Both ends are in `jetstream.py`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar


class Urgency(enum.StrEnum):
    """How soon the request wants its first token. The most urgent one is the first."""

    TIGHT = "tight"
    NORMAL = "normal"
    LOOSE = "loose"


def urgency_of(ttft_ms: float | None, tight_ms: float, loose_ms: float) -> Urgency:
    """Return the urgency of a request.

    ttft_ms: its target for the time to its first token. None: it names none, and is normal.
    tight_ms: longest target that is tight. loose_ms: shortest one that is loose."""
    if ttft_ms is None or tight_ms < ttft_ms < loose_ms:
        return Urgency.NORMAL
    return Urgency.TIGHT if ttft_ms <= tight_ms else Urgency.LOOSE


@dataclass(frozen=True, slots=True)
class Receipt:
    """A job that the queue has."""

    job_id: str
    seq: int  # its number in the stream
    duplicate: bool = False  # the job id was already in the stream
    # The stream that `seq` counts in. So a receipt from before the server lost its data never
    # removes another job.
    stream_id: str = ""


@dataclass(slots=True, eq=False)
class Delivery:
    """One delivery of one job. The first ack, nak or term settles it. Later calls do nothing.

    A delivery by the queue is a `JetStreamDelivery`. This class itself is for the job of a
    self-check, which comes past the queue: there is no message, so its methods do nothing.

    tokens: prompt tokens still to be computed, rounded up by at most 1/16.
    number: 1 for the first delivery of the job.
    ack_subject: who knows it can settle this delivery (`JetStreamProducer.nak`)."""

    job_id: str
    body: bytes
    tokens: int
    number: int = 1
    ack_subject: str = ""

    # A job may be delivered twice, and a late ack of an earlier delivery settles it. The queue is
    # no fence: the decode worker's ledger decides who may write.

    async def ack(self) -> None:
        """The job is committed, or nobody needs it any more.

        Never raises and never waits for the server. If the server does not hear it, the job is
        delivered again, and its claim is refused."""

    async def nak(self, delay_s: float = 0.0) -> None:
        """Give it back. It is delivered to any worker after `delay_s`.

        Never raises. If the server does not hear it, the job comes back after `ack_wait_s`. Each
        nak uses up one of `max_deliver` deliveries. To wait for something, call `in_progress`."""

    async def term(self, reason: str) -> None:
        """Poison: never deliver it again. Leaves a dead letter.

        Raises QueueUnavailable. Then it is not settled: try again, or leave the job, which comes
        back after `ack_wait_s`."""

    async def in_progress(self) -> None:
        """Reset the `ack_wait_s` timer. Never raises. Does nothing while the server is away."""


class Turns:
    """Which urgency one prefill worker takes a job of next. It does no I/O and reads no clock.

    Deficit round robin, charged in uncached tokens. Each urgency has a credit, and the most urgent
    one that has any left is served first. When only urgencies without credit have jobs, each one
    gets its share again, until one of them has credit. So urgent jobs come first as long
    as they ask for no more than their share, and no urgency is left without its share. An urgency
    without jobs saves one round at most.

    Each prefill worker counts for itself. The shares of all workers are those of each."""

    # In tokens. Each urgency gets so much in a round.
    _SHARE: ClassVar = {Urgency.TIGHT: 8192, Urgency.NORMAL: 4096, Urgency.LOOSE: 2048}

    def __init__(self) -> None:
        self._credit = dict(self._SHARE)

    def order(self) -> list[Urgency]:
        """Return all urgencies. Take the next job from the first one that has a job."""
        return sorted(Urgency, key=self._rounds)

    def took(self, urgency: Urgency, tokens: int) -> None:
        """Charge a job that this worker has taken, in the order of `order`."""
        if rounds := self._rounds(urgency):  # no urgency that has a job had credit
            for each, share in self._SHARE.items():
                self._credit[each] = min(share, self._credit[each] + rounds * share)
        self._credit[urgency] -= tokens

    def _rounds(self, urgency: Urgency) -> int:
        """Rounds until it has credit. After a long job these are many."""
        credit = self._credit[urgency]
        return 0 if credit > 0 else 1 + -credit // self._SHARE[urgency]
