"""The job queue in this process, without a server. It keeps every promise of queue/contract.py.

`MemoryQueue` is the broker. Its `producer()` and `consumer()` share it. Message timers (ack_wait,
nak delay, age, deduplication) follow an injected clock. `pull` waits in real time, so that a test
whose fake clock stands still does not hang. Everything belongs to one asyncio loop.

`offline = True` makes it behave like a server that is away.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.errors import BadMessage, QueueFull, QueueUnavailable
from pullfill.queue.contract import DeadLetter, Delivery, QueueConfig, Receipt
from pullfill.queue.names import round_up_tokens
from pullfill.queue.urgency import LANES, Lane, Turns, Urgency, lane_of
from pullfill.wire import QueueStatus

DUPLICATE_WINDOW_S = 120.0
_POLL_S = 0.005


@dataclass(slots=True)
class _Job:
    job_id: str
    seq: int
    body: bytes
    tokens: int
    stored_at: float
    urgency: Urgency = Urgency.NORMAL
    lane: Lane | None = None
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
    _debts: dict[str, int] = field(default_factory=dict)
    _acked: list[int] = field(default_factory=list)
    _seq: int = 0
    _consumers: list[MemoryConsumer] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def producer(self) -> MemoryProducer:
        return MemoryProducer(self)

    def consumer(self) -> MemoryConsumer:
        self._consumers.append(made := MemoryConsumer(self))
        return made

    def check_online(self) -> None:
        """Raise QueueUnavailable while `offline`. After that, do what was asked meanwhile."""
        if self.offline:
            raise QueueUnavailable("the in-memory queue is offline")
        for seq in [*self._debts.values(), *self._acked]:
            self.remove(seq)
        self._debts.clear()
        self._acked.clear()

    def owe(self, job_id: str, seq: int) -> None:
        self._debts[job_id] = seq

    def ack(self, seq: int) -> None:
        """Remove the job now, or once the queue is online again."""
        self._acked.append(seq)
        if not self.offline:
            self.check_online()

    def store(self, job_id: str, body: bytes, tokens: int, urgency: Urgency) -> Receipt:
        now = self.clock.monotonic()
        seen = self._seen.get(job_id)
        if seen is not None and now - seen[1] < DUPLICATE_WINDOW_S:
            return Receipt(job_id, seen[0], True, "memory", tokens)
        if len(self._jobs) >= self.config.max_jobs:
            raise QueueFull(f"the job queue is full: {self.config.max_jobs} jobs")
        self._seq += 1
        self._seen[job_id] = (self._seq, now)
        waiting = any(not job.in_flight for job in self._jobs.values())
        lane = lane_of(urgency, tokens) if waiting else None
        self._jobs[self._seq] = _Job(job_id, self._seq, body, tokens, now, urgency, lane)
        self._changed.set()
        for consumer in self._consumers if urgency is Urgency.TIGHT else ():
            consumer.on_urgent()
        return Receipt(job_id, self._seq, False, "memory", tokens)

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
        ready: dict[Lane | None, _Job] = {}
        for job in list(self._jobs.values()):
            if job.ready_at > now:
                continue
            if job.deliveries >= self.config.max_deliver:
                self.remove(job.seq)
                await self.bury(DeadLetter(job.job_id, "max_deliver", job.deliveries, job.body))
                continue
            ready.setdefault(job.lane, job)
        if sum(other.in_flight for other in self._jobs.values()) >= self.config.max_in_flight:
            return None
        for lane in LANES:
            (turns.fill if lane in ready else turns.empty)(lane)
        if not ready or (urgent_only and not turns.urgent):
            return None
        if urgent_only:
            ready.pop(None, None)
        job = ready[None if None in ready else turns.next()]
        job.deliveries += 1
        job.in_flight = True
        job.ready_at = now + self.config.ack_wait_s
        turns.took(job.urgency, job.tokens, job.lane)
        return job

    def urgent(self, turns: Turns) -> bool:
        """Whether a tight job is next for a worker with these turns."""
        now = self.clock.monotonic()
        for lane in LANES:
            jobs = (job for job in self._jobs.values() if job.lane == lane and job.ready_at <= now)
            (turns.fill if any(jobs) else turns.empty)(lane)
        return turns.urgent

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
        """Wait for a change, for a moment at most, because the injected clock may have moved."""
        self._changed.clear()
        try:
            async with asyncio.timeout(min(_POLL_S, timeout_s)):
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
            self._queue.ack(self._job.seq)

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
        if self._queue.offline:
            self._queue.owe(receipt.job_id, receipt.seq)
            return False
        return self._queue.remove(receipt.seq)

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
        self.running: Callable[[], Iterable[Delivery]] = tuple
        self.on_urgent: Callable[[], None] = lambda: None
        self._queue = queue
        self._turns = Turns()
        self._draining = False
        self.ack_wait_s = queue.config.ack_wait_s
        self.max_deliver = queue.config.max_deliver

    @property
    def urgent(self) -> bool:
        return self._queue.urgent(self._turns)

    async def pull(
        self, budget_tokens: int, max_jobs: int, wait_s: float, *, urgent_only: bool = False
    ) -> list[Delivery]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        taken: list[Delivery] = []
        tokens = 0
        while not self._draining and len(taken) < max_jobs:
            if taken and tokens >= budget_tokens:
                break
            if not self._queue.offline:
                self._queue.check_online()
                job = await self._queue.take(self._turns, urgent_only=urgent_only)
                if job is not None:
                    taken.append(MemoryDelivery(self._queue, job))
                    tokens += job.tokens
                    continue
            left = deadline - loop.time()
            if taken or left <= 0 or urgent_only:
                break
            await self._queue.wait_changed(left)
        if not taken and not self._draining:
            self._check_still_online()
        return taken

    def _check_still_online(self) -> None:
        if self._queue.offline:
            raise QueueUnavailable("the in-memory queue is offline")

    async def drain(self) -> None:
        self._draining = True

    async def close(self) -> None:
        self._draining = True
