"""The prefill worker's end of the queue on JetStream.

Life: `connect` → `pull` repeatedly (one caller at a time) → `drain` → `close`.

Each pull request asks for one job, so a worker never holds jobs that it has no budget for. One
request waits for a job that is in no lane. While jobs wait in lanes (lanes.py), others ask the lane
whose turn it is for what is there now. Every FIRST_EVERY_S one asks for a job that is in no lane
instead. If a pull is cancelled, its request is withdrawn.
A job that arrives while nobody pulls is given back at once.

A job may also come on the direct subject, while the stream has no leader (producer.py). A worker
takes it only if it waits for one at that moment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from nats.aio.msg import Msg

from pullfill.clock import SYSTEM_CLOCK
from pullfill.errors import BadMessage, ConfigError, PullfillError, QueueUnavailable
from pullfill.queue.acks import Acks
from pullfill.queue.contract import Delivery, QueueConfig
from pullfill.queue.deadletter import DeadLetters
from pullfill.queue.delivery import JetStreamDelivery, send_signs
from pullfill.queue.lanes import Lanes
from pullfill.queue.names import BUSY, MSG_ID, TAKEN, Names
from pullfill.queue.nats_connection import NatsConnection, NoResponders, NotSent
from pullfill.queue.pull_requests import GRACE_S, NO_CONSUMER, PullRequests, Request
from pullfill.queue.streams import NOT_SET, Streams
from pullfill.queue.urgency import Lane, Urgency
from pullfill.runtime import log
from pullfill.runtime.health import Health
from pullfill.runtime.lifecycle import end
from pullfill.runtime.waits import Bell
from pullfill.wire import QueueSettings

logger = log.get("queue")

REQUEST_S, FIRST_EVERY_S = 2.0, 0.05
SHORTEST_S = 0.02
"""The server does not answer requests that expire within about a millisecond."""
SETTLE_TRY_S, SETTLE_TRIES = 1.0, 2
PULLS = "pulls"
"""The part of the server's health that says whether it answers pull requests."""
_HEAL_PAUSE_S, _CHECK_S = 0.05, 1.0


