"""One connection to a NATS server, in NATS' own text protocol (protocol.py).

Life: `Client.connect` → `subscribe`, `publish`, `flush` → `close` or `abort`. A connection that
ended stays ended; connection.py makes the next one. Belongs to one asyncio loop.

Why not the client of nats-py: it hands each message from its reader task through a queue to a task
of the subscription, and each publish through a queue to a task that writes. Here a callback runs
within the callback that received its bytes, and what it publishes leaves at the end of that. These
turns of the loop were a third of what a job cost in a worker's asyncio thread (docs/decisions.md).
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import ssl
from collections.abc import Callable, Sequence
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

import msgspec

from pullfill import __version__, log
from pullfill.errors import PullfillError
from pullfill.queue.protocol import Message, Parser, ProtocolError, hpub, pub

__all__ = ["AuthRefused", "Client", "Closed", "Message", "NatsError", "Subscription", "TooLarge"]

logger = log.get("queue")

PORT = 4222
PING_S = 2.0
UNANSWERED = 2
"""PINGs of ours without an answer after which the connection is given up."""
MAX_BACKLOG = 64 << 20
"""Bytes that may wait for a server that does not read. Nothing more is taken then."""
CLOSE_S = 0.5


class NatsError(PullfillError):
    """What the server said, or what became of the connection."""


class AuthRefused(NatsError):
    """The server refuses the login."""


class Closed(NatsError):
    """The connection is not there any more: nothing was sent."""


class TooLarge(NatsError):
    """A message is larger than the server's max_payload: nothing was sent."""


Callback = Callable[[Message], None]


class Subscription:
    """Interest in a subject, until `unsubscribe` or `drain`."""

    __slots__ = ("_client", "_number", "callback", "subject")

    def __init__(self, client: Client, number: int, subject: str, callback: Callback) -> None:
        self._client = client
        self._number = number
        self.subject = subject
        self.callback = callback

    def unsubscribe(self) -> None:
        """Hear no more; what is on its way is dropped."""
        self._client._unsubscribe(self._number)

    async def drain(self) -> None:
        """Hear no more once what is on its way has come. Raises NatsError, TimeoutError."""
        self._client._write(b"UNSUB %d\r\n" % self._number, now=True)
        try:
            await self._client.flush()
        finally:
            self._client._subscriptions.pop(self._number, None)


