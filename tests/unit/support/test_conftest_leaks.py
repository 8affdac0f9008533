"""A test that leaves a socket open fails itself, not a later one (conftest.py)."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Iterator

import pytest


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def connected(server: socket.socket) -> tuple[asyncio.AbstractEventLoop, asyncio.BaseTransport]:
    loop = asyncio.new_event_loop()
    connecting = loop.create_connection(asyncio.Protocol, *server.getsockname())
    return loop, loop.run_until_complete(connecting)[0]


def test_a_socket_that_stays_open_is_told_when_the_loop_ends(server: socket.socket) -> None:
    loop, _ = connected(server)
    with pytest.raises(AssertionError, match=r"open sockets.*_SelectorSocketTransport.*raddr"):
        loop.close()
    assert loop.is_closed()
    gc.collect()  # told once: warnings are errors


def test_one_that_is_closed_last_gets_the_turn_it_needs(server: socket.socket) -> None:
    loop, transport = connected(server)
    transport.close()
    loop.close()
    gc.collect()
