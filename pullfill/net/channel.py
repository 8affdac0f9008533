"""One connection of the control channel, plain or sealed with the cluster key.

Life: the loop makes it for a new connection. `accept` (decode worker) or `introduce` (prefill
worker) opens it, with `read` and `write`. From `hear` on, each message is handled in the callback
that received its bytes. A task that reads costs two more turns of the loop for each message.
`close` or `abort` ends it, and `ended` tells why.

With a cluster key each end first proves to the other that it holds the key (`handshake.py`). From
then on every frame carries a seal. Messages are not encrypted: they hold IDs and block numbers, but
no prompt and no KV.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec

from pullfill.errors import AuthFailed, ConfigError, PeerUnavailable
from pullfill.net import frames
from pullfill.net.handshake import CONTROL, Acceptance, Introduction, Seal
from pullfill.net.security import ClusterKey
from pullfill.runtime import log
from pullfill.wire import (
    AuthChallenge,
    AuthHello,
    AuthProof,
    Goodbye,
    Hello,
    LeaseHello,
    decode,
    encode,
)
from pullfill.wire.codec import decoder

logger = log.get("net.channel")
T = TypeVar("T")

FIRST_FRAME = 64 << 10
"""Bytes of a frame from somebody who has not said who it is."""
HELLO_FRAME = 2 << 20
"""Bytes of a frame with a `Hello`. It describes the memory of each rank, in about 800 bytes."""
_AHEAD = HELLO_FRAME + (64 << 10)
"""Received bytes that are buffered at most before `read` or `hear` takes them."""
_AT_ONCE = 64 << 10
"""Bytes that do not wait for the end of a turn of the loop."""
_LARGE = 1 << 20
"""Messages of so many bytes are sealed on a thread, and so are their seals checked. Both take over
1 ms for each MiB. Later messages wait for that."""


class Channel(asyncio.Protocol):
    """See the module.

    opened: called once the channel is connected.
    peer: the other end's address, for logs."""

    def __init__(self, opened: Callable[[Channel], object] = lambda _: None) -> None:
        self._loop = asyncio.get_running_loop()
        self._opened = opened
        self._transport: asyncio.Transport
        self._in: Seal | None = None
        self._out: Seal | None = None
        self._arrived = frames.Cutter()
        self._paused = False
        self._more: asyncio.Future[None] | None = None
        self._decode: Callable[[bytes], Any]
        self._handler: Callable[[Any], object] | None = None
        self._handling = self._checking = self._sealing = self._closing = False
        self._waiting: list[bytes] = []
        self._size = 0
        self._why: Exception | None = None
        self._lost: Exception | None = None
        self._ended = asyncio.Event()
        self.peer = "?"

    # ------------------------------------------------------------------ called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        frames.tune(transport)
        self._transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name)
        self._opened(self)

    def data_received(self, data: bytes) -> None:
        if self._why is not None:
            return
        self._arrived.feed(data)
        if self._handler is not None:
            self._handle()
            return
        if self._arrived.size > _AHEAD and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        """Send what is queued. The transport closes itself after this."""
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._checking:  # what has arrived is handled first
            self._lost = exc or EOFError("")
            return
        self._why = self._why or EOFError(str(exc or ""))
        self._ended.set()
        self._wake()

    # ------------------------------------------------------------------ in

    async def read(self, kind: type[T], limit: int = frames.MAX_FRAME) -> T:
        """Return the next message. One caller at a time, and only before `hear`.

        Raises EOFError if the peer has closed, AuthFailed on a wrong seal, BadMessage on a message
        that cannot be decoded. Close the connection after any of them."""
        while (body := self._arrived.cut(limit)) is None:
            if self._why is not None:
                raise self._why
            if self._paused:
                self._paused = False
                self._transport.resume_reading()
            self._more = self._loop.create_future()
            await self._more
        return decode(self._unsealed(body), kind)

    def hear(self, kind: Any, handler: Callable[[Any], object]) -> None:
        """Call `handler` with each message that arrives from now on.

        An error of the handler, or one that `read` would raise, closes the connection. `ended` then
        raises it."""
        self._decode, self._handler = decoder(kind), handler
        if self._paused:
            self._transport.resume_reading()
        self._handle()

    async def ended(self) -> None:
        """Wait until the connection has ended, then raise the reason.

        That is an error as of `read`, or the one that the handler raised."""
        await self._ended.wait()
        assert self._why is not None
        raise self._why

    def _handle(self, checked: asyncio.Future[bytes] | None = None) -> None:
        """Handle all messages that have arrived. The replies are sent in one piece.

        checked: a message whose seal was checked on a thread. It comes first."""
        assert self._handler is not None
        self._checking &= checked is None
        if self._checking:
            return
        self._handling = True
        try:
            if checked is not None and self._why is None:
                self._handler(self._decode(checked.result()))
            while (body := self._arrived.cut(frames.MAX_FRAME)) is not None and self._why is None:
                if self._in is not None and len(body) >= _LARGE:
                    self._checking = True
                    checking = self._loop.run_in_executor(None, self._in.remove, body)
                    checking.add_done_callback(self._handle)
                    break
                self._handler(self._decode(self._unsealed(body)))
        except Exception as exc:
            self._why = self._why or exc
            self.close()
        finally:
            self._handling = False
        if self._waiting:
            self._send()
        if self._lost is not None:
            self.connection_lost(self._lost)

    def _unsealed(self, body: bytes) -> bytes:
        return body if self._in is None else self._in.remove(body)

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    # ------------------------------------------------------------------ out

    def write(self, message: msgspec.Struct, *, now: bool = False) -> None:
        """Queue one message for sending. Never blocks, and never raises on a broken connection.

        The messages of one turn of the event loop are sent at its end, in one piece.

        now: send at once."""
        body = encode(message)
        if not self._waiting and not self._handling and not now:
            self._loop.call_soon(self._send)
        self._waiting.append(body)
        self._size += len(body)
        if now or self._size > _AT_ONCE:
            self._send()

    def _send(self) -> None:
        if self._sealing:
            return
        waiting, self._waiting = self._waiting, []
        if self._size >= _LARGE:
            self._sealing = True
            framed = self._loop.run_in_executor(None, self._framed, waiting)
            framed.add_done_callback(self._sealed)
        elif waiting:
            self._size = 0
            self._put(self._framed(waiting))

    def _framed(self, bodies: list[bytes]) -> bytes:
        return frames.join(bodies if self._out is None else [*map(self._out.add, bodies)])

    def _sealed(self, framed: asyncio.Future[bytes]) -> None:
        self._sealing = False
        self._size = sum(map(len, self._waiting))
        self._put(framed.result())
        self._send()
        if self._closing:
            self.close()

    def _put(self, data: bytes) -> None:
        if not frames.write(self._transport, data):
            logger.warning(
                "ended the connection to %s: it has not read the last %d MiB",
                self.peer, frames.MAX_BACKLOG >> 20,
            )  # fmt: skip

    @property
    def backlog(self) -> int:
        """Number of bytes that wait to be sent."""
        return self._size + self._transport.get_write_buffer_size()

    def seal(self, *, incoming: bytes, outgoing: bytes) -> None:
        """Seal all frames from the next one on, in both directions."""
        self._send()
        self._in, self._out = Seal(incoming), Seal(outgoing)

    def close(self) -> None:
        """Send what is queued, then end."""
        self._send()
        self._closing = self._sealing
        if not self._closing:
            self._transport.close()

    def abort(self) -> None:
        """Close at once. Messages that have arrived but were not handled are dropped."""
        self._why = self._why or EOFError("ended here")
        self._waiting.clear()
        self._transport.abort()


