"""One connection of the control channel, plain or sealed with the cluster key.

Life: `dial`, or `listen` for each new connection -> `introduce` (who dialled) and `accept` (decode
worker) open it, with `read` and `write` -> `hear` handles messages until the connection ends.
`close` or `abort` ends it.

A frame is a u32 little-endian length and that many bytes. With a cluster key each end first proves
to the other that it holds the key (`handshake.py`), and from then on every frame carries a seal.
Messages are not encrypted: they hold IDs and block numbers, but no prompt and no KV.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, Never, TypeVar, cast

import msgspec

from pullfill.errors import AuthFailed, BadMessage, PeerUnavailable
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

logger = log.get("net.channel")
T = TypeVar("T")

MAX_FRAME = 16 << 20
# Bytes that may wait until the peer reads them. If more are waiting, the next message ends the
# connection. The largest messages fit several times, because a peer may not read for a moment.
MAX_BACKLOG = 4 * MAX_FRAME
# Bytes of a frame from somebody who has not said who it is.
FIRST_FRAME = 64 << 10
# Bytes of a frame with a `Hello`. It describes the memory of each rank, in about 500 bytes.
HELLO_FRAME = 2 << 20
# Reading from the socket pauses while twice as many bytes wait to be handled.
_AHEAD = 1 << 20
_LENGTH = struct.Struct("<I")
# A peer that is cut off counts as gone after so long.
_DEAD_AFTER_S = 10


class Channel:
    """See the module. Owns the streams.

    peer: the other end's address, for logs."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            tune(sock)
        self._reader, self._writer = reader, writer
        self._in: Seal | None = None
        self._out: Seal | None = None
        self._aborted = False
        name = writer.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name)

    async def read(self, kind: type[T], limit: int = MAX_FRAME) -> T:
        """Return the next message. One caller at a time.

        Raises EOFError if the connection has ended, AuthFailed on a wrong seal, BadMessage on a
        message that cannot be decoded. Close the connection after any of them."""
        return decode(await self._frame(limit), kind)

    async def hear(self, kind: Any, handler: Callable[[Any], object]) -> Never:
        """Call `handler` with each message, until the connection ends.

        Raises the reason: as `read`, or what the handler raised. Close the connection then."""
        while True:
            handler(await self.read(kind))

    async def _frame(self, limit: int) -> bytes:
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            # As soon as its length has arrived: memory is used only for what came.
            if length > limit:
                raise BadMessage(f"a frame of {length} bytes (at most {limit})")
            body = await self._reader.readexactly(length)
        except asyncio.IncompleteReadError as exc:  # its text counts bytes, and is shown to people
            raise EOFError("it closed the connection") from exc
        except OSError as exc:
            raise EOFError(str(exc)) from exc
        if self._aborted:
            raise EOFError("ended here")
        return body if self._in is None else self._in.remove(body)

    def write(self, message: msgspec.Struct) -> None:
        """Send one message. Never blocks, and never raises on a broken connection."""
        body = encode(message)
        if self._out is not None:
            body = self._out.add(body)
        if self.backlog > MAX_BACKLOG:
            logger.warning(
                "ended the connection to %s: it has not read the last %d MiB",
                self.peer,
                MAX_BACKLOG >> 20,
            )
            self.abort()
        elif not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(body)) + body)

    @property
    def backlog(self) -> int:
        """Number of bytes that wait to be sent."""
        return self._writer.transport.get_write_buffer_size()

    def seal(self, *, incoming: bytes, outgoing: bytes) -> None:
        """Seal all frames from the next one on, in both directions."""
        self._in, self._out = Seal(incoming), Seal(outgoing)

    def close(self) -> None:
        """Send what is queued, then end."""
        self._writer.close()

    def abort(self) -> None:
        """Close at once. Messages that have arrived but were not handled are dropped."""
        self._aborted = True
        self._writer.transport.abort()


def tune(sock: socket.socket) -> None:
    """Send each message at once, and notice a host that answers nothing any more."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_AFTER_S // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _DEAD_AFTER_S // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    # Keep-alives rest while sent bytes wait for their acknowledgement.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _DEAD_AFTER_S)


async def dial(host: str, port: int) -> Channel:
    """Raises OSError."""
    return Channel(*await asyncio.open_connection(host, port, limit=_AHEAD))


async def listen(opened: Callable[[Channel], None], host: str, port: int) -> asyncio.Server:
    """Call `opened` with each new connection. Raises OSError."""

    def made(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened(Channel(reader, writer))

    return await asyncio.start_server(made, host, port, limit=_AHEAD)


def split_address(address: str) -> tuple[str, int]:
    """Return (host, port) of `tcp://host:port`, an IPv6 address without its brackets. Raises
    BadMessage."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit():
        raise BadMessage(f"not a tcp://host:port address: {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


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
    peer's reason), EOFError, BadMessage."""
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