class JetStreamConsumer:
    """A `JobConsumer`. See the contract for what each method promises.

    streams: call its `configure` when the settings change."""

    def __init__(
        self, connection: NatsConnection, config: QueueConfig, settings: QueueSettings
    ) -> None:
        self.running: Callable[[], Iterable[Delivery]] = tuple
        self.on_urgent: Callable[[], None] = lambda: None
        self.connection = connection
        self._names = Names(config.namespace, config.compat_hash)
        self.streams = Streams(connection, self._names, config, settings)
        self.letters = DeadLetters(connection, self._names)
        self.acks = Acks(connection, lambda: self.stream_id)
        self.lanes = Lanes(connection, self._names, self.streams.ensure_lane, self._on_fill)
        self._requests = PullRequests(connection, self._names, self._on_message)
        self._arrived: deque[JetStreamDelivery] = deque()
        self._wake = Bell()
        self._pulling = asyncio.Lock()
        self._returns: set[asyncio.Task[None]] = set()
        self._waiting = self._urgent_only = self._draining = False
        self._checking: asyncio.Task[QueueUnavailable | None] | None = None
        self._first_at = 0.0

    @classmethod
    async def connect(
        cls,
        url: str,
        config: QueueConfig,
        *,
        settings: QueueSettings = NOT_SET,
        wait_s: float = 30.0,
        connect_options: Mapping[str, Any] | None = None,
    ) -> Self:
        """As `JetStreamProducer.connect`."""
        connection = NatsConnection(url, "consumer", connect_options)
        self = cls(connection, config, settings)
        await connection.start(wait_s, self._setup, self._wake.ring)
        return self

    @property
    def stream_id(self) -> str:
        """Id of the job stream that deliveries come from now."""
        return self.streams.stream_id

    @property
    def ack_wait_s(self) -> float:
        return self.streams.ack_wait_s

    @property
    def max_deliver(self) -> int:
        return self.streams.max_deliver

    @property
    def health(self) -> Health:
        """Whether this consumer can pull."""
        return self.connection.health

    async def close(self) -> None:
        await self.streams.close()
        await self.lanes.close()
        await end(self._checking)
        if self.connection.up:
            await self.drain()
            await asyncio.gather(*self._returns)
        await self.acks.close()
        if self.connection.up:
            await self.connection.flush()
        await self.letters.close()
        await self.connection.close()

    async def drain(self) -> None:
        self._draining = True
        self._wake.ring()
        if (subscription := self._requests.leave()) is not None:
            # nats-py's own drain writes its PING before commands that wait in its buffer. So the
            # server may answer before it reads UNSUB, and still send a job. A request is written
            # after UNSUB: after its answer no job comes. What comes before it is given back.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(2.0):
                    await self.connection.client._send_unsubscribe(subscription._id)
                    await self.connection.api(f"STREAM.INFO.{self._names.stream}")
            with contextlib.suppress(Exception):
                async with asyncio.timeout(2.0):
                    await subscription.drain()  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------ pull

    @property
    def urgent(self) -> bool:
        return self.lanes.turns.urgent

    def _on_fill(self, lane: Lane) -> None:
        self._wake.ring()
        if lane.urgency is Urgency.TIGHT:
            self.on_urgent()

    async def pull(
        self, budget_tokens: int, max_jobs: int, wait_s: float, *, urgent_only: bool = False
    ) -> list[Delivery]:
        taken, tokens = list[JetStreamDelivery](), 0
        async with self._pulling:
            self._waiting, self._urgent_only = True, urgent_only
            try:
                while len(taken) < max_jobs and not (taken and tokens >= budget_tokens):
                    job = await self._next(0.0 if taken else wait_s, urgent_only)
                    if job is None:
                        break
                    taken.append(job)
                    tokens += job.tokens
                    self.lanes.turns.took(job.urgency, job.tokens, job.lane)
                # A job of a lane, or past the stream, has not ended the request that waits.
                if self._requests.lives and any(job.lane or not job.ack_subject for job in taken):
                    await self._requests.withdraw()
            except QueueUnavailable as exc:
                if self.connection.up and self.health.up:  # it is JetStream that does not work
                    self.health.failed(str(exc), PULLS)
                if not taken:
                    raise
            except BaseException:
                self._waiting = False  # nobody would take what comes while this waits
                self._give_back(*taken)
                if self._requests.lives or self._requests.asking is not None:
                    await self._requests.withdraw(sure=True)
                raise
            finally:
                self._waiting = False
                self._give_back()
            for job in taken:
                await job.accept()
        return list(taken)

    async def _next(self, wait_s: float, urgent_only: bool) -> JetStreamDelivery | None:
        """Return one job. None: none came within `wait_s`, or drain. Raises QueueUnavailable."""
        deadline = SYSTEM_CLOCK.monotonic() + wait_s
        if wait_s <= 0 and not self.lanes.turns:
            await self.lanes.look(if_old=True)
        while not self._draining:
            if self._arrived:
                return self._arrived.popleft()
            if urgent_only and not self.urgent:
                return None
            now = SYSTEM_CLOCK.monotonic()
            lives = self._requests.lives
            if not self.connection.up:
                if now >= deadline or not await self.connection.wait_up(deadline - now):
                    raise QueueUnavailable(f"NATS at {self.connection.shown_url} is not connected")
            elif not self.stream_id:
                await self._heal("nothing known", deadline)
            elif (lane := self.lanes.turns.next()) is not None:
                first = not (lives or urgent_only) and now >= self._first_at
                await self._take(None if first else lane, deadline)
            elif wait_s <= 0:
                if lives or not await self._take(None, deadline):
                    return None
            elif (now > deadline - SHORTEST_S and not lives) or not await self._wait(deadline):
                return None
        return None

    async def _take(self, lane: Lane | None, deadline: float) -> bool:
        """Ask a lane for what is there now. False: there is nothing."""
        await self.acks.push()
        request = await self._requests.ask(lane)
        answered = await self._answered(request, SYSTEM_CLOCK.monotonic() + GRACE_S)
        self._requests.asking = None
        if lane is None:
            self._first_at = SYSTEM_CLOCK.monotonic() + FIRST_EVERY_S
        if not (answered or self.health.up):
            raise QueueUnavailable(f"NATS at {self.connection.shown_url} does not answer pulls")
        if not answered:
            # NATS is silent while as many jobs are in flight as the consumer allows.
            await self._requests.withdraw()
        elif not request.status:
            return True
        elif lane is None and not request.found_nothing:
            await self._heal(request.status, deadline)
            return True
        if lane is not None:
            await self.lanes.empty(lane, lacks_consumer=request.status == NO_CONSUMER)
        return False

    async def _wait(self, deadline: float) -> bool:
        """Wait for a job that is in no lane, or until one may wait in a lane.

        False: `deadline` has passed."""
        request = self._requests.waiting
        if request is None or not self._requests.lives:
            await self.acks.push()
            left = deadline - SYSTEM_CLOCK.monotonic()
            request = await self._requests.wait(min(left, REQUEST_S))
            self.lanes.look_soon()
        # An older request may outlive this call. Then its answer is given back. A request that
        # ends with this call is waited for, so that nothing is left behind.
        outlives = request.live_until > deadline + GRACE_S
        until = deadline if outlives else request.live_until + GRACE_S
        if not await self._answered(request, until, or_lanes=True):
            if outlives:
                return False
            self._requests.waiting = None
            raise QueueUnavailable(f"NATS at {self.connection.shown_url} does not answer pulls")
        if request.status:
            self._requests.waiting = None
            if not request.found_nothing:
                await self._heal(request.status, deadline)
        return True

    async def _answered(self, request: Request, until: float, *, or_lanes: bool = False) -> bool:
        """Wait for a job, a status, drain or a lost connection. False: `until` passed first.

        or_lanes: a job that may wait in a lane ends the wait, too."""
        while not (self._arrived or request.status or self._draining):
            if request.generation != self.connection.generation or not self.connection.up:
                return True
            if or_lanes and self.lanes.turns:
                return True
            left = until - SYSTEM_CLOCK.monotonic()
            self._wake.clear()
            if left <= 0 or not await self._wake.wait(left):
                return False
        return True

    async def _heal(self, status: str, deadline: float) -> None:
        """Check and repair the stream after a pull ended with an unexpected status.

        The consumer or stream is gone, or the server shuts down. Returns earlier if a job comes."""
        logger.debug("pull ended with %s; checking the stream", status)
        checking = self._check()
        while not (checking.done() or self._arrived or self._draining):
            self._wake.clear()
            await self._wake.wait(None)
        if not checking.done():
            return  # the next pull waits for the same check
        if (failure := checking.result()) is not None:
            self.health.failed(str(failure), PULLS)
            if SYSTEM_CLOCK.monotonic() >= deadline:
                raise failure
        if not self._arrived:
            await asyncio.sleep(_HEAL_PAUSE_S)

    def _check(self) -> asyncio.Task[QueueUnavailable | None]:
        checking = self._checking
        if checking is None or checking.done():
            checking = self._checking = asyncio.create_task(self._repair())
            checking.add_done_callback(lambda _: self._wake.ring())
        return checking

    def _check_until_known(self) -> None:
        """A worker that has no room pulls nothing, but its heartbeats and acks need the stream."""
        if self.connection.up and not self.stream_id:
            self._check()
            asyncio.get_running_loop().call_later(_CHECK_S, self._check_until_known)

    async def _repair(self) -> QueueUnavailable | None:
        """Return why it failed."""
        unknown, failure = not self.stream_id, None
        try:
            await self.streams.ensure()
        except (ConfigError, QueueUnavailable) as exc:
            failure = QueueUnavailable(str(exc))
        if unknown and self.stream_id:
            await self._renew()
        return failure

    async def _on_message(self, msg: Msg) -> None:
        try:
            job = JetStreamDelivery(self, msg)
        except BadMessage:
            if (request := self._requests.status_came(msg)) is not None:
                if request.found_nothing:
                    self.health.ok(PULLS)
                self._wake.ring()
            return
        self.health.ok(PULLS)
        self.lanes.arrived(job)
        self._requests.job_came(job.lane)
        if self._waiting and not self._draining:
            self._arrived.append(job)
            self._wake.ring()
        else:
            await job.nak()

    async def _on_direct(self, msg: Msg) -> None:
        """Queue a job that comes past the stream. A message without a job asks whether we would
        take one. `pull` accepts a job."""
        free = self._waiting and not (self._urgent_only or self._draining or self._arrived)
        if free and msg.headers and MSG_ID in msg.headers:
            self._arrived.append(JetStreamDelivery(self, msg, past_stream=True))
            self._wake.ring()
            return
        with contextlib.suppress(NotSent):
            await self.connection.publish(msg.reply, TAKEN if free else BUSY)

    def _give_back(self, *jobs: JetStreamDelivery) -> None:
        """Give back these jobs and those that have arrived."""
        for job in (*jobs, *self._arrived):
            task = asyncio.create_task(job.nak())
            self._returns.add(task)
            task.add_done_callback(self._returns.discard)
        self._arrived.clear()

    # ------------------------------------------------------------------ connection

    async def _setup(self) -> None:
        if await self.streams.reconnected():
            self.health.ok(PULLS)
        else:
            self.health.failed("JetStream does not answer", PULLS)
            asyncio.get_running_loop().call_later(_CHECK_S, self._check_until_known)
        await self.letters.collect()
        if not self._draining:
            await self._requests.subscribe()
            await self.lanes.subscribe()
            direct, client = self._names.direct, self.connection.client
            await client.subscribe(direct, queue="pullfill", cb=self._on_direct)
        await self._renew()

    async def _renew(self) -> None:
        """Over a new connection, send heartbeats of running deliveries before the first pull."""
        with contextlib.suppress(QueueUnavailable):
            await send_signs(self.connection, self.running(), self.stream_id, SETTLE_TRY_S)

    async def tell(self, stream_id: str, ack_subject: str, verdict: bytes) -> None:
        """Send `verdict`, if the server is connected and still has the stream."""
        if self.connection.up and stream_id == self.stream_id:
            with contextlib.suppress(NotSent):
                await self.connection.publish(ack_subject, verdict)

    async def settle(self, stream_id: str, ack_subject: str, verdict: bytes) -> None:
        """Tell the server and wait for its answer, over a reconnect. Raises QueueUnavailable."""
        failure: PullfillError | None = None
        for _ in range(SETTLE_TRIES):
            if not self.connection.up and not await self.connection.wait_up(SETTLE_TRY_S):
                continue
            if not self.stream_id:
                await asyncio.sleep(SETTLE_TRY_S)
                continue
            if stream_id != self.stream_id:
                return
            try:
                await self.connection.request(ack_subject, verdict, SETTLE_TRY_S)
                return
            except NoResponders:
                return  # the server's consumer is gone, and this delivery with it
            except QueueUnavailable as exc:
                failure = exc
        raise failure or QueueUnavailable(f"NATS at {self.connection.shown_url} is not connected")
