"""Acks that were sent and that the server has not confirmed yet.

Who acks a job does not wait for the answer: it is sent at once and kept here. One task per consumer
repeats the newest of them as a request every now and then; the server takes a connection's acks in
order, so its answer is for all that were sent before. Acks that a connection took with it are sent
again over the next. One that is lost all the same costs a redelivery, whose claim is refused.

Life: `Acks(...)` → `send` → `close`, which waits for what is open, for a bounded time. asyncio only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from pullfill import log
from pullfill.errors import QueueUnavailable
from pullfill.queue.connection import Link, NoResponders, NotSent
from pullfill.queue.names import AckInfo

logger = log.get("queue")

CONFIRM_S = 1.0
"""Between an ack and the question whether it was heard: many acks share one."""
ANSWER_S = 1.0
TRIES = 5
"""Questions without an answer, over a connection that stands, before an ack is left to itself: the
server answers none of a delivery that it does not know of any more."""
MAX_OPEN = 10_000
CLOSE_S = 2.0
_PAUSE_S = 0.05
_ACK = b"+ACK"


@dataclass(slots=True, eq=False)
class _Open:
    """generation: of the connection that it was sent over; 0: over none that counts."""

    ack: AckInfo
    subject: str
    generation: int = 0
    asked: int = 0


class Acks:
    """See the module text. stream_id: of the stream as it is now; what was delivered from one
    before it is not acked, its number means another job."""

    def __init__(self, link: Link, stream_id: Callable[[], str]) -> None:
        self._link = link
        self._stream_id = stream_id
        self._open: dict[str, _Open] = {}
        self._some = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def unconfirmed(self) -> int:
        return len(self._open)

    async def send(self, ack: AckInfo, subject: str) -> None:
        """Never raises, and waits for nothing but room in the socket."""
        one = self._open[subject] = _Open(ack, subject)
        if len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]
        await self._tell(one)
        if self._task is None:
            self._task = asyncio.create_task(self._confirm_always(), name="queue-acks")
        self._some.set()

    async def close(self) -> None:
        """Wait until all is confirmed, CLOSE_S at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._open:
                    if await self._link.wait_up(CLOSE_S):
                        await self._confirm()
                    if self._open:
                        await asyncio.sleep(_PAUSE_S)
        if self._open:
            logger.warning("%d acks are not confirmed", len(self._open))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _tell(self, one: _Open) -> None:
        """Send it, if it has not gone out over this connection."""
        if not self._link.up or one.generation == self._link.generation:
            return
        if one.ack.precedes(self._stream_id()):
            self._open.pop(one.subject, None)
            return
        with contextlib.suppress(NotSent):
            one.generation = self._link.generation
            await self._link.publish(one.subject, _ACK)

    async def _confirm_always(self) -> None:
        while True:
            await self._some.wait()
            await asyncio.sleep(CONFIRM_S)
            if await self._link.wait_up(CONFIRM_S):
                await self._confirm()
            if not self._open:
                self._some.clear()

    async def _confirm(self) -> None:
        """Ask once about all that is open."""
        for one in list(self._open.values()):
            await self._tell(one)
        generation = self._link.generation
        asked = [one for one in self._open.values() if one.generation == generation]
        if not asked:
            return
        try:
            await self._link.request(asked[-1].subject, _ACK, ANSWER_S)
        except NoResponders:
            pass  # the consumer is gone, and its deliveries with it
        except QueueUnavailable:
            for one in asked:
                one.generation, one.asked = 0, one.asked + self._link.up
                if one.asked >= TRIES:
                    self._forget(one)
            return
        for one in asked:
            self._forget(one)

    def _forget(self, one: _Open) -> None:
        if self._open.get(one.subject) is one:
            del self._open[one.subject]
