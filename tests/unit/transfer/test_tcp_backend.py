"""The payload on a socket, in pieces of every size; and the link under it."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pullfill.errors import BadMessage
from pullfill.transfer.runs import Iovec
from pullfill.transfer.stream.kv_protocol import SocketConnection
from pullfill.transfer.stream.tcp_backend import TcpBackend
from tests.support.transfer_rigs import random_bytes

Pair = tuple[SocketConnection, SocketConnection]


@pytest.fixture
def links() -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        there = socket.create_connection(listening.getsockname())
        here, _ = listening.accept()
    made = SocketConnection(here, 20.0), SocketConnection(there, 20.0)
    yield made
    for link in made:
        link.close()
        link.close()


def runs_over(data: np.ndarray, sizes: list[int]) -> Iovec:
    """`data` cut into these sizes, each piece followed by a byte that is no one's."""
    starts = np.cumsum([0, *(n + 1 for n in sizes)])[:-1] + data.ctypes.data
    iovec = np.stack([starts.astype(np.uint64), np.array(sizes, np.uint64)], axis=1)
    return np.ascontiguousarray(iovec)


def gather(data: np.ndarray, sizes: list[int]) -> bytes:
    starts = np.cumsum([0, *(n + 1 for n in sizes)])[:-1]
    return b"".join(data[s : s + n].tobytes() for s, n in zip(starts, sizes, strict=True))


def test_a_move_that_is_done_in_parts_goes_on_where_it_stopped(links: Pair) -> None:
    """The kernel may move less than asked for: after a signal, or its timeout."""
    here, there = map(TcpBackend, links)
    source, target = random_bytes(300, 7), np.zeros(300, np.uint8)
    sizes = [3, 70, 1, 100, 26]
    there.send(np.array([[source.ctypes.data, 200]], np.uint64))

    def at_most_eleven(fd: int, header: Any, flags: int) -> int:
        address, nbytes = (ctypes.c_uint64 * 2).from_address(header._obj.iov)
        got = os.read(fd, min(11, nbytes))
        ctypes.memmove(address, got, len(got))
        return len(got)

    here._move(at_most_eleven, 0, runs_over(target, sizes))
    assert gather(target, sizes) == source[:200].tobytes()


def test_a_frame_that_is_too_long_takes_no_memory(links: Pair) -> None:
    here, there = links
    there.mark(struct.pack("<I", 2**32 - 1))
    with pytest.raises(BadMessage, match="4294967295"):
        here.receive()


def test_last_words_are_heard_although_nobody_listens_any_more(links: Pair) -> None:
    here, there = links
    there.mark(bytes(1 << 16))  # never read by the other end
    here.send(b"farewell")
    closer = threading.Thread(target=lambda: (here.linger(), here.close()))
    closer.start()
    assert there.receive() == b"farewell"
    there.close()
    closer.join(20)
