"""Plain messages over a stream, as a peer without a cluster key sends and reads them."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from pullfill import frames
from pullfill.wire import decode, encode

T = TypeVar("T")


async def read(reader: asyncio.StreamReader, kind: type[T]) -> T:
    """The next message. Raises EOFError, BadMessage."""
    return decode(await frames.read_body(reader), kind)


def write(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    """Queue one message."""
    frames.write_body(writer, encode(message))
