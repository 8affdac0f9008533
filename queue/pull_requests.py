"""The pull requests of one prefill worker, and the inbox for their answers.

NATS answers a request with a job or with a status. A job does not name its request. But one request
at most waits for a job that is in no lane, and one at most asks for what is there now. The first
kind lives on the server until it is answered or has expired. It is withdrawn if the worker gets a
job from a lane meanwhile, or stops pulling: a worker that takes no job would have to give back what
the request brings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from pullfill.clock import SYSTEM_CLOCK
from pullfill.errors import QueueUnavailable
from pullfill.queue.names import Names, consumer_of
from pullfill.queue.nats_connection import NatsConnection, NotSent
from pullfill.queue.urgency import Lane

GRACE_S = 1.0
"""If no answer comes within this time after a request has expired, the server counts as hung."""
SURE_S = 1.0
NO_MESSAGES = "404"
EXPIRED = "408"
NO_CONSUMER = "503"


@dataclass(slots=True)
class Request:
    """One pull request.

    generation: of the connection that it was sent over.
    live_until: when it expires on the server.
    status: of the answer that ended it, if that was no job."""

    number: int
    generation: int
    live_until: float
    lane: Lane | None = None
    status: str = ""

    @property
    def found_nothing(self) -> bool:
        """Whether it has ended because no job was there."""
        return self.status in (NO_MESSAGES, EXPIRED)


class PullRequests:
    """Sends requests, and notes how they end.

    waiting: the request that waits for a job that is in no lane. asking: the request for a job that
    is there now. None: there is none, or a job has ended it.
    on_message: takes what comes to the inbox."""

    def __init__(
        self,
        connection: NatsConnection,
        names: Names,
        on_message: Callable[[Msg], Awaitable[None]],
    ) -> None:
        self.waiting: Request | None = None
        self.asking: Request | None = None
        self.subscription: Subscription | None = None
        self._connection = connection
        self._names = names
        self._on_message = on_message
        self._inbox = ""
        self._left: Subscription | None = None
        self._serial = 0

    @property
    def lives(self) -> bool:
        """Whether a request may wait on the server."""
        waiting = self.waiting
        return (
            waiting is not None
            and not waiting.status
            and waiting.generation == self._connection.generation
            and SYSTEM_CLOCK.monotonic() < waiting.live_until + GRACE_S
        )

    async def subscribe(self) -> None:
        """Listen at a new inbox."""
        client = self._connection.client
        self._inbox = client.new_inbox()
        self.subscription = await client.subscribe(f"{self._inbox}.*", cb=self._on_message)

    async def wait(self, seconds: float) -> Request:
        """Send a request that waits for a job that is in no lane. Raises NotSent."""
        ask = b'{"batch":1,"expires":%d}' % int(seconds * 1e9)
        self.waiting = await self._send(None, ask, seconds)
        return self.waiting

    async def ask(self, lane: Lane | None) -> Request:
        """Send a request for what is there now, in this lane or in none. Raises NotSent."""
        self.asking = await self._send(lane, b'{"batch":1,"no_wait":true}', 0.0)
        return self.asking

    async def _send(self, lane: Lane | None, ask: bytes, seconds: float) -> Request:
        self._serial += 1
        until = SYSTEM_CLOCK.monotonic() + seconds
        request = Request(self._serial, self._connection.generation, until, lane)
        await self._connection.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{self._names.stream}.{consumer_of(lane)}",
            ask,
            reply=f"{self._inbox}.{request.number}",
        )
        return request

    def job_came(self, lane: Lane | None) -> None:
        """Note that a job of this lane has come: it has ended a request."""
        if self.asking is not None and self.asking.lane == lane:
            self.asking = None
        elif lane is None:
            self.waiting = None

    def status_came(self, msg: Msg) -> Request | None:
        """Note a status. Returns the request that it has ended, if that is still of interest."""
        number = msg.subject.rpartition(".")[2]
        for request in (self.waiting, self.asking):
            if request is not None and number == str(request.number):
                request.status = (msg.headers or {}).get("Status", "?")
                return request
        return None

    async def withdraw(self, *, sure: bool = False) -> None:
        """Take the requests back, by leaving the inbox that they name. Never raises.

        sure: wait until the server has noted it, for SURE_S at most. A job that is published after
        that is not sent to us. Otherwise it may be, and would have to be given back.

        Jobs that the server had sent before still come, until the next request is answered. So
        the client forgets the old inbox only at the next withdrawal."""
        self.waiting = self.asking = None
        with contextlib.suppress(QueueUnavailable, NotSent, nats.errors.Error, OSError):
            before, self._left = self._left, self.subscription
            if before is not None:
                with contextlib.suppress(nats.errors.Error):  # it was of another connection
                    await before.unsubscribe()
            await self.subscribe()
            if self._left is not None:
                await self._connection.client._send_unsubscribe(self._left._id)
            if sure:  # nats-py may write a PING before the UNSUB, but no request
                stream = self._names.stream
                await self._connection.api(f"STREAM.INFO.{stream}", timeout_s=SURE_S)

    def leave(self) -> Subscription | None:
        """Send no request any more. Returns the subscription, for the caller to end."""
        subscription, self.subscription = self.subscription, None
        return subscription
