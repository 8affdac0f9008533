"""The one connection between two workers, from the end that dials it.

    dial → prove the cluster key → hello → welcome → messages both ways → lost → dial again

Prefill workers dial decode workers for their jobs. Decode workers dial one another to read cached
prefixes. A subclass says what is special about its kind. The other end is `accept` (channel.py).

asyncio thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from pullfill.backoff import Backoff
from pullfill.errors import AuthFailed, BadMessage, PeerUnavailable, PullfillError
from pullfill.net.channel import Channel, dial, introduce, split_address
from pullfill.net.security import ClusterKey
from pullfill.runtime import log, metrics
from pullfill.runtime.lifecycle import end
from pullfill.wire import ALIVE_INTERVAL_S, SILENT_S, Goodbye, Heartbeat, Hello, LeaseHello, Welcome

logger = log.get("net.peer_link")

# A connection that nothing needs ends after this many seconds.
IDLE_S = 60.0


class ConnectionLost(PeerUnavailable):
    """The connection ended while an answer was waited for."""


class NotInTime(PeerUnavailable):
    """The peer has not answered in time, but the connection is open."""


class PeerLink:
    """See the module. Dials as soon as it is made.

    name: instance id of the worker that must answer at `address`.
    hello: the first message.
    key: the cluster key. The peer must hold the same one.
    dial_s: longest time from the dial to the welcome.
    heard: what the peer may say. A message with a `rid` answers the question of that number.
    over: the peer is not dialled any more."""

    heard: ClassVar[Any]

    def __init__(
        self,
        name: str,
        address: str,
        hello: Hello | LeaseHello,
        key: ClusterKey | None,
        *,
        dial_s: float = 10.0,
    ) -> None:
        self.name = name
        self._address = address
        self._hello = hello
        self._key = key
        self._dial_s = dial_s
        self._loop = asyncio.get_running_loop()
        self._channel: Channel | None = None
        self._rids = itertools.count(1)
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._heard_at = self._needed_at = self._loop.time()
        # Set while the connection is up, and while a new attempt is not worth waiting for: the last
        # one has failed, or the peer was silent.
        self._known = asyncio.Event()
        self._why = ""
        self._welcomed = self._silent = self.over = False
        self._task = asyncio.create_task(self._run(), name=f"link to {name}")

    # ------------------------------------------------------------------ what a subclass says

    def greeting(self) -> Hello | LeaseHello:
        """The first message of the connection that is made now."""
        return self._hello

    def on_welcome(self, welcome: Welcome) -> None:
        """The connection is up from now on. A PullfillError ends it."""

    def on_message(self, message: Any) -> None:
        """The peer has sent what is no answer."""

    def on_unwanted(self, answer: Any) -> None:
        """An answer has come for which nobody waits any more."""

    def on_silent(self) -> None:
        """The peer has been silent for too long. The connection ends."""

    def on_lost(self) -> None:
        """A connection that was up has ended."""

    def on_over(self) -> None:
        """The peer is not dialled any more. Called once, before anybody else can look."""

    def again(self) -> bool:
        """Whether to dial again after a connection was lost, or an attempt has failed."""
        return False

    def needed(self) -> bool:
        """Whether the connection must stay although nothing is asked over it."""
        return False

    def ping(self) -> Heartbeat | None:
        """What to send now, so that the peer answers. None: this kind has no pings."""
        return None

    # ------------------------------------------------------------------ what a user calls

    @property
    def connected(self) -> bool:
        return self._welcomed and self._channel is not None

    async def wait_up(self, within_s: float) -> None:
        """Wait until the peer has welcomed us. Raises PeerUnavailable.

        Raises at once if the last attempt has failed, the peer is silent, or the link is over."""
        if not self._known.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._known.wait()
        if not self.connected:
            why = f": {self._why}" if self._why else ""
            raise PeerUnavailable(f"worker {self.name} at {self._address} does not answer{why}")

    def send(self, message: msgspec.Struct) -> None:
        """Send a message without an answer. It is lost if the connection is."""
        if self._channel is not None:
            self._channel.write(message)

    async def ask(self, make: Callable[[int], msgspec.Struct], within_s: float) -> Any:
        """Send a question, and return its answer.

        Raises NotInTime, ConnectionLost, PeerUnavailable (not connected).

        make: makes the message with a given `rid`."""
        if (channel := self._channel) is None:
            raise PeerUnavailable(f"worker {self.name} is not connected")
        rid = next(self._rids)
        answer = self._questions[rid] = self._loop.create_future()
        try:
            channel.write(make(rid))
            await asyncio.wait([answer], timeout=within_s)
            if not answer.done():
                raise NotInTime(f"worker {self.name} does not answer in time")
            return answer.result()
        except asyncio.CancelledError:
            # The answer may have come in the same moment, and then nobody else knows of it.
            if answer.done() and answer.exception() is None:
                self.on_unwanted(answer.result())
            raise
        finally:
            del self._questions[rid]
            self._needed_at = self._loop.time()

    def when_ended(self, call: Callable[[], object]) -> None:
        """Have `call` called once the connection has ended for good."""
        self._task.add_done_callback(lambda _: call())

    def end(self) -> None:
        """End the connection, and dial no more. Idempotent."""
        self._task.cancel()
        self._is_over()

    async def close(self) -> None:
        """`end`, and wait until the connection has ended."""
        self._is_over()
        await end(self._task)

    # ------------------------------------------------------------------ the connection

    async def _run(self) -> None:
        pauses, told = Backoff(0.05, 2.0), ""
        try:
            while not self.over:
                self._why, self._welcomed = "", False
                try:
                    await self._connect()
                except (OSError, EOFError, BadMessage, TimeoutError) as exc:
                    self._why = self._why or str(exc)
                    logger.debug("control connection to %s: %s", self.name, self._why)
                except PullfillError as exc:
                    self._why = str(exc)
                    if isinstance(exc, AuthFailed):
                        metrics.AUTH_REFUSED.labels("control").inc()
                    # Not each time: a peer that refuses us is tried every 2 s.
                    level = logger.debug if self._why == told else logger.warning
                    level("control connection to %s: %s", self.name, self._why)
                    told = self._why
                except Exception:
                    logger.exception("the control connection to %s failed", self.name)
                if self._welcomed:
                    told = ""
                    pauses.reset()
                else:
                    self._known.set()
                if not self.again() or self._unneeded():
                    return
                await asyncio.sleep(pauses.next())
        finally:
            self._is_over()

    def _is_over(self) -> None:
        self._known.set()
        if not self.over:
            self.over = True
            self.on_over()

    async def _connect(self) -> None:
        """Dial, and let messages in until the connection ends. Raises the reason why it has."""
        host, port = split_address(self._address)
        keeping: asyncio.Task[None] | None = None
        channel: Channel | None = None
        try:
            async with asyncio.timeout(self._dial_s):
                channel = await dial(host, port)
                welcome = await self._greet(channel)
            self._channel = channel
            self.on_welcome(welcome)
            self._welcomed, self._silent = True, False
            self._known.set()
            keeping = asyncio.create_task(self._keep_alive(channel))
            await channel.hear(self.heard, self._on_message)
        finally:
            if keeping is not None:
                keeping.cancel()
            if self._welcomed and not (self._silent or self.over):
                self._known.clear()  # it is dialled again at once, which is worth waiting for
            self._channel = None
            if channel is not None:
                channel.close()
            for answer in self._questions.values():
                if not answer.done():
                    answer.set_exception(ConnectionLost(f"lost worker {self.name}"))
            if self._welcomed:
                self.on_lost()

    async def _greet(self, channel: Channel) -> Welcome:
        try:
            await introduce(channel, self._key, self.greeting())
            first: Any = await channel.read(self.heard)
        except EOFError:
            raise PeerUnavailable(
                "it ended the connection without a welcome; its log says why"
            ) from None
        if isinstance(first, Goodbye):
            raise PeerUnavailable(f"refused: {first.reason}")
        if not isinstance(first, Welcome):
            raise BadMessage("no welcome")
        if first.decode_instance != self.name:
            raise PeerUnavailable(f"its address is now used by {first.decode_instance}")
        return first

    def _on_message(self, message: Any) -> None:
        self._heard_at = self._loop.time()
        if (rid := getattr(message, "rid", None)) is None:
            self.on_message(message)
            return
        answer = self._questions.get(rid)
        if answer is None or answer.done():
            self.on_unwanted(message)
        else:
            answer.set_result(message)

    async def _keep_alive(self, channel: Channel) -> None:
        """Send pings. End the connection if the peer is silent, or if nothing needs it."""
        # A peer that is stopped or cut off keeps its socket. So a worker that dials sends a ping,
        # which the other end returns. Each end treats the other as gone after SILENT_S of silence:
        # a stall of SILENT_S - ALIVE_INTERVAL_S is forgiven.
        now = self._heard_at = self._loop.time()
        while True:
            if (ping := self.ping()) is not None:
                channel.write(ping)
            before = now
            await asyncio.sleep(ALIVE_INTERVAL_S)
            now = self._loop.time()
            if self._unneeded():
                self.end()
                return
            if now - before > 2 * ALIVE_INTERVAL_S:
                self._heard_at = now  # we did not run either: what it said waits to be read
            elif ping is not None and now - self._heard_at > SILENT_S:
                self._why = f"it said nothing for {SILENT_S:.0f} s"
                logger.warning("ending the control connection to %s: %s", self.name, self._why)
                self._silent = True
                self.on_silent()
                channel.abort()
                return

    def _unneeded(self) -> bool:
        """Whether nothing has needed this link for IDLE_S."""
        now = self._loop.time()
        if self._questions or self.needed():
            self._needed_at = now
            return False
        return now - self._needed_at >= IDLE_S
