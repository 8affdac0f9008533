"""Plain messages over a stream, as a peer without a cluster key sends and reads them."""

from __future__ import annotations

import asyncio
import struct
from typing import TypeVar

import msgspec

from pullfill.errors import BadMessage
from pullfill.net.channel import MAX_FRAME, Channel
from pullfill.wire import decode, encode

T = TypeVar("T")


async def read_body(reader: asyncio.StreamReader) -> bytes:
    """The next frame. Raises EOFError, BadMessage."""
    try:
        (length,) = struct.unpack("<I", await reader.readexactly(4))
        if length > MAX_FRAME:
            raise BadMessage(f"a frame of {length} bytes")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError) as exc:
        raise EOFError(str(exc)) from exc


async def read(reader: asyncio.StreamReader, kind: type[T]) -> T:
    """The next message. Raises EOFError, BadMessage."""
    return decode(await read_body(reader), kind)


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def write_body(writer: asyncio.StreamWriter, body: bytes) -> None:
    """Queue one frame."""
    writer.write(frame(body))


def write(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    """Queue one message."""
    write_body(writer, encode(message))


class Wire:
    """A StreamWriter whose bytes go nowhere. pieces: what was written, each write by itself."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.pieces: list[bytes] = []
        self.closed = False
        self.waiting = 0
        self.transport = self
        self._reader = reader

    def get_extra_info(self, name: str) -> None:
        return None

    def write(self, data: bytes) -> None:
        self.pieces.append(data)

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def close(self) -> None:
        self.closed = True
        self._reader.feed_eof()

    abort = close


def channel_of(data: bytes = b"") -> tuple[Channel, asyncio.StreamReader, Wire]:
    """A channel that has received `data`, what brings it more, and where it writes to."""
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    wire = Wire(reader)
    return Channel(reader, wire), reader, wire  # type: ignore[arg-type]


def ended(data: bytes) -> Channel:
    """A channel that has received `data` and then the end."""
    channel, reader, _ = channel_of(data)
    reader.feed_eof()
    return channel
