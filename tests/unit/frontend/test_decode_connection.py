"""A connection to a decode worker that breaks at the worst moments, or brings anything."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import strategies as st

from pullfill import wire
from pullfill.engine import front_wire
from pullfill.errors import BadMessage
from pullfill.frontend.decode_connection import ConnectionState, DecodeConnection
from tests.support.frontend_rig import FakeDecode, rig
from tests.support.fuzz import EXAMPLES, explore, mutated
from tests.support.proxy import Proxy
from tests.support.said import blank
from tests.support.waiting import soon
from tests.support.workers import record

LATE = blank(front_wire.LoadReport, running=9)


def behind(proxy: Proxy, worker: FakeDecode) -> wire.WorkerRecord:
    """The record of a worker that is reached through the proxy."""
    return msgspec.structs.replace(worker.record, data=f"tcp://{proxy.address}")


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", 1)) as proxy:  # nobody is there
        yield proxy


async def test_a_hello_lost_in_flight_is_sent_again(proxy: Proxy) -> None:
    """Also after a handshake that failed, which alone is for ZMQ to try again."""
    worker = FakeDecode("decode-1")  # reads nothing before it is started
    async with rig() as r:
        r.directory.put(behind(proxy, worker))
        await soon(lambda: any("handshake" in line for line in r.pool.refusals()))
        proxy.target = ("127.0.0.1", worker.port)
        await soon(lambda: not r.pool.refusals())
        before = proxy.accepted
        proxy.reset()
        await soon(lambda: proxy.accepted > before)
        worker.start()
        await r.ready(1)
    worker.die()


async def test_nothing_counts_that_comes_after_a_break_went_unnoticed(proxy: Proxy) -> None:
    """ZMQ has connected again before the busy loop knows, and messages are missing."""
    worker = FakeDecode("decode-1", hold=True).start()
    proxy.target = ("127.0.0.1", worker.port)

    def be_busy() -> None:
        proxy.reset()
        while proxy.accepted < 2:
            time.sleep(0.01)
        time.sleep(0.3)
        worker.send_raw(front_wire.LOAD, msgspec.msgpack.encode(LATE))
        time.sleep(0.3)

    async with rig() as r:
        r.directory.put(behind(proxy, worker))
        await r.ready(1)
        view = r.dispatcher.balancer.placer.join("decode-1")
        be_busy()
        await soon(lambda: r.sink.gone == ["decode-1"] or view.told == LATE)
        assert view.told != LATE
    worker.die()


KINDS = [value for value in vars(front_wire).values() if isinstance(value, bytes)]


class _Owner:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@EXAMPLES
@pytest.mark.essential
async def test_any_message_of_a_decode_worker_leaves_the_frontend_alive(examples: int) -> None:
    context: zmq.Context[Any] = zmq.Context()
    hello = blank(front_wire.FrontendHello, frontend_instance="f", model="m")
    welcome = blank(front_wire.DecodeWelcome, decode_instance="decode-1", max_model_len=1)
    at = record("decode-1", data="tcp://127.0.0.1:1")
    link = DecodeConnection(context, at, hello, _Owner())
    valid = [wire.encode(welcome), wire.encode(hello), front_wire.encode_list(["r"]), b"reason"]

    def arrive(messages: list[tuple[bytes, list[bytes]]]) -> None:
        for kind, payload in messages:
            with contextlib.suppress(BadMessage):
                link._handle(kind, [zmq.Frame(part) for part in payload])

    message = st.tuples(
        st.one_of(st.sampled_from(KINDS), st.binary(max_size=5)),
        st.lists(mutated(valid), max_size=3),
    )
    try:
        explore(examples, arrive, messages=st.lists(message, max_size=5))
        await asyncio.sleep(0)
        assert link.state in ConnectionState
    finally:
        link.close()
        context.destroy(0)