class Client(asyncio.Protocol):
    """See the module. on_end: called once when the connection ended by itself, with the reason;
    on_error: with what the server complains of while the connection stands."""

    def __init__(
        self,
        on_end: Callable[[NatsError], object] = lambda _: None,
        on_error: Callable[[NatsError], object] = lambda _: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_end, self._on_error = on_end, on_error
        self._transport: asyncio.Transport | None = None
        self._parser = Parser()
        self._info: dict[str, Any] = {}
        self._why: NatsError | None = None
        self._lost = self._loop.create_future()
        self._greeting: asyncio.Future[None] | None = None
        self._pongs: list[asyncio.Future[None]] = []
        self._unanswered = 0
        self._timer: asyncio.TimerHandle | None = None
        self._subscriptions: dict[int, Subscription] = {}
        self._number = 0
        self._waiting: list[bytes] = []
        self._reading = False
        self._informed = self._connected = False
        self.messages = 0
        """Received so far."""
        self.max_payload = 1 << 20

    # ------------------------------------------------------------------ life

    @classmethod
    async def connect(
        cls,
        urls: Sequence[str],
        *,
        name: str,
        timeout_s: float,
        on_end: Callable[[NatsError], object] = lambda _: None,
        on_error: Callable[[NatsError], object] = lambda _: None,
        dont_randomize: bool = False,
        **login: Any,
    ) -> Client:
        """Connect to whichever server answers and log in. dont_randomize: try them in the order
        given. login: as `NatsSecurity.options` has it.
        Raises NatsError, OSError (ssl.SSLError is one) or TimeoutError of the server tried last."""
        failure: Exception = NatsError("no URL of a server")
        for url in urls if dont_randomize else random.sample(urls, len(urls)):
            client = cls(on_end, on_error)
            try:
                async with asyncio.timeout(timeout_s):
                    await client._open(urlsplit(url), name, login)
                return client
            except (NatsError, OSError, TimeoutError, ValueError) as exc:
                failure = exc
                client.abort()
            except BaseException:
                client.abort()
                raise
        raise failure

    async def _open(self, url: SplitResult, name: str, login: dict[str, Any]) -> None:
        host, port = url.hostname or "127.0.0.1", url.port or PORT
        self._greeting = self._loop.create_future()
        await self._loop.create_connection(lambda: self, host, port)
        await self._greeting  # its INFO
        wanted = login.get("tls")
        if self._info.get("tls_required") or (wanted and self._info.get("tls_available")):
            context = wanted or ssl.create_default_context()
            assert self._transport is not None
            self._transport = await self._loop.start_tls(
                self._transport, self, context, server_hostname=host
            )
        elif wanted is not None:
            raise NatsError("the server offers no TLS, and the configuration wants it")
        connect = _greeting(self._info, url, name, login)
        self._greeting = self._loop.create_future()
        self._write(b"CONNECT %s\r\nPING\r\n" % json.dumps(connect).encode(), now=True)
        await self._greeting  # its PONG
        self._greeting = None
        self._connected = True
        self._timer = self._loop.call_later(PING_S, self._ping)

    @property
    def server_version(self) -> str:
        return str(self._info.get("version", ""))

    @property
    def is_connected(self) -> bool:
        return self._connected and self._why is None

    @property
    def is_closed(self) -> bool:
        return self._why is not None

    async def close(self) -> None:
        """Send what waits, then end; by force if the server does not read."""
        self._end(Closed("closed here"), tell=False)
        if self._transport is not None:
            await asyncio.wait({self._lost}, timeout=CLOSE_S)
            self._transport.abort()

    def abort(self) -> None:
        """End now."""
        self._waiting.clear()
        self._end(Closed("closed here"), tell=False)
        if self._transport is not None:
            self._transport.abort()

    def _end(self, why: NatsError, tell: bool = True) -> None:
        """Whatever ended it: nothing is sent or heard from now on."""
        if self._why is not None:
            return
        self._flush()
        self._why = why
        if self._timer is not None:
            self._timer.cancel()
        waiting = [*self._pongs, self._greeting] if self._greeting else self._pongs
        for future in waiting:
            if not future.done():
                future.set_exception(why)
                future.exception()  # seen, also if nobody waits for it any more
        self._pongs = []
        if self._transport is not None:
            self._transport.close()
        if tell and self._connected:
            self._on_end(why)

    def _ping(self) -> None:
        """Find out that a server is gone which closes nothing."""
        self._timer = self._loop.call_later(PING_S, self._ping)
        if self._unanswered >= UNANSWERED:
            self._end(NatsError("the server answers no PING"))
            assert self._transport is not None
            self._transport.abort()
            return
        self._unanswered += 1
        self._pongs.append(self._loop.create_future())
        self._write(b"PING\r\n", now=True)

    # ------------------------------------------------------------------ out

    def publish(
        self,
        subject: str,
        payload: bytes,
        reply: str = "",
        headers: dict[str, str] | None = None,
        *,
        now: bool = False,
    ) -> None:
        """Send a message; never blocks. Those of one turn of the loop leave at its end, in one
        piece; `now`: at once. Raises Closed, TooLarge, ValueError (a subject or a header that the
        protocol cannot carry)."""
        if len(payload) > self.max_payload:
            raise TooLarge(f"{len(payload)} bytes are more than {self.max_payload}")
        if self._transport is not None and self._transport.get_write_buffer_size() > MAX_BACKLOG:
            raise Closed("the server does not read what it is sent")
        command = pub(subject, reply, payload) if headers is None else hpub(
            subject, reply, headers, payload
        )  # fmt: skip
        self._write(command, now=now)

    def subscribe(self, subject: str, callback: Callback, queue: str = "") -> Subscription:
        """Call `callback` with each message, within the callback that received it: it must be
        quick. queue: one of the subscribers with that word gets it. Raises Closed."""
        self._number += 1
        subscription = Subscription(self, self._number, subject, callback)
        self._write(f"SUB {subject} {queue} {self._number}\r\n".encode())
        self._subscriptions[self._number] = subscription
        return subscription

    def _unsubscribe(self, number: int) -> None:
        if self._subscriptions.pop(number, None) is not None and self._why is None:
            self._write(b"UNSUB %d\r\n" % number)

    async def flush(self) -> None:
        """Wait until the server has read all that was published, and we what it sent before that.
        Raises NatsError. Bound it in time."""
        answer = self._loop.create_future()
        self._write(b"PING\r\n", now=True)
        self._pongs.append(answer)
        await answer

    def new_inbox(self) -> str:
        """A subject that nobody else has."""
        return f"_INBOX.{secrets.token_hex(11)}"

    def _write(self, data: bytes, now: bool = False) -> None:
        transport = self._transport
        if self._why is not None or transport is None:
            raise Closed(str(self._why or "not connected yet"))
        if not self._waiting and not self._reading and not now:
            self._loop.call_soon(self._flush)
        self._waiting.append(data)
        if now and not self._reading:
            self._flush()

    def _flush(self) -> None:
        if self._waiting and self._transport is not None and self._why is None:
            waiting, self._waiting = self._waiting, []
            self._transport.write(b"".join(waiting) if len(waiting) > 1 else waiting[0])

    # ------------------------------------------------------------------ in

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._why is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._lost.done():
            self._lost.set_result(None)
        self._end(NatsError(f"the connection ended{f': {exc}' if exc else ''}"))

    def data_received(self, data: bytes) -> None:
        if self._why is not None:
            return
        self._reading = True
        try:
            for event in self._parser.feed(data):
                if isinstance(event, Message):
                    self._deliver(event)
                else:
                    self._command(*event)
                if self._why is not None:
                    return
        except ProtocolError as exc:
            self._end(NatsError(str(exc)))
        finally:
            self._reading = False
            self._flush()

    def _deliver(self, message: Message) -> None:
        self.messages += 1
        subscription = self._subscriptions.get(message.subscription)
        if subscription is None:
            return
        try:
            subscription.callback(message)
        except Exception:
            logger.exception("a message on %s failed", message.subject)

    def _command(self, word: bytes, rest: bytes) -> None:
        if word == b"PING":
            self._write(b"PONG\r\n")
        elif word == b"PONG":
            self._unanswered = 0
            if self._greeting is not None:
                self._greeted()
            elif self._pongs and not (answer := self._pongs.pop(0)).done():
                answer.set_result(None)
        elif word == b"INFO":
            self._take_info(rest)
        elif word == b"-ERR":
            self._complaint(rest.decode("utf-8", "replace").strip().strip("'"))

    def _take_info(self, text: bytes) -> None:
        try:
            info = msgspec.json.decode(text)
            self.max_payload = int(info.get("max_payload", self.max_payload))
        except (msgspec.MsgspecError, AttributeError, TypeError, ValueError) as exc:
            raise ProtocolError(f"the server's INFO is unreadable: {exc}") from None
        self._info = info
        if not self._informed:
            self._informed = True
            self._greeted()

    def _greeted(self) -> None:
        """The server's part of a step of the greeting is there."""
        if self._greeting is not None and not self._greeting.done():
            self._greeting.set_result(None)

    def _complaint(self, text: str) -> None:
        if "permissions violation" in text.lower():  # of one subject; the connection stands
            self._on_error(NatsError(text))
        elif "authorization" in text.lower() or "authentication" in text.lower():
            self._end(AuthRefused(text))
        else:
            self._end(NatsError(text))


def _greeting(
    info: dict[str, Any], url: SplitResult, name: str, login: dict[str, Any]
) -> dict[str, Any]:
    """What CONNECT says."""
    told: dict[str, Any] = {
        "verbose": False, "pedantic": False, "lang": "python-pullfill", "version": __version__,
        "protocol": 1, "echo": True, "headers": True, "no_responders": True, "name": name,
    }  # fmt: skip
    if not info.get("auth_required"):
        return told
    if (sign := login.get("signature_cb")) is not None and "nonce" in info:
        told["sig"] = bytes(sign(info["nonce"])).decode()
        told["jwt"] = bytes(login["user_jwt_cb"]()).decode()
    elif login.get("user") is not None:
        told["user"], told["pass"] = login["user"], login.get("password") or ""
    elif login.get("token") is not None:
        told["auth_token"] = login["token"]
    elif url.username is not None and url.password is None:
        told["auth_token"] = url.username
    elif url.username is not None:
        told["user"], told["pass"] = url.username, url.password
    return told
