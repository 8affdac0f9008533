"""Frames on the control channel: what is read back, and what is refused."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest

from pullfill.errors import BadMessage
from pullfill.net.channel import MAX_BACKLOG, MAX_FRAME, split_address
from pullfill.wire import DrainAck, Hello, ToDecode, Trial, encode
from tests.support import framing
from tests.support.framing import frame

HELLO = Hello(prefill_instance="p", compat="c")
QUIET = DrainAck()


async def test_messages_come_out_as_they_went_in_however_they_are_cut() -> None:
    channel, reader, _ = framing.channel_of()
    data = frame(encode(HELLO)) + frame(encode(QUIET))
    reading = asyncio.ensure_future(channel.read(Hello))
    for i in range(len(data)):
        await asyncio.sleep(0)
        reader.feed_data(data[i : i + 1])
    reader.feed_eof()
    assert await reading == HELLO
    assert await channel.read(ToDecode) == QUIET  # type: ignore[arg-type]
    with pytest.raises(EOFError, match="it closed the connection"):
        await channel.read(Hello)


async def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    """Only the length is there: waiting for the body would be the bug."""
    channel, _, _ = framing.channel_of(struct.pack("<I", 101))
    with pytest.raises(BadMessage, match="101 bytes"):
        await asyncio.wait_for(channel.read(Hello, 100), 10)


@pytest.mark.essential
def test_addresses() -> None:
    assert split_address("tcp://127.0.0.1:80") == ("127.0.0.1", 80)
    assert split_address("tcp://[::1]:80") == ("::1", 80), "no name resolver takes brackets"
    for address in ("", "tcp://", "tcp://h", "tcp://:1", "h:x", "tcp://h:"):
        with pytest.raises(BadMessage):
            split_address(address)


@pytest.mark.parametrize(
    "bad",
    [frame(b"\xc1"), struct.pack("<I", MAX_FRAME + 1)],
    ids=["unreadable", "too long"],
)
async def test_a_strange_frame_ends_the_connection_and_nothing_behind_it_counts(bad: bytes) -> None:
    said = frame(encode(HELLO)) + bad + frame(encode(HELLO))
    channel, _, wire = framing.channel_of(said)
    heard: list[Any] = []

    def answer(message: Any) -> None:
        heard.append(message)
        channel.write(QUIET)

    with pytest.raises(BadMessage):
        await channel.hear(ToDecode, answer)
    assert heard == [HELLO]
    assert wire.pieces == [frame(encode(QUIET))], "what was asked before it is answered"


async def test_nothing_is_handled_after_an_abort() -> None:
    channel, _, _ = framing.channel_of(2 * frame(encode(HELLO)))
    heard: list[Any] = []

    def leave(message: Any) -> None:
        heard.append(message)
        channel.abort()

    with pytest.raises(EOFError):
        await channel.hear(ToDecode, leave)
    assert heard == [HELLO]


async def test_a_peer_that_reads_nothing_gets_a_broken_connection() -> None:
    """What waits for it is bounded, and nobody who writes ever waits. Large messages fit."""
    channel, _, wire = framing.channel_of()
    while not wire.closed:
        wire.waiting = sum(map(len, wire.pieces))
        channel.write(Trial(job=bytes(MAX_FRAME - 100)))
    assert MAX_BACKLOG < wire.waiting < MAX_BACKLOG + MAX_FRAME
    channel.write(QUIET)
