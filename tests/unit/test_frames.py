"""Frames on the control channel: what is read back, and what is refused."""

from __future__ import annotations

import asyncio
import struct
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pullfill import frames
from pullfill.channel import Channel
from pullfill.errors import BadMessage
from pullfill.wire import WIRE_VERSION, Hello, Quiet, ToDecode, encode
from tests.support import framing


def reader_of(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


HELLO = Hello(prefill_instance="p", host_id="h", compat="c", transports=["shm"])
QUIET = Quiet(job_id="j", attempt=1, incarnation="i")


async def test_messages_come_out_as_they_went_in_however_they_are_cut() -> None:
    data = frame(encode(HELLO)) + frame(encode(QUIET))
    reader = asyncio.StreamReader()
    reading = asyncio.ensure_future(framing.read(reader, Hello))
    for i in range(len(data)):
        reader.feed_data(data[i : i + 1])
        await asyncio.sleep(0)
    reader.feed_eof()
    assert await reading == HELLO
    assert await framing.read(reader, ToDecode) == QUIET  # type: ignore[arg-type]
    with pytest.raises(EOFError):
        await framing.read(reader, Hello)


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 20])
async def test_an_end_in_the_middle_is_an_end(cut: int) -> None:
    with pytest.raises(EOFError):
        await framing.read(reader_of(frame(encode(HELLO))[:cut]), Hello)


async def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    """Only the length is there: waiting for the body would be the bug."""
    reader = asyncio.StreamReader()
    reader.feed_data(struct.pack("<I", frames.MAX_FRAME + 1))
    with pytest.raises(BadMessage, match="bytes"):
        await asyncio.wait_for(framing.read(reader, Hello), 10)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", encode(QUIET), encode(HELLO) + b"\0"])
async def test_what_is_not_the_message_is_refused(body: bytes) -> None:
    with pytest.raises(BadMessage):
        await framing.read(reader_of(frame(body)), Hello)


async def test_another_version_or_an_unknown_field_is_refused() -> None:
    text = encode(HELLO)
    version = b"\xa1v" + bytes([WIRE_VERSION])
    assert version in text
    with pytest.raises(BadMessage):
        await framing.read(reader_of(frame(text.replace(version, b"\xa1v\x63"))), Hello)
    with pytest.raises(BadMessage):
        await framing.read(reader_of(frame(text.replace(version, b"\xa1w\x01"))), Hello)


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_ended_never_anything_else(data: bytes) -> None:
    async def go() -> None:
        reader = reader_of(data)
        while True:
            await framing.read(reader, ToDecode)  # type: ignore[arg-type]

    with pytest.raises((BadMessage, EOFError)):
        asyncio.run(go())


@pytest.mark.parametrize("address", ["", "tcp://", "tcp://h", "tcp://:1", "h:x", "tcp://h:"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(BadMessage):
        frames.split_address(address)


def test_addresses() -> None:
    assert frames.split_address("tcp://127.0.0.1:80") == ("127.0.0.1", 80)
    assert frames.split_address("tcp://[::1]:80")[1] == 80


async def test_what_is_written_in_one_turn_of_the_loop_leaves_in_one_piece() -> None:
    """A write wakes somebody else; that is most of what a message costs."""
    pieces: list[bytes] = []
    transport = SimpleNamespace(get_write_buffer_size=lambda: 0, abort=lambda: pieces.append(b"!"))
    writer: Any = SimpleNamespace(
        transport=transport, write=pieces.append, close=lambda: None, get_extra_info=lambda _: None
    )
    channel = Channel(asyncio.StreamReader(), writer)
    for _ in range(3):
        channel.write(QUIET)
    assert pieces == []
    await asyncio.sleep(0)
    assert pieces == [3 * frame(encode(QUIET))]
    channel.write(QUIET)
    channel.close()
    await asyncio.sleep(0)
    assert pieces[1:] == [frame(encode(QUIET))], "what was said before the end is said"
    channel.write(QUIET)
    channel.abort()
    await asyncio.sleep(0)
    assert pieces[2:] == [b"!"]


async def test_much_at_once_does_not_wait_for_the_end_of_the_turn() -> None:
    """So that what a peer does not read stays bounded within a turn too."""
    pieces: list[bytes] = []
    transport = SimpleNamespace(get_write_buffer_size=lambda: 0)
    writer: Any = SimpleNamespace(
        transport=transport, write=pieces.append, get_extra_info=lambda _: None
    )
    channel = Channel(asyncio.StreamReader(), writer)
    for _ in range(100):
        channel.write(Quiet(job_id="j" * 100, attempt=1, incarnation="i" * 4000))
    assert pieces
    assert max(map(len, pieces)) < 80_000
    await asyncio.sleep(0)
    assert sum(map(len, pieces)) > 400_000


async def test_a_peer_that_reads_nothing_gets_a_broken_connection() -> None:
    """What waits for it is bounded, and nobody who writes ever waits."""
    over = asyncio.Event()

    async def never_reads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.transport.abort()

    server = await asyncio.start_server(never_reads, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    try:
        sent = 0
        while not writer.transport.is_closing():
            frames.write_body(writer, bytes(1 << 20))
            waiting = writer.transport.get_write_buffer_size()
            assert waiting <= frames.MAX_BACKLOG + (1 << 20) + 4
            sent += 1
            assert sent < 200
        with pytest.raises(EOFError):
            await asyncio.wait_for(framing.read(reader, Hello), 10)
    finally:
        over.set()
        writer.transport.abort()
        server.close()
