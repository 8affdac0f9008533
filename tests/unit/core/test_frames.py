"""Frames on the control channel: what is read back, and what is refused."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pullfill.errors import BadMessage, OtherVersion
from pullfill.net import frames
from pullfill.net.channel import Channel
from pullfill.wire import WIRE_VERSION, DrainAck, Hello, ToDecode, encode
from tests.support import framing
from tests.support.listening import listening


def channel_of(data: bytes) -> Channel:
    """That received this, and then the end."""
    return framing.channel_of(data)[0]


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


HELLO = Hello(prefill_instance="p", compat="c")
QUIET = DrainAck()


async def test_messages_come_out_as_they_went_in_however_they_are_cut() -> None:
    channel, _ = framing.channel_of()
    data = frame(encode(HELLO)) + frame(encode(QUIET))
    reading = asyncio.ensure_future(channel.read(Hello))
    for i in range(len(data)):
        await asyncio.sleep(0)
        channel.data_received(data[i : i + 1])
    channel.connection_lost(None)
    assert await reading == HELLO
    assert await channel.read(ToDecode) == QUIET  # type: ignore[arg-type]
    with pytest.raises(EOFError):
        await channel.read(Hello)


async def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    """Only the length is there: waiting for the body would be the bug."""
    channel, _ = framing.channel_of()
    channel.data_received(struct.pack("<I", frames.MAX_FRAME + 1))
    with pytest.raises(BadMessage, match="bytes"):
        await asyncio.wait_for(channel.read(Hello), 10)


async def test_another_version_is_refused() -> None:
    text = encode(HELLO)
    version = b"\xa1v" + bytes([WIRE_VERSION])
    assert version in text
    with pytest.raises(OtherVersion, match="99"):
        await channel_of(frame(text.replace(version, b"\xa1v\x63"))).read(Hello)


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_ended_never_anything_else(data: bytes) -> None:
    async def go() -> None:
        channel = channel_of(data)
        while True:
            await channel.read(ToDecode)  # type: ignore[arg-type]

    with pytest.raises((BadMessage, EOFError)):
        asyncio.run(go())


@pytest.mark.parametrize("address", ["", "tcp://", "tcp://h", "tcp://:1", "h:x", "tcp://h:"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(BadMessage):
        frames.split_address(address)


@pytest.mark.essential
def test_addresses() -> None:
    assert frames.split_address("tcp://127.0.0.1:80") == ("127.0.0.1", 80)
    assert frames.split_address("tcp://[::1]:80") == ("::1", 80), "no name resolver takes brackets"


async def test_what_is_written_in_one_turn_of_the_loop_leaves_in_one_piece() -> None:
    """A write wakes somebody else; that is most of what a message costs."""
    channel, wire = framing.channel_of()
    for _ in range(3):
        channel.write(QUIET)
    assert wire.pieces == []
    await asyncio.sleep(0)
    assert wire.pieces == [3 * frame(encode(QUIET))]
    channel.write(QUIET)
    channel.close()
    await asyncio.sleep(0)
    assert wire.pieces[1:] == [frame(encode(QUIET))], "what was said before the end is said"
    channel.write(QUIET)
    channel.abort()
    await asyncio.sleep(0)
    assert wire.pieces[2:] == []
    assert wire.aborted


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 10_000])
async def test_messages_are_handled_as_they_arrive_however_they_are_cut(size: int) -> None:
    """They are handled in the callback that received their last byte. Replies are sent in one
    piece."""
    channel, wire = framing.channel_of()
    heard: list[Any] = []

    def answer(message: Any) -> None:
        heard.append(message)
        channel.write(QUIET)

    sent = [HELLO, QUIET, HELLO]
    data = b"".join(frame(encode(message)) for message in sent)
    channel.hear(ToDecode, answer)
    for begin in range(0, len(data), size):
        before = len(wire.pieces)
        channel.data_received(data[begin : begin + size])
        assert len(wire.pieces) <= before + 1
        assert sum(map(len, wire.pieces)) == len(heard) * len(frame(encode(QUIET)))
    assert heard == sent


@pytest.mark.parametrize(
    "bad",
    [frame(b"\xc1"), struct.pack("<I", frames.MAX_FRAME + 1)],
    ids=["unreadable", "too long"],
)
async def test_a_strange_frame_ends_the_connection_and_nothing_behind_it_counts(bad: bytes) -> None:
    channel, wire = framing.channel_of()
    heard: list[Any] = []

    def answer(message: Any) -> None:
        heard.append(message)
        channel.write(QUIET)

    channel.hear(ToDecode, answer)
    channel.data_received(frame(encode(HELLO)) + bad + frame(encode(HELLO)))
    assert heard == [HELLO]
    assert wire.pieces == [frame(encode(QUIET))], "what was asked before it is answered"
    assert wire.closed
    channel.data_received(frame(encode(HELLO)))
    assert heard == [HELLO]
    channel.connection_lost(None)
    with pytest.raises(BadMessage):
        await channel.ended()


async def test_nothing_is_handled_after_an_abort() -> None:
    channel, _ = framing.channel_of()
    heard: list[Any] = []

    def leave(message: Any) -> None:
        heard.append(message)
        channel.abort()

    channel.hear(ToDecode, leave)
    channel.data_received(2 * frame(encode(HELLO)))
    channel.data_received(frame(encode(HELLO)))
    assert heard == [HELLO]
    channel.connection_lost(None)
    with pytest.raises(EOFError):
        await channel.ended()


async def test_who_says_too_much_before_it_is_listened_to_is_not_read() -> None:
    """So a peer cannot fill our memory. Reading goes on once somebody reads the channel."""
    channel, wire = framing.channel_of()
    while not wire.paused:
        channel.data_received(frame(encode(QUIET)))
        assert channel._arrived.size < 3 << 20
    heard: list[Any] = []
    channel.hear(ToDecode, heard.append)
    assert not wire.paused
    assert len(heard) > 10_000


async def test_a_peer_that_stands_still_for_a_moment_gets_large_messages() -> None:
    """Two grants with images were too much: the message after them ended the connection."""
    go = asyncio.Event()
    sizes = [frames.MAX_FRAME // 2, frames.MAX_FRAME // 2, 1]
    got: asyncio.Queue[int] = asyncio.Queue()

    async def reads_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        for _ in sizes:
            got.put_nowait(len(await framing.read_body(reader)))
        writer.close()

    async with listening(reads_late) as address:
        _, writer = await asyncio.open_connection(*address)
        for size in sizes:
            framing.write_body(writer, bytes(size))
        go.set()
        assert [await asyncio.wait_for(got.get(), 10) for _ in sizes] == sizes
        writer.close()


async def test_a_peer_that_reads_nothing_gets_a_broken_connection() -> None:
    """What waits for it is bounded, and nobody who writes ever waits."""
    over = asyncio.Event()

    async def never_reads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.transport.abort()

    async with listening(never_reads) as address:
        reader, writer = await asyncio.open_connection(*address)
        try:
            sent = 0
            while not writer.transport.is_closing():
                framing.write_body(writer, bytes(1 << 20))
                waiting = writer.transport.get_write_buffer_size()
                assert waiting <= frames.MAX_BACKLOG + (1 << 20) + 4
                sent += 1
                assert sent < 200
            with pytest.raises(EOFError):
                await asyncio.wait_for(framing.read(reader, Hello), 10)
        finally:
            over.set()
            writer.transport.abort()
