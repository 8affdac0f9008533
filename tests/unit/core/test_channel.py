"""Frames on the control channel: what is read back, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from pullfill.errors import BadMessage
from pullfill.net.channel import MAX_BACKLOG, MAX_FRAME, split_address
from pullfill.wire import DrainAck, Hello, ToDecode, Trial, encode
from tests.support import framing
from tests.support.framing import frame

HELLO = Hello(prefill_instance="p", compat="c")
QUIET = DrainAck()


@pytest.mark.essential
def test_addresses() -> None:
    assert split_address("tcp://127.0.0.1:80") == ("127.0.0.1", 80)
    assert split_address("tcp://[::1]:80") == ("::1", 80), "no name resolver takes brackets"
    for address in ("", "tcp://", "tcp://h", "tcp://:1", "h:x", "tcp://h:"):
        with pytest.raises(BadMessage):
            split_address(address)


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
