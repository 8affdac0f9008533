"""The job queue in this process, without a server. It keeps every promise of queue/contract.py.

`MemoryQueue` is the broker. Its `producer()` and `consumer()` share it. Message timers (ack_wait,
nak delay, age, deduplication) follow an injected clock. `pull` waits in real time, so that a test
whose fake clock stands still does not hang. Everything belongs to one asyncio loop.

`offline = True` makes it behave like a server that is away.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.errors import BadMessage, QueueFull, QueueUnavailable
from pullfill.queue.contract import DeadLetter, Delivery, QueueConfig, Receipt, Turns, Urgency
from pullfill.queue.streams import round_up_tokens
from pullfill.wire import QueueStatus


@dataclass(slots=True)
class _Job:
    job_id: str
    seq: int
    body: bytes
    tokens: int
    stored_at: float
    urgency: Urgency = Urgency.NORMAL
    deliveries: int = 0
    in_flight: bool = False
    ready_at: float = 0.0
    """In flight: when its silence ends it. Pending: when a nak's delay is over."""


@dataclass(slots=True)
class MemoryQueue:
    """One queue. `config` and `clock` as for the real one."""

    config: QueueConfig
    clock: Clock = SYSTEM_CLOCK
    offline: bool = False
    dead: deque[DeadLetter] = field(default_factory=lambda: deque(maxlen=1000))
    _jobs: dict[int, _Job] = field(default_factory=dict)
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)
    _seq: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def producer(self) -> MemoryProducer:
        return MemoryProducer(self)

    def consumer(self) -> MemoryConsumer:
        return MemoryConsumer(self)

    def check_online(self) -> None:
        """Raise QueueUnavailable while `offline`."""
        if self.offline:
            raise QueueUnavailable("the in-memory queue is offline")

    def store(self, job_id: str, body: bytes, tokens: int, urgency: Urgency) -> Receipt:
        now = self.clock.monotonic()
        seen = self._seen.get(job_id)
        if seen is not None and now - seen[1] < 120.0:
            return Receipt(job_id, seen[0], True, "memory")
        if len(self._jobs) >= self.config.max_jobs:
            raise QueueFull(f"the job queue is full: {self.config.max_jobs} jobs")
        self._seq += 1
        self._seen[job_id] = (self._seq, now)
        self._jobs[self._seq] = _Job(job_id, self._seq, body, tokens, now, urgency)
        self._changed.set()
        return Receipt(job_id, self._seq, False, "memory")

    def remove(self, seq: int) -> bool:
        return self._jobs.pop(seq, None) is not None

    def job(self, seq: int) -> _Job | None:
        return self._jobs.get(seq)

    def back(self, seq: int, delay_s: float) -> None:
        job = self._jobs.get(seq)
        if job is not None and job.in_flight:
            job.in_flight = False
            job.ready_at = self.clock.monotonic() + delay_s
            self._changed.set()

    def alive(self, seq: int) -> None:
        job = self._jobs.get(seq)
        if job is not None and job.in_flight:
            job.ready_at = self.clock.monotonic() + self.config.ack_wait_s

    async def bury(self, letter: DeadLetter) -> None:
        """Keep a dead letter; one per job."""
        if all(known.job_id != letter.job_id for known in self.dead):
            self.dead.append(letter)

    async def take(self, turns: Turns, *, urgent_only: bool = False) -> _Job | None:
        """Return the job that a worker with these turns gets now.

        A job that has used up its deliveries becomes a dead letter here, as on the server."""
        now = self.clock.monotonic()
        self._expire(now)
        ready: dict[Urgency, _Job] = {}
        for job in list(self._jobs.values()):
            if job.ready_at > now:
                continue
            if job.deliveries >= self.config.max_deliver:
                self.remove(job.seq)
                await self.bury(DeadLetter(job.job_id, "max_deliver", job.deliveries, job.body))
                continue
            ready.setdefault(job.urgency, job)
        if sum(other.in_flight for other in self._jobs.values()) >= self.config.max_in_flight:
            return None
        order = turns.order()
        if urgent_only:
            order = [one for one in order[:1] if one is Urgency.TIGHT]
        if not (found := [ready[one] for one in order if one in ready]):
            return None
        job = found[0]
        job.deliveries += 1
        job.in_flight = True
        job.ready_at = now + self.config.ack_wait_s
        turns.took(job.urgency, job.tokens)
        return job

    def status(self) -> QueueStatus:
        now = self.clock.monotonic()
        self._expire(now)
        jobs = self._jobs.values()
        return QueueStatus(
            depth_jobs=len(jobs),
            depth_tokens=sum(round_up_tokens(job.tokens) for job in jobs),
            in_flight=sum(job.in_flight for job in jobs),
            oldest_age_s=max((now - job.stored_at for job in jobs), default=0.0),
        )

    async def wait_changed(self, timeout_s: float) -> None:
        """Wait for a change, for 5 ms at most, because the injected clock may have moved."""
        self._changed.clear()
        try:
            async with asyncio.timeout(min(0.005, timeout_s)):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _expire(self, now: float) -> None:
        for job in list(self._jobs.values()):
            if now - job.stored_at > self.config.max_age_s:
                self.remove(job.seq)
            elif job.in_flight and job.ready_at <= now and job.deliveries < self.config.max_deliver:
                job.in_flight = False


