"""The prefill worker's end of the queue on JetStream.

Life: `connect` → `pull` repeatedly (one caller at a time) → `drain` → `close`.

Each pull request asks for one job, so a worker never holds jobs that it has no budget for. A
request lives on the server until it is answered or has expired, after REQUEST_S at most. If its
caller is cancelled, the next `pull` waits for the same request. A job that arrives while nobody
pulls is given back at once. If no answer comes within GRACE_S after the expiry, the server counts
as hung.

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
from nats.aio.subscription import Subscription

from pullfill.clock import SYSTEM_CLOCK
from pullfill.errors import BadMessage, PullfillError, QueueUnavailable
from pullfill.queue.acks import Acks
from pullfill.queue.contract import Delivery, QueueConfig
from pullfill.queue.deadletter import DeadLetters
from pullfill.queue.delivery import IN_PROGRESS, JetStreamDelivery
from pullfill.queue.names import CONSUMER, MSG_ID, TAKEN, Names
from pullfill.queue.nats_connection import NatsConnection, NoResponders, NotSent
from pullfill.queue.streams import NOT_SET, Streams
from pullfill.runtime import log
from pullfill.runtime.health import Health
from pullfill.runtime.lifecycle import end
from pullfill.runtime.waits import Bell
from pullfill.wire import QueueSettings

logger = log.get("queue")

REQUEST_S = 2.0
GRACE_S = 1.0
SHORTEST_S = 0.02
"""The server does not answer requests that expire within about a millisecond."""
SETTLE_TRY_S = 1.0
SETTLE_TRIES = 2
PULLS = "pulls"
"""The part of the server's health that says whether it answers pull requests."""
_HEAL_PAUSE_S = 0.05
_NO_MESSAGES = "404"
_EXPIRED = "408"


