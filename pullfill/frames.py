"""Length-prefixed messages over a TCP stream: the control channel between workers.

A frame is a u32 little-endian length and that many bytes. TCP tells at once when a process dies,
which is what hands a dead prefill worker's jobs on within milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TypeVar

import msgspec

from pullfill.errors import BadMessage
from pullfill.wire import decode, encode

MAX_FRAME = 16 << 20
_LENGTH = struct.Struct("<I")
T = TypeVar("T")


async def read(reader: asyncio.StreamReader, kind: type[T]) -> T:
    """The next message. Raises EOFError when the peer is gone, BadMessage on anything strange."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME:
            raise BadMessage(f"a frame of {length} bytes (at most {MAX_FRAME})")
        body = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError, OSError) as exc:
        raise EOFError(str(exc)) from exc
    return decode(body, kind)


def write(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    """Queue one message for sending; never blocks. A broken connection shows at the reader."""
    body = encode(message)
    with contextlib.suppress(ConnectionError, OSError, RuntimeError):
        writer.write(_LENGTH.pack(len(body)) + body)


def tune(writer: asyncio.StreamWriter, *, dead_after_s: float = 10.0) -> None:
    """No Nagle delay; a peer that is cut off (not closed) counts as gone after `dead_after_s`."""
    sock = writer.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(dead_after_s / 3)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(dead_after_s / 3)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(dead_after_s * 1000))


def split_address(address: str) -> tuple[str, int]:
    """`tcp://host:port` → (host, port). Raises BadMessage."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit():
        raise BadMessage(f"not a tcp://host:port address: {address!r}")
    return host, int(port)
