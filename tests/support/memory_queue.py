"""The job queue in this process, without a server. It keeps every promise of queue/contract.py.

`MemoryQueue` is the broker. Its `producer()` and `consumer()` share it. Message timers (ack_wait,
nak delay, deduplication) follow an injected clock. `pull` waits in real time, so that a test
whose fake clock stands still does not hang. Everything belongs to one asyncio loop.

`offline = True` makes it behave like a server that is away.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.errors import BadMessage, QueueFull, QueueUnavailable
from pullfill.queue.contract import DeadLetter, Delivery, QueueConfig, Receipt, Urgency
from pullfill.queue.streams import round_up_tokens
from pullfill.wire import QueueStatus


@dataclass(slots=True)
class Job:
    """ready_at: in flight: when its silence ends it. Pending: when a nak's delay is over."""

    job_id: str
    seq: int
    body: bytes
    tokens: int
    stored_at: float
    urgency: Urgency = Urgency.NORMAL
    deliveries: int = 0
    in_flight: bool = False
    ready_at: float = 0.0


@dataclass(slots=True)
class MemoryQueue:
    """One queue. `config` and `clock` as for the real one. jobs: by their numbers."""

    config: QueueConfig
    clock: Clock = SYSTEM_CLOCK
    offline: bool = False
    dead: deque[DeadLetter] = field(default_factory=lambda: deque(maxlen=1000))
    jobs: dict[int, Job] = field(default_factory=dict)
    seen: dict[str, tuple[int, float]] = field(default_factory=dict)
    last_seq: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def producer(self) -> MemoryProducer:
        return MemoryProducer(self)

    def consumer(self) -> MemoryConsumer:
        return MemoryConsumer(self)

    def check_online(self) -> None:
        """Raise QueueUnavailable while `offline`."""
        if self.offline:
            raise QueueUnavailable("the in-memory queue is offline")

    def back(self, seq: int, delay_s: float) -> None:
        """Make a job in flight pending again."""
        job = self.jobs.get(seq)
        if job is not None and job.in_flight and not self.offline:
            job.in_flight, job.ready_at = False, self.clock.monotonic() + delay_s
            self.changed.set()

    def bury(self, job: Job, reason: str) -> None:
        """Replace a job by a dead letter; one per job."""
        self.jobs.pop(job.seq, None)
        if all(known.job_id != job.job_id for known in self.dead):
            self.dead.append(DeadLetter(job.job_id, reason, job.deliveries, job.body))

    def take(self) -> Job | None:
        """Return the job that a worker gets now.

        A job that has used up its deliveries becomes a dead letter here, as on the server."""
        self.expire()
        ready: dict[Urgency, Job] = {}
        for job in list(self.jobs.values()):
            if job.ready_at > self.clock.monotonic():
                continue
            if job.deliveries >= self.config.max_deliver:
                self.bury(job, "max_deliver")
            else:
                ready.setdefault(job.urgency, job)
        if not ready:
            return None
        taken = ready[min(ready)]
        taken.deliveries += 1
        taken.in_flight = True
        taken.ready_at = self.clock.monotonic() + self.config.ack_wait_s
        return taken

    def status(self) -> QueueStatus:
        self.expire()
        now, jobs = self.clock.monotonic(), self.jobs.values()
        return QueueStatus(
            depth_jobs=len(jobs),
            depth_tokens=sum(round_up_tokens(job.tokens) for job in jobs),
            in_flight=sum(job.in_flight for job in jobs),
            oldest_age_s=max((now - job.stored_at for job in jobs), default=0.0),
        )

    def expire(self) -> None:
        now = self.clock.monotonic()
        for job in self.jobs.values():
            if job.in_flight and job.ready_at <= now and job.deliveries < self.config.max_deliver:
                job.in_flight = False


class MemoryDelivery:
    """A `Delivery`."""

    def __init__(self, queue: MemoryQueue, job: Job) -> None:
        self.job_id, self.body, self.tokens = job.job_id, job.body, job.tokens
        self.number = job.deliveries
        self.ack_subject = f"memory.{job.seq}.{job.deliveries}"
        self._queue, self._job = queue, job
        self._settled = False

    async def ack(self) -> None:
        if not self._settled and not self._queue.offline:
            self._queue.jobs.pop(self._job.seq, None)
        self._settled = True

    async def nak(self, delay_s: float = 0.0) -> None:
        if not self._settled:
            self._queue.back(self._job.seq, delay_s)
        self._settled = True

    async def term(self, reason: str) -> None:
        if not self._settled:
            self._queue.check_online()
            self._queue.bury(self._job, reason)
        self._settled = True

    async def in_progress(self) -> None:
        queue, job = self._queue, self._queue.jobs.get(self._job.seq)
        if job is not None and job.in_flight and not (self._settled or queue.offline):
            job.ready_at = queue.clock.monotonic() + queue.config.ack_wait_s


class MemoryProducer:
    """A `JobProducer`. Its depth is exact, so it needs to be told nothing."""

    def __init__(self, queue: MemoryQueue) -> None:
        self._queue = queue
        self.depth = queue.status

    @property
    def available(self) -> bool:
        return not self._queue.offline

    def look_again(self) -> None: ...

    def claimed(self, receipt: Receipt) -> None: ...

    committed = claimed

    async def publish(
        self, job_id: str, body: bytes, tokens: int, urgency: Urgency = Urgency.NORMAL
    ) -> Receipt:
        queue = self._queue
        queue.check_online()
        now = queue.clock.monotonic()
        seq, seen_at = queue.seen.get(job_id, (0, now - 1000.0))
        if now - seen_at < 120.0:
            return Receipt(job_id, seq, True, "memory")
        if len(queue.jobs) >= queue.config.max_jobs:
            raise QueueFull(f"the job queue is full: {queue.config.max_jobs} jobs")
        seq = queue.last_seq = queue.last_seq + 1
        queue.seen[job_id] = (seq, now)
        queue.jobs[seq] = Job(job_id, seq, body, tokens, now, urgency)
        queue.changed.set()
        return Receipt(job_id, seq, False, "memory")

    async def cancel(self, receipt: Receipt) -> bool:
        return not self._queue.offline and self._queue.jobs.pop(receipt.seq, None) is not None

    async def gone(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        if self._queue.offline:
            return []
        return [receipt for receipt in receipts if receipt.seq not in self._queue.jobs]

    async def nak(self, ack_subject: str, receipt: Receipt | None) -> None:
        root, _, rest = ack_subject.partition(".")
        seq, _, number = rest.partition(".")
        if root != "memory" or not (seq.isdigit() and number.isdigit()):
            raise BadMessage(f"not an ack subject: {ack_subject[:200]!r}")
        if receipt is not None:
            if int(seq) != receipt.seq:
                raise BadMessage(f"ack subject of another job: {ack_subject[:200]!r}")
            self._queue.back(receipt.seq, 0.0)

    async def close(self) -> None: ...


class MemoryConsumer:
    """A `JobConsumer`."""

    def __init__(self, queue: MemoryQueue) -> None:
        self._queue = queue
        self._draining = False
        self.ack_wait_s = queue.config.ack_wait_s
        self.max_deliver = queue.config.max_deliver

    async def pull(self, wait_s: float) -> Delivery | None:
        queue, loop = self._queue, asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while not self._draining:
            if not queue.offline and (job := queue.take()):
                return MemoryDelivery(queue, job)
            left = deadline - loop.time()
            if left <= 0:
                queue.check_online()
                break
            queue.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.005):  # the injected clock may have moved
                    await queue.changed.wait()
        return None

    async def drain(self) -> None:
        self._draining = True

    close = drain
