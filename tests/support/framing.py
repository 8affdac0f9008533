"""Frames of the control channel as bytes, and channels without a socket."""

from __future__ import annotations

import asyncio
import struct

from pullfill.net.channel import Channel


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


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
