"""What the queue room promises: one prefill job is delivered, kept alive and settled.

Life of a job: `publish` → pending → `pull` → in flight, kept alive by `in_progress` → settled by
`ack` (done), `term` (poison, dead-lettered) or `nak` (back to pending). An in-flight job whose
worker goes silent for `ack_wait_s` becomes pending again; after `max_deliver` deliveries it is
dead-lettered. At-least-once: a job may be delivered twice, and a late ack of an earlier delivery
settles the message. The queue is no fence; the decode worker's ledger decides who may write.

Both implementations (`jetstream.py`, `memory.py`) pass `tests/contract/test_queue_contract.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from pullfill.wire import QueueStatus


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """One job stream. `subject_root` is unique per (namespace, model, compatibility hash)."""

    namespace: str
    compat_hash: str
    max_jobs: int = 10_000
    ack_wait_s: float = 5.0
    max_deliver: int = 5
    publish_timeout_s: float = 0.5
    max_in_flight: int = 1024


@dataclass(frozen=True, slots=True)
class Receipt:
    """A stored job. `seq` cancels it; `duplicate`: the job id was already in the stream."""

    job_id: str
    seq: int
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A job nobody may try again, kept for people (`pullfill doctor` shows the count)."""

    job_id: str
    reason: str
    deliveries: int
    body: bytes


class Delivery(Protocol):
    """One delivery of one job. Exactly one of ack, nak, term settles it; later calls are no-ops."""

    @property
    def job_id(self) -> str: ...

    @property
    def body(self) -> bytes: ...

    @property
    def tokens(self) -> int:
        """Prompt tokens still to be computed, as told at publish."""
        ...

    @property
    def number(self) -> int:
        """1 for the first delivery of the job."""
        ...

    @property
    def age_s(self) -> float:
        """Seconds since publish, by the server's clock where it has one."""
        ...

    @property
    def ack_subject(self) -> str:
        """Whoever knows it can settle this delivery (`JobProducer.hand_back`)."""
        ...

    async def ack(self) -> None:
        """The job is committed (or needs nobody any more). Waits for the server's answer."""
        ...

    async def nak(self, delay_s: float = 0.0) -> None:
        """Give it back; redelivered to any worker after `delay_s`."""
        ...

    async def term(self, reason: str) -> None:
        """Poison: never again; leaves a dead letter."""
        ...

    async def in_progress(self) -> None:
        """Reset the `ack_wait_s` timer."""
        ...


class JobProducer(Protocol):
    """The decode worker's side. Safe to use from one asyncio loop."""

    async def publish(self, job_id: str, body: bytes, tokens: int) -> Receipt:
        """Store one job durably; the same `job_id` again is a duplicate, not a second job.

        Raises QueueFull (bound reached), QueueUnavailable (no answer within
        `publish_timeout_s`; the job may or may not be stored: cancel by id later).
        """
        ...

    async def cancel(self, receipt: Receipt) -> bool:
        """Remove a job, pending or in flight; True if it was still there."""
        ...

    async def hand_back(self, ack_subject: str) -> None:
        """NAK a delivery on behalf of a worker that died holding it."""
        ...

    def depth(self) -> QueueStatus:
        """Jobs and tokens pending + in flight, from a cache at most ~0.25 s old while the
        queue moves. Never does I/O."""
        ...

    @property
    def available(self) -> bool:
        """Whether the server answered lately. False: do not even try to publish."""
        ...

    async def close(self) -> None: ...


class JobConsumer(Protocol):
    """The prefill worker's side."""

    async def pull(self, budget_tokens: int, max_jobs: int, wait_s: float) -> list[Delivery]:
        """Up to `max_jobs` jobs; waits at most `wait_s` for the first. Stops taking more once
        the sum of `tokens` reaches `budget_tokens` (the first job is taken whatever its size).
        Returns [] on nothing. Raises QueueUnavailable when the server cannot be reached."""
        ...

    async def drain(self) -> None:
        """Take nothing any more: later deliveries go to other workers at once."""
        ...

    async def close(self) -> None: ...


OnDeadLetter = Callable[[DeadLetter], Awaitable[None]]
