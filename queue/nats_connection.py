"""One NATS connection, which is up or being dialled.

Life: `use` by all that need it → `start` dials until the first success, for at most `wait_s`. Then
a task dials again after each loss, until `close`.

A connection whose server answers no PING is given up, and so is one on which the client reads no
more.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from pullfill import redact
from pullfill.backoff import Backoff
from pullfill.config import split_urls
from pullfill.errors import ConfigError, NotNow, PullfillError, QueueFull, QueueUnavailable
from pullfill.runtime import log
from pullfill.runtime.health import ServerHealth
from pullfill.runtime.lifecycle import Tasks, end

logger = log.get("queue")

DIAL_TIMEOUT_S = 2.0
API_TIMEOUT_S = 2.0
_NEVER_S = 10**6
PING_EVERY_S = 0.5
PING_WAIT_S = 0.9
"""A hung server is noticed within the sum of both, so within 1.5 s."""
_SLICES = 3
HEADER_ROOM = 4096
"""Bytes of the headers of a message, at most. NATS counts them against max_payload, and ends the
connection of a client that exceeds it. nats-py looks at the body alone."""
RAISE_PAYLOAD = "raise max_payload in its configuration (8MB is enough for 1.5 million tokens)"
_IS_IT_THERE = (
    "check that nats-server runs there with JetStream on (`nats-server -js`), and --nats or "
    "--state-dir"
)
_MORE_ROOM = (
    "its streams need more room than it has, 256 MiB and queue.max_bytes. Free disk space, or "
    "raise jetstream.max_file_store in its configuration"
)
_CLIENT_TASKS = ("_reading_task", "_flusher_task", "_ping_interval_task")
_FULL = frozenset({10077, 10047, 10023, 10028, 10002})
"""max_msgs reached (discard new), and the server out of storage or over an account limit."""
Setup = Callable[[], Awaitable[object]]
_GONE = (nats.errors.UnexpectedEOF, nats.errors.StaleConnectionError, ConnectionError)


class ApiError(QueueUnavailable):
    """JetStream answered with an error. `err_code` is its number (e.g. 10059: no such stream)."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"JetStream error {err_code}: {description}")
        self.code = code
        self.err_code = err_code
        self.description = description

    @property
    def full(self) -> bool:
        """Whether the stream, the account or the server has no room."""
        return self.err_code in _FULL


class NotSent(QueueUnavailable):
    """Nothing left this process: the request cannot have had an effect."""


