"""What the queue room promises: one prefill job is delivered, kept alive and settled.

Life of a job: `publish` → pending → `pull` → in flight, kept alive by `in_progress` → settled by
`ack` (done), `term` (poison, leaves a dead letter) or `nak` (back to pending). If its worker is
silent for `ack_wait_s`, the job is pending again. After `max_deliver` deliveries it becomes a dead
letter. The most urgent job comes first, and of one urgency the one that was published first.

`jetstream.py` implements it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pullfill.wire import QueueStatus


class Urgency(enum.IntEnum):
    """How soon the request wants its first token. The most urgent one is the smallest."""

    TIGHT = 0
    NORMAL = 1
    LOOSE = 2

    @property
    def label(self) -> str:
        return self.name.lower()


def urgency_of(ttft_ms: float | None, tight_ms: float, loose_ms: float) -> Urgency:
    """Return the urgency of a request.

    ttft_ms: its target for the time to its first token. None: it names none, and is normal.
    tight_ms: longest target that is tight. loose_ms: shortest one that is loose."""
    if ttft_ms is None or tight_ms < ttft_ms < loose_ms:
        return Urgency.NORMAL
    return Urgency.TIGHT if ttft_ms <= tight_ms else Urgency.LOOSE


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """One job stream, named by its namespace and compatibility hash. The hash covers the model.

    A new stream and consumer are made with these values. Existing ones keep theirs, except for the
    fields that `QueueSettings` sets."""

    namespace: str
    compat_hash: str
    max_jobs: int = 10_000  # pending and in flight
    max_bytes: int = -1  # of all jobs. -1: no limit
    ack_wait_s: float = 5.0
    max_deliver: int = 5
    publish_timeout_s: float = 0.5
    replicas: int = 1  # servers of a NATS cluster that hold each stream


@dataclass(frozen=True, slots=True)
class Receipt:
    """A job that the queue has."""

    job_id: str
    seq: int  # its number in the stream
    duplicate: bool = False  # the job id was already in the stream
    # The stream that `seq` counts in. So a receipt from before the server lost its data never
    # removes another job.
    stream_id: str = ""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A job that nobody may try again. `pullfill doctor` shows how many there are."""

    job_id: str
    reason: str
    deliveries: int
    body: bytes


class Delivery(Protocol):
    """One delivery of one job. The first ack, nak or term settles it. Later calls do nothing."""

    job_id: str
    body: bytes
    tokens: int  # prompt tokens still to be computed, as told at publish
    number: int  # 1 for the first delivery of the job
    ack_subject: str  # who knows it can settle this delivery (`JobProducer.nak`)

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


class JobProducer(Protocol):
    """The decode worker's side. `depth`, `look_again` and `available` may be used on any thread."""

    async def publish(
        self, job_id: str, body: bytes, tokens: int, urgency: Urgency = Urgency.NORMAL
    ) -> Receipt:
        """Store one job durably. The same `job_id` again is a duplicate, not a second job.

        tokens: number of tokens to compute.

        Raises QueueFull (a limit is reached, or the body is larger than the server takes: then not
        `retryable`), QueueUnavailable (no answer within `publish_timeout_s`; at once while
        `available` is False). After QueueUnavailable the job may be stored all the same. Then a
        worker pulls it, and its claim must be refused."""

    async def cancel(self, receipt: Receipt) -> bool:
        """Remove a job, pending or in flight. Returns whether it was still there.

        Never raises. While the server is away it returns False, and the job stays. A worker that
        pulls it later must be refused the claim."""

    async def gone(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        """Return those whose message the queue has no more, so that nobody will be given the job.

        One request for all of them. Never raises. Returns [] if the server does not answer."""

    def claimed(self, receipt: Receipt) -> None:
        """Note that the job waits no longer: a prefill worker has it."""

    def committed(self, receipt: Receipt) -> None:
        """Stop counting the job in `depth`. It is done, and its message will be acked soon."""

    async def nak(self, ack_subject: str, receipt: Receipt | None) -> None:
        """NAK a delivery on behalf of a worker that died with it.

        receipt: of the job. Without one, or if the stream was made anew since, nothing is sent, and
        the job is delivered again after `ack_wait_s`.

        Raises BadMessage if `ack_subject`, which came over the network, is not of this queue and
        this job.
        """

    def depth(self) -> QueueStatus:
        """Return the jobs and tokens that are pending or in flight. Does no I/O.

        The figures come from a cache. While the queue moves it is at most about 1 s old. Own
        publishes, commits and cancels count at once. Tokens are rounded up by at most 1/16 per job.
        While the server is away, this is the last known state."""

    def look_again(self) -> None:
        """Count the depth soon. Call it if `depth` kept a job local."""

    @property
    def available(self) -> bool:
        """Whether the server answered lately. If not, do not try to publish."""

    async def close(self) -> None: ...


class JobConsumer(Protocol):
    """The prefill worker's side."""

    @property
    def ack_wait_s(self) -> float:
        """Seconds without a heartbeat after which a job is delivered again."""

    @property
    def max_deliver(self) -> int:
        """Number of deliveries of one job, after which it becomes a dead letter."""

    async def pull(self, wait_s: float) -> Delivery | None:
        """Return one job. Waits for it, at most `wait_s`. None: there is none, or after `drain`.

        Raises QueueUnavailable if the server cannot be reached within `wait_s`. A pull that is
        cancelled gives back what it has taken. Between two pulls that do not follow each other at
        once, no job is kept for this worker."""

    async def drain(self) -> None:
        """Take no more jobs. What is delivered from now on goes to other workers at once."""

    async def close(self) -> None:
        """Close, once the server has read all acks, or after about 1 s."""