class MemoryDelivery:
    """A `Delivery`."""

    def __init__(self, queue: MemoryQueue, job: _Job) -> None:
        self.job_id = job.job_id
        self.body = job.body
        self.tokens = job.tokens
        self.number = job.deliveries
        self.ack_subject = f"memory.{job.seq}.{job.deliveries}"
        self._queue = queue
        self._job = job
        self._settled = False

    async def ack(self) -> None:
        if not self._settled:
            self._settled = True
            if not self._queue.offline:
                self._queue.remove(self._job.seq)

    async def nak(self, delay_s: float = 0.0) -> None:
        if not self._settled:
            self._settled = True
            if not self._queue.offline:
                self._queue.back(self._job.seq, delay_s)

    async def term(self, reason: str) -> None:
        if not self._settled:
            self._queue.check_online()
            await self._queue.bury(DeadLetter(self.job_id, reason, self.number, self.body))
            self._queue.remove(self._job.seq)
            self._settled = True

    async def in_progress(self) -> None:
        if not self._settled and not self._queue.offline:
            self._queue.alive(self._job.seq)


class MemoryProducer:
    """A `JobProducer`."""

    def __init__(self, queue: MemoryQueue) -> None:
        self._queue = queue

    @property
    def available(self) -> bool:
        return not self._queue.offline

    def depth(self) -> QueueStatus:
        return self._queue.status()

    def look_again(self) -> None:
        """The depth is exact as it is."""

    async def publish(
        self, job_id: str, body: bytes, tokens: int, urgency: Urgency = Urgency.NORMAL
    ) -> Receipt:
        self._queue.check_online()
        return self._queue.store(job_id, body, tokens, urgency)

    async def cancel(self, receipt: Receipt) -> bool:
        return not self._queue.offline and self._queue.remove(receipt.seq)

    async def gone(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        if self._queue.offline:
            return []
        return [receipt for receipt in receipts if self._queue.job(receipt.seq) is None]

    def claimed(self, receipt: Receipt) -> None:
        """Which jobs wait is known exactly."""

    def committed(self, receipt: Receipt) -> None:
        """The depth is exact as it is."""

    async def nak(self, ack_subject: str, receipt: Receipt | None) -> None:
        root, _, rest = ack_subject.partition(".")
        seq, _, number = rest.partition(".")
        if root != "memory" or not (seq.isdigit() and number.isdigit()):
            raise BadMessage(f"not an ack subject: {ack_subject[:200]!r}")
        if receipt is None:
            return
        if int(seq) != receipt.seq:
            raise BadMessage(f"ack subject of another job: {ack_subject[:200]!r}")
        if not self._queue.offline:
            self._queue.back(receipt.seq, 0.0)

    async def close(self) -> None:
        return None


class MemoryConsumer:
    """A `JobConsumer`."""

    def __init__(self, queue: MemoryQueue) -> None:
        self._queue = queue
        self._turns = Turns()
        self._draining = False
        self.ack_wait_s = queue.config.ack_wait_s
        self.max_deliver = queue.config.max_deliver

    async def pull(self, wait_s: float, *, urgent_only: bool = False) -> Delivery | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while not self._draining:
            if not self._queue.offline:
                job = await self._queue.take(self._turns, urgent_only=urgent_only)
                if job is not None:
                    return MemoryDelivery(self._queue, job)
            left = deadline - loop.time()
            if left <= 0 or urgent_only:
                self._queue.check_online()
                break
            await self._queue.wait_changed(left)
        return None

    async def drain(self) -> None:
        self._draining = True

    async def close(self) -> None:
        self._draining = True
