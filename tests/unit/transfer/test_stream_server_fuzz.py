"""Whatever arrives at a decode worker's KV port, its thread ends or goes on, the worker lives, and
no byte outside a live grant changes."""

from __future__ import annotations

import socket
import struct
import threading
from pathlib import Path

import pytest
from hypothesis import strategies as st

from pullfill.net.channel import split_address
from pullfill.transfer.contract import Direction
from pullfill.transfer.stream.kv_protocol import BATCH, Operation, StreamHello
from pullfill.wire import AuthHello, FenceToken, encode
from tests.support.framing import frame
from tests.support.fuzz import EXAMPLES, explore, mutated
from tests.support.transfer_rigs import DENSE, Region, tcp_rig
from tests.support.waiting import eventually

GRANTED = [1, 2, 3]


def valid_hello(region: Region) -> bytes:
    memory = region.memory
    return encode(
        StreamHello(
            instance_id="decode-1", incarnation="i1", rank=0, backend="tcp", nbytes=memory.nbytes,
            page_bytes=memory.layout.page_bytes, head=0, heads=2, layer=0, layers=3,
            batch_bytes=64 << 10,
        )
    )  # fmt: skip


def operation(token: FenceToken, verb: Direction, *blocks: int) -> bytes:
    ids = struct.pack(f"<{len(blocks)}I", *blocks)
    return encode(Operation(verb=verb, fence=token, blocks=ids))


def pour(region: Region, data: bytes) -> None:
    """Connect, say it all, leave."""
    host, port = split_address(region.descriptor.endpoints["tcp"])
    with socket.create_connection((host, port), 20) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        try:
            sock.sendall(data)
            sock.settimeout(0.002)
            sock.recv(65536)
        except OSError:
            pass


def check_alive(region: Region, before: bytes, threads: int) -> None:
    """All connections are over, and no block that was not granted has changed."""
    eventually(lambda: threading.active_count() <= threads, "a connection's thread did not end")
    now = region.pages.copy()
    now[:, GRANTED] = 0
    assert now.tobytes() == before


@EXAMPLES
@pytest.mark.essential
def test_any_bytes_at_the_kv_port(examples: int, tmp_path: Path) -> None:
    rig = tcp_rig(tmp_path)
    region, mine = rig.region(DENSE), rig.local(DENSE)
    token = region.owner.fences.open(GRANTED)
    region.pages[:, GRANTED] = 0
    before, threads = region.pages.tobytes(), threading.active_count()
    hello = valid_hello(region)
    write = operation(token, "write", *GRANTED)
    valid = [
        hello,
        write,
        operation(token, "read", *GRANTED),
        operation(token, "write", 3, 2, 1),
        operation(token, "write", 0, 39),
        operation(token, "write", 1, 2**32 - 1),
        operation(FenceToken(slot=2**40, epoch=1), "write", 1),
        encode(AuthHello(nonce=bytes(32))),
    ]
    raw = st.one_of(st.just(BATCH), st.binary(max_size=40), st.just(bytes(9216)))
    part = st.one_of(mutated(valid).map(frame), st.sampled_from(valid).map(frame), raw)
    rest = st.lists(part, max_size=5).map(b"".join)
    said = st.one_of(
        rest,
        rest.map(lambda tail: frame(hello) + tail),
        rest.map(lambda tail: frame(hello) + frame(write) + BATCH + tail),
    )
    try:
        explore(examples, lambda data: pour(region, data), data=said)
        check_alive(region, before, threads)
        session = rig.connect(mine, region)
        session.move("write", token, GRANTED, GRANTED)
        assert (region.pages[:, GRANTED] == mine.pages[:, GRANTED]).all()
    finally:
        rig.close()