class NatsConnection:
    """See the module. All methods belong to one asyncio loop. Any thread may read `up`.

    url: URL of the server, or `URL,URL` of several servers of a cluster. The first that answers is
    used.
    connect_options: of `nats.connect` (user, password, token, tls, ...).
    """

    def __init__(
        self,
        url: str,
        name: str,
        connect_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._urls = split_urls(url) or [url]
        self.shown_url = redact.url(",".join(self._urls))
        self.health = ServerHealth("nats", self.shown_url)
        self.up = False
        self._name = name
        self._options = dict(connect_options or {})
        self._client: Client | None = None
        self._ended = asyncio.Event()
        self._changed = asyncio.Event()
        self._cause = "not connected yet"
        self._said = ""
        self._seldom = log.Seldom(60.0)
        self._task: asyncio.Task[None] | None = None
        self._burials = Tasks()
        self._users: list[tuple[Setup, Callable[[], object]]] = []

    def use(self, setup: Setup, on_down: Callable[[], object]) -> None:
        """Call it before `start`.

        setup: makes streams and subscriptions. Runs on each new connection before it counts as up.
        on_down: called when a connection that was up is lost."""
        self._users.append((setup, on_down))

    async def start(self, wait_s: float) -> None:
        """Dial. Raises ConfigError, or QueueUnavailable after `wait_s`: nothing is left running."""
        backoff, why = Backoff(0.05, 1.0), None
        try:
            async with asyncio.timeout(wait_s) as limit:
                while (why := await self._dialled()) is not None:
                    if isinstance(why, ConfigError):
                        raise why
                    if limit.expired():  # `wait_for` of Python 3.11, in nats-py, may lose that
                        raise TimeoutError
                    await asyncio.sleep(backoff.next())
        except TimeoutError:
            full = isinstance(why, ApiError) and why.full
            raise QueueUnavailable(
                f"NATS at {self.shown_url} was not usable within {wait_s:g} s ({self._cause}): "
                + (_MORE_ROOM if full else _IS_IT_THERE)
            ) from None
        finally:
            if not self.up:
                await self.close()
        self._task = asyncio.create_task(self._run(), name=f"nats-connection-{self._name}")

    async def wait_up(self, wait_s: float) -> bool:
        """Whether the connection is up, now or within `wait_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self.up:
                    self._changed.clear()
                    await self._changed.wait()
        return self.up

    async def close(self) -> None:
        """Stop dialling and close the socket. Takes about a second at most. Idempotent."""
        await end(self._task, again_s=0.5)
        self._drop()
        await asyncio.gather(*self._burials, return_exceptions=True)

    @property
    def client(self) -> Client:
        """The live client. Raises NotSent when there is none."""
        if self._client is None or self._client.is_closed:
            raise NotSent(f"no connection to NATS at {self.shown_url}: {self._cause}")
        return self._client

    @property
    def max_body(self) -> int:
        """Bytes of the largest body that the server takes. 0: not known now. Any thread."""
        client = self._client
        return client.max_payload - HEADER_ROOM if self.up and client is not None else 0

    async def request(
        self, subject: str, payload: bytes, timeout_s: float, headers: dict[str, str] | None = None
    ) -> Msg:
        """Send one request and return its answer.

        Raises NotSent (no connection, or nobody listens on the subject), QueueUnavailable (no
        answer: it may have had its effect), QueueFull (larger than the server's max_payload)."""
        client = self.client
        if len(payload) + HEADER_ROOM * bool(headers) > client.max_payload:
            too_large = QueueFull(
                f"{len(payload)} bytes are more than the max_payload of {client.max_payload} of "
                f"NATS at {self.shown_url}: {RAISE_PAYLOAD}"
            )
            too_large.retryable = False
            raise too_large
        try:
            # The client's own timeout does not cover a full send buffer.
            async with asyncio.timeout(timeout_s):
                return await client.request(subject, payload, timeout_s, headers=headers)
        except nats.errors.NoRespondersError:
            raise NotSent(f"NATS at {self.shown_url} has nobody on {subject}") from None
        except TimeoutError:
            raise QueueUnavailable(
                f"NATS at {self.shown_url} gave no answer within {timeout_s:g} s"
            ) from None
        except (nats.errors.Error, OSError) as exc:
            raise QueueUnavailable(f"NATS at {self.shown_url}: {_say(exc)}") from exc

    async def api(
        self, operation: str, payload: object = None, timeout_s: float = API_TIMEOUT_S
    ) -> dict[str, Any]:
        """One JetStream API call. Raises ApiError and what `request` raises."""
        # nats-py's JetStreamContext would drop the fields that it does not know, and so undo what
        # an operator has set.
        body = b"" if payload is None else msgspec.json.encode(payload)
        return read_reply(await self.request(f"$JS.API.{operation}", body, timeout_s))

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Send and forget. Raises NotSent."""
        client = self.client
        try:
            await client.publish(subject, payload, reply=reply)
        except (nats.errors.Error, OSError) as exc:
            raise NotSent(f"NATS at {self.shown_url}: {_say(exc)}") from exc

    async def flush(self, timeout_s: float = 1.0) -> None:
        """Wait until the server has read what was published. Errors are not raised."""
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError, PullfillError):
            async with asyncio.timeout(timeout_s):
                await self.client.flush()

    # ------------------------------------------------------------------ the dialling task

    async def _run(self) -> None:
        """Dial again after each loss."""
        while True:
            await self._until_ended()
            down_since, self._said = time.monotonic(), self._cause
            logger.warning("lost NATS at %s (%s); reconnecting", self.shown_url, self._cause)
            self._drop()
            backoff = Backoff(0.05, 1.0)
            while True:
                await asyncio.sleep(backoff.next())
                if await self._dialled() is None:
                    break
            seconds = time.monotonic() - down_since
            logger.info("NATS at %s is back after %.1f s", self.shown_url, seconds)

    async def _dialled(self) -> Exception | None:
        """Dial once. Returns what went wrong, and logs it if it is new."""
        try:
            await self._dial()
        except Exception as exc:  # whatever it was, the next try may work
            self._drop()
            self._cause = cause = _say(exc)
            self.health.failed(cause)
            if cause != self._said:
                self._said = cause
                waiting = "" if self._task else "waiting for "
                logger.warning("%sNATS at %s: %s", waiting, self.shown_url, cause)
            return exc
        return None

    async def _dial(self) -> None:
        self._ended.clear()
        # A client for each connection. nats-py's own reconnect is not used: it gives up for good on
        # some server errors, and against a stopped server it can wait for ever for its socket to
        # drain.
        self._client = client = Client()
        options: dict[str, Any] = {
            "name": f"pullfill-{self._name}",
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0.05,
            "connect_timeout": DIAL_TIMEOUT_S,
            "ping_interval": _NEVER_S,  # `_until_ended` sends PINGs: the client's may get stuck
            "flush_timeout": 0.5,
            **self._options,
        }
        cause: list[Exception] = []

        async def on_error(exc: Exception) -> None:
            if not self.up:
                cause.append(exc)
            elif not isinstance(exc, (*_GONE, OSError)):  # a missing right, a callback's error
                more = self._seldom.due(_say(exc)[:80])
                if more is not None:
                    logger.error("NATS at %s: %s%s", self.shown_url, _say(exc), more, exc_info=exc)
            if isinstance(exc, _GONE):
                self._cause = _say(exc)
                self._ended.set()

        async def on_closed() -> None:
            self._ended.set()

        try:
            async with asyncio.timeout((1 + len(self._urls)) * DIAL_TIMEOUT_S):
                await client.connect(self._urls, error_cb=on_error, closed_cb=on_closed, **options)
        except (nats.errors.NoServersError, TimeoutError):
            raise self._meant(cause[-1] if cause else TimeoutError("no answer")) from None
        except (nats.errors.Error, OSError) as exc:
            raise self._meant(exc) from None
        self._ended.clear()
        for setup, _ in self._users:
            await setup()
        self.up = True
        self.health.ok()
        self._changed.set()

    def _meant(self, cause: Exception) -> Exception:
        """Return a ConfigError if no waiting helps: a login or a certificate is refused."""
        text = _say(cause).lower()
        if isinstance(cause, nats.errors.AuthorizationError) or "authorization" in text:
            return NotNow(
                f"NATS at {self.shown_url} refuses the login: check credentials, user, "
                "password_file or token_file of [nats] in the --security file"
            )
        # OpenSSL's texts. The client tells in no other way that the handshake failed.
        if isinstance(cause, ssl.SSLError | ssl.CertificateError) or "tls" in text:
            return NotNow(
                f"no TLS with NATS at {self.shown_url} ({_say(cause)}): check ca, cert and key of "
                "[nats] in the --security file, and the host name in the URL"
            )
        return cause

    async def _until_ended(self) -> None:
        """Wait until the connection is lost or given up.

        The client's callbacks alone are not enough: they can be stuck behind a socket that does
        not drain."""
        client = self._client
        assert client is not None
        ping: asyncio.Task[None] | None = None
        ended = asyncio.create_task(self._ended.wait())
        try:
            while client.is_connected:
                if (await asyncio.wait({ended}, timeout=PING_EVERY_S))[0]:
                    return
                # nats-py stops for good, and says nothing of it, at a message whose headers it
                # cannot decode. `flush` returns at once then.
                if client._reading_task is None or client._reading_task.done():
                    self._cause = "a message that the client cannot read"
                    return
                # Not cancelled: the client stops to read at the answer to a PING without a waiter.
                ping = asyncio.create_task(client.flush(timeout=_NEVER_S))
                # In slices: if this process is stopped for a while, that counts as one slice.
                for _ in range(_SLICES):
                    await asyncio.wait(
                        {ping, ended},
                        timeout=PING_WAIT_S / _SLICES,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    if ping.done() or ended.done():
                        break
                else:
                    self._cause = f"no answer for {PING_WAIT_S:g} s"
                    return
        finally:
            # Whoever closes may do so between a PING and its answer. The client would log the
            # answer, which nobody waits for any more, as an error with a traceback.
            if client._reading_task is not None:
                client._reading_task.cancel()
            await end(ping, ended)

    def _drop(self) -> None:
        client, self._client = self._client, None
        was_up, self.up = self.up, False
        if was_up:
            self.health.failed(self._cause)
            self._changed.set()
            for _, on_down in self._users:
                on_down()
        if client is not None:
            self._burials.begin(_bury(client), "close a connection to NATS")


def read_reply(reply: Msg) -> dict[str, Any]:
    """The JSON of a JetStream answer. Raises ApiError."""
    try:
        answer = msgspec.json.decode(reply.data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise QueueUnavailable(f"JetStream answered with something else: {exc}") from exc
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(answer, dict) or not isinstance(error, dict | None):
        raise QueueUnavailable("JetStream answered with something else")
    if error:
        raise ApiError(error.get("code", 0), error.get("err_code", 0), error.get("description", ""))
    return answer


async def _bury(client: Client) -> None:
    """Close a client, by force if its socket does not drain.

    A client whose TLS handshake failed leaves its plain socket open even if it closes."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(0.5):
            await client.close()
    for name in ("_io_writer", "_bare_io_writer"):
        writer = getattr(getattr(client, "_transport", None), name, None)
        if writer is not None:
            writer.transport.abort()
    tasks = [getattr(client, name, None) for name in _CLIENT_TASKS]
    tasks += [sub._wait_for_msgs_task for sub in getattr(client, "_subs", {}).values()]
    for task in tasks:
        if isinstance(task, asyncio.Task):
            task.cancel()


def _say(exc: BaseException) -> str:
    text = str(exc) or type(exc).__name__
    return text.removeprefix("nats: ")
