"""Sends acks, and sends them again until the server has confirmed them.

`send` does not wait for the server.

When an ack is sent: while pull requests follow each other within BUSY_S, with the next pull
request, and at most BUSY_S later. A socket write of its own would cost more than the rest of the
ack. At a lower rate it is sent at once, because a timer would wake the thread for it alone.

How it is confirmed: every CONFIRM_S the newest ack is sent once more, as a request. The server
reads the acks of a connection in order, so its answer confirms all earlier ones. Acks that were not
confirmed when a connection broke are sent again over the next one.

An ack can still be lost: the server may have forgotten its deliveries, or the leader of a cluster
has changed. Then the job is delivered again, and its claim is refused.

Life: `Acks(...)` → `send`, `push` → `close`, which waits for what is open, for a bounded time.
asyncio thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass

from pullfill.errors import QueueUnavailable
from pullfill.queue.nats_connection import NatsConnection, NoResponders, NotSent
from pullfill.runtime import log

logger = log.get("queue")

BUSY_S = 0.005
"""An ack waits so long for the next pull request, if the last two were no further apart."""
CONFIRM_S = 0.5
"""From an ack to the request that confirms it. Many acks share one."""
ANSWER_S = 1.0
TRIES = 5
"""Requests without an answer, after which an ack is dropped. The server answers none for a delivery
that it has forgotten."""
MAX_OPEN = 10_000
CLOSE_S = 2.0
_PAUSE_S = 0.05
_ACK = b"+ACK"


@dataclass(slots=True, eq=False)
class _Open:
    """An ack that is not confirmed.

    stream_id: the stream that the delivery was pulled from.
    generation: the connection that the ack was sent over. 0: it must be sent (again)."""

    stream_id: str
    subject: str
    generation: int = 0
    asked: int = 0


class Acks:
    """See the module.

    stream_id: returns the id of the current stream. A delivery of another stream is not acked,
    because its sequence number now means another job. While the id is unknown (""), acks wait."""

    def __init__(self, connection: NatsConnection, stream_id: Callable[[], str]) -> None:
        self._connection = connection
        self._stream_id = stream_id
        self._open: dict[str, _Open] = {}
        self._unsent: list[_Open] = []
        self._pushed_at = -math.inf
        self._gap = math.inf
        self._late: asyncio.Task[None] | None = None
        self._timed = False
        self._some = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._pushed_over = 0
        self._closing = False

    @property
    def unconfirmed(self) -> int:
        return len(self._open)

    async def send(self, stream_id: str, subject: str) -> None:
        """Ack a delivery of this stream, now or with the next pull request. Never raises."""
        one = self._open[subject] = _Open(stream_id, subject)
        if len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]
        if self._task is None:
            self._task = asyncio.create_task(self._confirm_always(), name="queue-acks")
        self._some.set()
        loop = asyncio.get_running_loop()
        if max(self._gap, loop.time() - self._pushed_at) > BUSY_S:
            await self._tell(one)
            return
        self._unsent.append(one)
        if not self._timed:
            self._timed = True
            loop.call_later(BUSY_S, self._overdue)

    async def push(self) -> None:
        """Send the acks that wait for this pull request. Never raises.

        Over a new connection send all open acks. Otherwise the pull brings those jobs again."""
        now = asyncio.get_running_loop().time()
        self._gap, self._pushed_at = now - self._pushed_at, now
        if self._pushed_over != self._connection.generation:
            self._pushed_over, self._unsent = self._connection.generation, list(self._open.values())
        await self._send_unsent()

    def _overdue(self) -> None:
        self._timed = False
        if self._unsent:
            self._late = asyncio.create_task(self._send_unsent())

    async def _send_unsent(self) -> None:
        unsent, self._unsent = self._unsent, []
        for one in unsent:
            await self._tell(one)

    async def close(self) -> None:
        """Wait until all is confirmed, CLOSE_S at most."""
        self._closing = True
        loop = asyncio.get_running_loop()
        until = loop.time() + CLOSE_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._open and loop.time() < until:  # the client may swallow the timeout
                    if await self._connection.wait_up(CLOSE_S):
                        await self._confirm()
                    if self._open:
                        await asyncio.sleep(_PAUSE_S)
        if self._open:
            logger.warning(
                "NATS has not confirmed %d acks; those jobs may be delivered again", len(self._open)
            )
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=ANSWER_S)  # the client may swallow it
            self._task = None

    async def _tell(self, one: _Open) -> None:
        """Send it, if it has not gone out over this connection."""
        if not self._connection.up or not self._stream_id():
            return
        if one.generation == self._connection.generation:
            return
        if not self._moot(one):
            with contextlib.suppress(NotSent):
                one.generation = self._connection.generation
                await self._connection.publish(one.subject, _ACK)

    def _moot(self, one: _Open) -> bool:
        """Whether its number means another job now. Then it is forgotten."""
        if moot := one.stream_id != self._stream_id():
            self._forget(one)
        return moot

    async def _confirm_always(self) -> None:
        while not self._closing:
            await self._some.wait()
            await asyncio.sleep(CONFIRM_S)
            try:
                if await self._connection.wait_up(ANSWER_S):
                    await self._confirm()
            except Exception:
                logger.exception("could not confirm acks; going on")
                await asyncio.sleep(ANSWER_S)
            if not self._open:
                self._some.clear()

    async def _confirm(self) -> None:
        """Send what is not sent, and ask once about all that is open."""
        if not self._stream_id():
            return
        self._unsent.clear()
        asked = [one for one in list(self._open.values()) if not self._moot(one)]
        if not asked or not self._connection.up:
            return
        generation, newest = self._connection.generation, asked[-1]
        for one in asked[:-1]:
            await self._tell(one)
        if self._connection.generation != generation:
            return
        newest.generation = generation
        try:
            await self._connection.request(newest.subject, _ACK, ANSWER_S)
        except QueueUnavailable as exc:
            # No responders: the server's consumer is gone with its deliveries, or has no leader.
            tried = isinstance(exc, NoResponders) or not isinstance(exc, NotSent)
            for one in asked:
                one.generation, one.asked = 0, one.asked + tried
                if one.asked >= TRIES:
                    self._forget(one)
            return
        for one in asked:
            if one.generation == generation:
                self._forget(one)

    def _forget(self, one: _Open) -> None:
        if self._open.get(one.subject) is one:
            del self._open[one.subject]