class JetStreamConsumer:
    """A `JobConsumer`. See the contract for what each method promises.

    streams: call `streams.configure` when the settings change.
    """

    def __init__(
        self, connection: NatsConnection, config: QueueConfig, settings: QueueSettings
    ) -> None:
        self.running: Callable[[], Iterable[Delivery]] = tuple
        self.connection = connection
        self._names = Names(config.namespace, config.compat_hash)
        self.streams = Streams(connection, self._names, config, settings)
        self.letters = DeadLetters(connection, self._names)
        self.acks = Acks(connection, lambda: self.stream_id)
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._arrived: deque[JetStreamDelivery] = deque()
        self._wake = Bell()
        self._pulling = asyncio.Lock()
        self._returns: set[asyncio.Task[None]] = set()
        self._waiting = False
        self._draining = False
        self._checking: asyncio.Task[None] | None = None
        # The one pull request that may be live on the server, and the answer that ended it.
        self._request = 0
        self._live_until = 0.0
        self._generation = 0
        self._status = ""

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
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            # nats-py's own drain writes its PING before commands that wait in its buffer. So the
            # server may answer before it reads UNSUB. A job that it sends in between is lost until
            # `ack_wait_s` have passed. A request is written after UNSUB, so after its answer no job
            # comes. What comes before it is given back.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(2.0):
                    await self.connection.client._send_unsubscribe(subscription._id)
                    await self.connection.api(f"STREAM.INFO.{self._names.stream}")
            with contextlib.suppress(Exception):
                async with asyncio.timeout(2.0):
                    await subscription.drain()  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------ pull

    async def pull(self, budget_tokens: int, max_jobs: int, wait_s: float) -> list[Delivery]:
        taken: list[Delivery] = []
        async with self._pulling:
            self._waiting = True
            try:
                tokens = 0
                while len(taken) < max_jobs and not (taken and tokens >= budget_tokens):
                    job = await self._next(0.0 if taken else wait_s)
                    if job is None:
                        break
                    taken.append(job)
                    tokens += job.tokens
            except QueueUnavailable as exc:
                if self.connection.up and self.health.up:  # it is JetStream that does not work
                    self.health.failed(str(exc), PULLS)
                if not taken:
                    raise
            except BaseException:
                self._give_back(taken)
                raise
            finally:
                self._waiting = False
                self._give_back(list(self._arrived))
                self._arrived.clear()
        return taken

    async def _next(self, wait_s: float) -> JetStreamDelivery | None:
        """Return one job. None: none came within `wait_s`, or drain. Raises QueueUnavailable."""
        deadline = SYSTEM_CLOCK.monotonic() + wait_s
        while not self._draining:
            if self._arrived:
                return self._arrived.popleft()
            left = deadline - SYSTEM_CLOCK.monotonic()
            if not self.connection.up:
                if left <= 0 or not await self.connection.wait_up(left):
                    raise QueueUnavailable(f"NATS at {self.connection.shown_url} is not connected")
                continue
            if not self.stream_id:
                await self._heal(deadline)
                continue
            if not self._request_lives():
                if wait_s > 0 and left < SHORTEST_S:
                    return None
                await self._ask(left)
            elif wait_s <= 0:
                return None
            # An older request may outlive this call. Then its answer is given back. A request that
            # ends with this call is waited for, so that nothing is left behind.
            outlives = self._live_until > deadline + GRACE_S
            until = deadline if outlives else self._live_until + GRACE_S
            if not await self._answered(until):
                if outlives:
                    return None
                self._live_until = 0.0
                raise QueueUnavailable(f"NATS at {self.connection.shown_url} does not answer pulls")
            if self._status in (_NO_MESSAGES, _EXPIRED):
                self._status = ""
                if wait_s <= 0:
                    return self._arrived.popleft() if self._arrived else None
            elif self._status:
                await self._heal(deadline)
        return None

    def _request_lives(self) -> bool:
        return (
            self._live_until > 0
            and self._generation == self.connection.generation
            and SYSTEM_CLOCK.monotonic() < self._live_until + GRACE_S
        )

    async def _ask(self, wait_s: float) -> None:
        """Send one pull request. wait_s: 0 asks only for what is there now."""
        self._request += 1
        self._generation = self.connection.generation
        self._status = ""
        lifetime = min(wait_s, REQUEST_S)
        if wait_s > 0:
            ask = b'{"batch":1,"expires":%d}' % int(lifetime * 1e9)
        else:
            ask = b'{"batch":1,"no_wait":true}'
        self._live_until = SYSTEM_CLOCK.monotonic() + max(0.0, lifetime)
        await self.acks.push()
        await self.connection.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{self._names.stream}.{CONSUMER}",
            ask,
            reply=f"{self._inbox}.{self._request}",
        )

    async def _answered(self, until: float) -> bool:
        """Wait for a job, a status, drain or a lost connection. False: `until` passed first."""
        while not (self._arrived or self._status or self._draining):
            if self._generation != self.connection.generation or not self.connection.up:
                return True
            left = until - SYSTEM_CLOCK.monotonic()
            self._wake.clear()
            if left <= 0 or not await self._wake.wait(left):
                return False
        return True

    async def _heal(self, deadline: float) -> None:
        """Check and repair the stream after a pull ended with an unexpected status.

        The consumer or stream is gone, or the server shuts down. Returns earlier if a job arrives
        meanwhile."""
        status, self._status = self._status, ""
        logger.debug("pull ended with %s; checking the stream", status)
        unknown = not self.stream_id
        checking = self._checking = self._checking or asyncio.create_task(self.streams.ensure())
        while not (checking.done() or self._arrived or self._draining):
            self._wake.clear()
            woken = asyncio.create_task(self._wake.wait(None))
            try:
                await asyncio.wait({checking, woken}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                woken.cancel()
        if not checking.done():
            return  # the next pull waits for the same check
        self._checking = None
        try:
            checking.result()
            if unknown:
                await self._renew()
        except QueueUnavailable as exc:
            self.health.failed(str(exc), PULLS)
            if SYSTEM_CLOCK.monotonic() >= deadline:
                raise
        if not self._arrived:
            await asyncio.sleep(_HEAL_PAUSE_S)

    async def _on_message(self, msg: Msg) -> None:
        try:
            job = JetStreamDelivery(self, msg)
        except BadMessage:
            token = msg.subject.rpartition(".")[2]
            if token == str(self._request):
                self._status = (msg.headers or {}).get("Status", "?")
                if self._status in (_NO_MESSAGES, _EXPIRED):
                    self.health.ok(PULLS)
                self._live_until = 0.0
                self._wake.ring()
            return
        self.health.ok(PULLS)
        self._live_until = 0.0
        if self._waiting and not self._draining:
            self._arrived.append(job)
            self._wake.ring()
        else:
            await job.nak()

    async def _on_direct(self, msg: Msg) -> None:
        """Answer a job that comes past the stream, or the question whether we would take one.

        The question is a message without a job."""
        free = self._waiting and not self._draining and not self._arrived
        if free and msg.headers and MSG_ID in msg.headers:
            self._arrived.append(JetStreamDelivery(self, msg, past_stream=True))
            self._wake.ring()
        with contextlib.suppress(NotSent):
            await self.connection.publish(msg.reply, TAKEN if free else b"busy")

    def _give_back(self, jobs: list[Any]) -> None:
        for job in jobs:
            task = asyncio.create_task(job.nak())
            self._returns.add(task)
            task.add_done_callback(self._returns.discard)

    # ------------------------------------------------------------------ connection

    async def _setup(self) -> None:
        if await self.streams.reconnected():
            self.health.ok(PULLS)
        else:
            self.health.failed("JetStream does not answer", PULLS)
        client = self.connection.client
        await self.letters.collect()
        if not self._draining:
            self._inbox = client.new_inbox()
            self._subscription = await client.subscribe(f"{self._inbox}.*", cb=self._on_message)
            await client.subscribe(self._names.direct, queue="pullfill", cb=self._on_direct)
        await self._renew()

    async def _renew(self) -> None:
        """Send a heartbeat for each running delivery over a new connection, before the first pull.

        Waits for the answer to the last one only. The server reads them in order."""
        signs = [
            d.ack_subject
            for d in self.running()
            if isinstance(d, JetStreamDelivery) and not d.obsolete(self.stream_id)
        ]
        with contextlib.suppress(QueueUnavailable):
            for subject in signs[:-1]:
                await self.connection.publish(subject, IN_PROGRESS)
            for subject in signs[-1:]:
                await self.connection.request(subject, IN_PROGRESS, SETTLE_TRY_S)

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