# --------------------------------------------------------------------------- opening


async def accept(channel: Channel, key: ClusterKey | None) -> Hello | LeaseHello:
    """The decode worker's end. Returns the peer's hello, once it has proved that it holds `key`.

    A prefill worker sends `Hello`, another decode worker `LeaseHello`.

    Raises AuthFailed (its text may be told to the peer), EOFError, BadMessage. Has no time limit.
    """
    limit = HELLO_FRAME if key is None else FIRST_FRAME
    first: Any = await channel.read(AuthHello | Hello | LeaseHello, limit)  # type: ignore[arg-type]
    shake = Acceptance(key, CONTROL)
    if (challenge := shake.challenge(first)) is None:
        return cast(Hello | LeaseHello, first)
    channel.write(challenge)
    try:
        proof = await channel.read(AuthProof, FIRST_FRAME)
    except EOFError:
        assert key is not None
        raise AuthFailed(
            f"the prefill worker left when it was shown the proof of our cluster key "
            f"({key.fingerprint}): is its [cluster] key_file another?"
        ) from None
    incoming, outgoing = shake.check(proof)
    channel.seal(incoming=incoming, outgoing=outgoing)
    hello: Any = await channel.read(Hello | LeaseHello, HELLO_FRAME)  # type: ignore[arg-type]
    return cast(Hello | LeaseHello, hello)


async def introduce(channel: Channel, key: ClusterKey | None, hello: Hello | LeaseHello) -> None:
    """The connecting worker's end: prove that we hold `key`, check the peer's proof, send `hello`.

    Never falls back to a plain connection. Raises AuthFailed, PeerUnavailable (refused, with the
    peer's reason), ConfigError (the hello is longer than any decode worker takes), EOFError,
    BadMessage."""
    if (size := len(encode(hello)) + Seal.BYTES) > HELLO_FRAME:
        raise ConfigError(
            f"our {type(hello).__name__} has {size} bytes, for all our ranks; at most "
            f"{HELLO_FRAME} are taken"
        )
    if key is not None:
        shake = Introduction(key, CONTROL)
        channel.write(shake.hello)
        first: Any = await channel.read(AuthChallenge | Goodbye, FIRST_FRAME)  # type: ignore[arg-type]
        if isinstance(first, Goodbye):
            raise PeerUnavailable(f"refused: {first.reason}")
        proof, incoming, outgoing = shake.answer(first)
        channel.write(proof)
        channel.seal(incoming=incoming, outgoing=outgoing)
    channel.write(hello)
