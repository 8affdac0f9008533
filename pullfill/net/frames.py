"""Length-prefixed messages over a TCP stream: the control channel between workers.

A frame is a u32 little-endian length and that many bytes. TCP tells at once when a process dies,
so a dead prefill worker's jobs go to another one within milliseconds.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence

from pullfill.errors import BadMessage

MAX_FRAME = 16 << 20
MAX_BACKLOG = 4 * MAX_FRAME
"""Bytes that may wait until the peer reads them. If more are waiting, the next message ends the
connection. The largest messages fit several times, because a peer may not read for a moment."""
_LENGTH = struct.Struct("<I")


class Cutter:
    """Cuts the bytes of a stream into frames.

    Memory is used only for bytes that have arrived, not for the length that a frame announces."""

    __slots__ = ("_at", "_data", "_parts", "_wanted", "size")

    def __init__(self) -> None:
        self._data = b""
        self._at = 0
        self._parts: list[bytes] = []
        self._wanted = 0
        self.size = 0
        """Number of bytes that were fed and not cut yet."""

    def feed(self, data: bytes) -> None:
        """Add bytes that have arrived."""
        if self.size == 0:
            self._data, self._at = data, 0
        else:
            self._parts.append(data)
        self.size += len(data)

    def cut(self, limit: int = MAX_FRAME) -> bytes | None:
        """Return the next frame, or None if it has not arrived completely.

        Raises BadMessage if it has more than `limit` bytes, as soon as its length has arrived."""
        if self.size < max(self._wanted, _LENGTH.size):
            return None
        if self._parts:  # once for a frame that came in many pieces
            self._data = b"".join([self._data[self._at :], *self._parts])
            self._at = 0
            self._parts.clear()
        (length,) = _LENGTH.unpack_from(self._data, self._at)
        if length > limit:
            raise BadMessage(f"a frame of {length} bytes (at most {limit})")
        begin = self._at + _LENGTH.size
        if self.size < _LENGTH.size + length:
            self._wanted = _LENGTH.size + length
            return None
        self._wanted = 0
        self._at = begin + length
        self.size -= _LENGTH.size + length
        return self._data[begin : self._at]


def join(bodies: Sequence[bytes]) -> bytes:
    """Return a frame of each body."""
    return b"".join([part for body in bodies for part in (_LENGTH.pack(len(body)), body)])


def write(transport: asyncio.WriteTransport, data: bytes) -> bool:
    """Queue frames for sending. Never blocks or raises.

    Returns False if more than MAX_BACKLOG bytes wait for the peer. Then the connection is ended."""
    try:
        if transport.get_write_buffer_size() > MAX_BACKLOG:
            transport.abort()
            return False
        transport.write(data)
    except (OSError, RuntimeError):  # the transport has ended
        pass
    return True


def tune(transport: asyncio.BaseTransport, *, dead_after_s: float = 10.0) -> None:
    """No Nagle delay. A peer that is cut off counts as gone after `dead_after_s`."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(dead_after_s / 3)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(dead_after_s / 3)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(dead_after_s * 1000))


def split_address(address: str) -> tuple[str, int]:
    """Return (host, port) of `tcp://host:port`, an IPv6 address without its brackets. Raises
    BadMessage."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit():
        raise BadMessage(f"not a tcp://host:port address: {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)
