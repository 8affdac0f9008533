"""Length-prefixed messages over a TCP stream: the control channel between workers.

A frame is a u32 little-endian length and that many bytes. TCP tells at once when a process dies,
which is what hands a dead prefill worker's jobs on within milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Sequence

from pullfill.errors import BadMessage

MAX_FRAME = 16 << 20
MAX_BACKLOG = 4 << 20
"""Bytes that may wait for a peer that does not read; one more message then ends the connection."""
_LENGTH = struct.Struct("<I")


async def read_body(reader: asyncio.StreamReader, limit: int = MAX_FRAME) -> bytes:
    """The next frame, at most `limit` bytes. What was announced takes memory only as it arrives.
    Raises EOFError when the peer is gone, BadMessage on a frame that is too long."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > limit:
            raise BadMessage(f"a frame of {length} bytes (at most {limit})")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError, OSError) as exc:
        raise EOFError(str(exc)) from exc


def write_body(writer: asyncio.StreamWriter, body: bytes) -> None:
    """Queue one frame for sending: as `write_bodies`."""
    write_bodies(writer, (body,))


def write_bodies(writer: asyncio.StreamWriter, bodies: Sequence[bytes]) -> None:
    """Queue a frame of each for sending, as one write; never blocks. A broken connection shows at
    the reader, and a peer that does not read what it is sent gets a broken connection."""
    with contextlib.suppress(ConnectionError, OSError, RuntimeError):
        if writer.transport.get_write_buffer_size() > MAX_BACKLOG:
            writer.transport.abort()
            return
        writer.write(b"".join([_LENGTH.pack(len(body)) + body for body in bodies]))


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
