"""What the queue room promises: one prefill job is delivered, kept alive and settled.

Life of a job: `publish` → pending → `pull` → in flight, kept alive by `in_progress` → settled by
`ack` (done), `term` (poison, dead-lettered) or `nak` (back to pending). An in-flight job whose
worker goes silent for `ack_wait_s` becomes pending again; after `max_deliver` deliveries it is
dead-lettered. At-least-once: a job may be delivered twice, and a late ack of an earlier delivery
settles the message. The queue is no fence; the decode worker's ledger decides who may write.

`jetstream.py` and `pullfill/testing/memory_queue.py` implement it. Both pass
`tests/contract/test_queue_contract.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from pullfill.wire import QueueStatus


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """One job stream, named by (namespace, compatibility hash); the hash covers the model.

    A new stream and consumer are made with these values. Existing ones keep theirs, except for the
    fields that `QueueSettings` sets.

    max_jobs: jobs pending and in flight.
    max_bytes: size of all jobs. -1: no limit.
    max_in_flight: deliveries in flight, over all workers.
    max_age_s: a job is removed after this time. By then nobody waits for it.
    replicas: number of servers of a NATS cluster that hold each stream.
    """

    namespace: str
    compat_hash: str
    max_jobs: int = 10_000
    max_bytes: int = -1
    ack_wait_s: float = 5.0
    max_deliver: int = 5
    publish_timeout_s: float = 0.5
    max_in_flight: int = 1024
    max_age_s: float = 3600.0
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Receipt:
    """A stored job. `seq` cancels it; `duplicate`: the job id was already in the stream.

    stream_id: which stream `seq` counts in, so that a receipt from before the server lost its
    data never removes another job.
    """

    job_id: str
    seq: int
    duplicate: bool = False
    stream_id: str = ""
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A job nobody may try again, kept for people (`pullfill doctor` shows the count)."""

    job_id: str
    reason: str
    deliveries: int
    body: bytes


class Delivery(Protocol):
    """One delivery of one job. Exactly one of ack, nak, term settles it; later calls are no-ops.

    A `term` that raised did not settle; it may be tried again, or left: the job then comes back
    after `ack_wait_s`. Each nak uses up one of `max_deliver` deliveries: to wait for
    something, keep the job alive with `in_progress` instead.
    """

    @property
    def job_id(self) -> str: ...

    @property
    def body(self) -> bytes: ...

    @property
    def tokens(self) -> int:
        """Prompt tokens still to be computed, as told at publish."""

    @property
    def number(self) -> int:
        """1 for the first delivery of the job."""

    @property
    def ack_subject(self) -> str:
        """Whoever knows it can settle this delivery (`JobProducer.nak`)."""

    async def ack(self) -> None:
        """The job is committed (or needs nobody any more). Never raises, and waits for nothing: the
        server is told within milliseconds, and again until it has confirmed it, over reconnects.
        One that is lost all the same (this process dies) costs a redelivery, whose claim is
        refused."""

    async def nak(self, delay_s: float = 0.0) -> None:
        """Give it back; redelivered to any worker after `delay_s`. Never raises: if the server
        does not hear it, `ack_wait_s` does the same."""

    async def term(self, reason: str) -> None:
        """Poison: never again; leaves a dead letter. Raises QueueUnavailable."""

    async def in_progress(self) -> None:
        """Reset the `ack_wait_s` timer. Never raises; nothing while the server is away."""


class JobProducer(Protocol):
    """The decode worker's side. Coroutines belong to one asyncio loop; `depth()` and `available`
    may be read from any thread."""

    async def publish(self, job_id: str, body: bytes, tokens: int) -> Receipt:
        """Store one job durably; the same `job_id` again is a duplicate, not a second job.

        Raises QueueFull (bound reached, or the body is larger than the server takes: then not
        `retryable`), QueueUnavailable (no answer within `publish_timeout_s`; at once while
        `available` is False). After QueueUnavailable the job may be stored all the same: the
        producer removes it by itself when the server is back. Until then a worker may pull it,
        and its claim must be refused.
        """

    async def cancel(self, receipt: Receipt) -> bool:
        """Remove a job, pending or in flight; True if it was still there. Never raises: while the
        server is away it returns False and the job is removed later."""

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

        The figures come from a cache. While the queue moves it is at most about 1.3 s old. Own
        publishes, commits and cancels count at once. Tokens are rounded up by at most 1/16 per job.
        While the server is away, this is the last known state."""

    def look_again(self) -> None:
        """A job was not published for what `depth` says: count anew soon, and often for a while,
        so that room is noticed. From any thread, returns at once."""

    @property
    def available(self) -> bool:
        """Whether the server answered lately. False: do not even try to publish."""

    async def close(self) -> None: ...


class JobConsumer(Protocol):
    """The prefill worker's side.

    running: returns the deliveries that are worked on. Set by the owner. Over a new connection a
    heartbeat is sent for each of them before the next pull."""

    running: Callable[[], Iterable[Delivery]]

    @property
    def ack_wait_s(self) -> float:
        """Seconds without a heartbeat after which a job is delivered again."""

    @property
    def max_deliver(self) -> int:
        """Number of deliveries of one job, after which it becomes a dead letter."""

    async def pull(self, budget_tokens: int, max_jobs: int, wait_s: float) -> list[Delivery]:
        """Up to `max_jobs` jobs; waits at most `wait_s` for the first. Stops taking more once
        the sum of `tokens` reaches `budget_tokens` (the first job is taken whatever its size).
        Returns [] on nothing and after `drain`. Raises QueueUnavailable when the server cannot be
        reached within `wait_s`. Cancelling is safe: what was taken is given back."""

    async def drain(self) -> None:
        """Take nothing any more: later deliveries go to other workers at once."""

    async def close(self) -> None:
        """Waits, for about 2 s at most, until the server has confirmed all acks."""
