"""A connection to a decode worker that breaks at the worst moments, or brings anything."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import strategies as st

from pullfill import wire
from pullfill.engine import check, front_wire
from pullfill.errors import BadMessage
from pullfill.frontend.decode_connection import ConnectionState, DecodeConnection
from tests.support.fake_vllm import request
from tests.support.frontend_rig import FakeDecode, rig, until
from tests.support.fuzz import EXAMPLES, explore, mutated

LATE = front_wire.LoadReport(
    running=9, waiting=0, uncached_tokens_queued=0, active_blocks=0, free_blocks=0
)


class _Relay:
    """A TCP relay in threads of its own, so that it goes on while the event loop is busy.

    spoils: so many connections end within the handshake."""

    def __init__(self, port: int, spoils: int = 0) -> None:
        self._spoils = spoils
        self._far = ("127.0.0.1", port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.ends: list[socket.socket] = []
        self._threads = list[threading.Thread]()
        self._start(self._accept)

    def _start(self, run: Callable[..., None], *sockets: socket.socket) -> None:
        self._threads.append(threading.Thread(target=run, args=sockets, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._server.accept()[0]
                if self._spoils:
                    self._spoils -= 1
                    near.recv(10)
                    near.close()
                    continue
                far = socket.create_connection(self._far)
                self.ends += [near, far]
                for pair in ((near, far), (far, near)):
                    self._start(self._pump, *pair)

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)

    def cut(self) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)  # a close would not end its accept
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in (self._server, *self.ends):
            end.close()


async def test_a_hello_lost_in_flight_is_sent_again() -> None:
    """Also after a handshake that failed, which alone is for ZMQ to try again."""
    worker = FakeDecode("decode-1")  # reads nothing before it is started
    relay = _Relay(int(worker.record.data.rpartition(":")[2]), spoils=1)
    async with rig() as r:
        r.directory.put(msgspec.structs.replace(worker.record, data=relay.address))
        await until(lambda: any("handshake" in line for line in r.pool.refusals()))
        await until(lambda: not r.pool.refusals())
        assert len(relay.ends) == 2
        relay.cut()
        await until(lambda: len(relay.ends) == 4)
        worker.start()
        await r.ready(1)
    worker.die()
    relay.close()


async def test_all_outputs_that_came_before_a_break_count() -> None:
    """The loop was busy, so many of them wait."""
    worker = FakeDecode("decode-1", stop_after=300)

    def be_busy() -> None:
        while not worker.active or worker.active[0].sent < 300:
            time.sleep(0.01)
        time.sleep(0.2)  # ZMQ's thread writes what it has
        worker.die()
        time.sleep(0.2)

    async with rig(worker) as r:
        r.dispatcher.submit(request("a", max_tokens=400))
        be_busy()
        await until(lambda: r.sink.gone == ["decode-1"])
        assert len(r.sink.tokens["a"]) == 300


async def test_nothing_counts_that_comes_after_a_break_went_unnoticed() -> None:
    """ZMQ has connected again before the busy loop knows, and messages are missing."""
    worker = FakeDecode("decode-1", hold=True)
    worker.start()
    relay = _Relay(int(worker.record.data.rpartition(":")[2]))

    def be_busy() -> None:
        relay.cut()
        while len(relay.ends) < 4:
            time.sleep(0.01)
        time.sleep(0.3)
        worker.send_raw(front_wire.LOAD, msgspec.msgpack.encode(LATE))
        time.sleep(0.3)

    async with rig() as r:
        r.directory.put(msgspec.structs.replace(worker.record, data=relay.address))
        await r.ready(1)
        connection = r.pool.candidates()[0]
        be_busy()
        await until(lambda: r.sink.gone == ["decode-1"] or connection.load == LATE)
        assert connection.load != LATE
    worker.die()
    relay.close()


async def test_a_worker_that_sends_rubbish_has_not_died() -> None:
    """Its requests go on elsewhere, and none of them is suspected of having killed it."""
    bad, good = FakeDecode("decode-1", hold=True), FakeDecode("decode-2", hold=True)
    async with rig(bad, good) as r:
        r.dispatcher.submit(request("a", [1]))
        await until(lambda: bool(bad.added))
        bad.send_raw(front_wire.OUT, b"\xc1")
        await until(lambda: bool(good.added))
        assert not r.dispatcher.flights["a"].deaths
        good.hold = False
        await until(lambda: "a" in r.sink.finished)


KINDS = [value for value in vars(front_wire).values() if isinstance(value, bytes)]
HELLO = wire.encode(
    front_wire.FrontendHello(frontend_instance="f", vllm_version=check.require_version(), model="m")
)


class _Owner:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@EXAMPLES
@pytest.mark.essential
async def test_any_message_of_a_decode_worker_leaves_the_frontend_alive(examples: int) -> None:
    context: zmq.Context[Any] = zmq.Context()
    record = wire.WorkerRecord(
        instance_id="decode-1", incarnation="i", role="decode", state=wire.WorkerState.READY,
        model="m", host="h", host_id="h", pid=1, started_at=0.0, data="tcp://127.0.0.1:1",
    )  # fmt: skip
    hello = wire.decode(HELLO, front_wire.FrontendHello)
    welcome = front_wire.DecodeWelcome(
        decode_instance="decode-1", vllm_version="v", max_model_len=1,
        num_gpu_blocks=1, block_size=1,         supported_tasks=[],
    )  # fmt: skip
    link = DecodeConnection(context, record, hello, _Owner())
    valid = [wire.encode(welcome), HELLO, front_wire.encode_ids(["r"]), b"reason"]

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
