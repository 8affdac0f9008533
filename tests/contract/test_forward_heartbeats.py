"""Stock servers that send heartbeats to a frontend, over a real ZMQ socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from pullfill.frontend import counters
from pullfill.frontend.forward.sources import Heartbeats, bind_heartbeats
from tests.support.frontend_rig import ForwardRig, forwarding, until


def beat(rig: ForwardRig, role: str) -> bytes:
    fake = (rig.prefill if role == "P" else rig.decode)[0]
    return msgspec.msgpack.encode(
        {"type": role, "http_address": fake.kv, "zmq_address": fake.kv, "tp_size": 1}
    )


@asynccontextmanager
async def hearing(rig: ForwardRig, silence_s: float, socket: Any = None) -> AsyncIterator[str]:
    """A frontend that hears heartbeats for a rig. Gives the address."""
    socket = socket or bind_heartbeats("tcp://127.0.0.1:*", ())
    beats = Heartbeats(
        socket, (), lambda entries: rig.servers.set("heartbeats", entries), silence_s
    )
    task = asyncio.create_task(beats.run())
    try:
        yield beats.url
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        beats.close()


@asynccontextmanager
async def dealing(url: str) -> AsyncIterator[Any]:
    """A DEALER, as connectors have one."""
    dealer = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    dealer.connect(url)
    try:
        yield dealer
    finally:
        dealer.close(linger=0)


@asynccontextmanager
async def beating(rig: ForwardRig, dealer: Any) -> AsyncIterator[None]:
    """Send a heartbeat of each role every 0.1 s, until the block ends."""

    async def beats() -> None:
        while True:
            for role in "PD":
                await dealer.send(beat(rig, role))
            await asyncio.sleep(0.1)

    task = asyncio.create_task(beats())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.essential
async def test_servers_that_send_heartbeats_over_zmq_serve_until_they_are_silent() -> None:
    async with (
        forwarding("batch", "p2p", known=False) as rig,
        hearing(rig, 1.0) as url,
        dealing(url) as dealer,
    ):
        bad = counters.HEARTBEATS.labels("unreadable")._value.get()
        for odd in (b"\xc1", b"", b"x" * 4000, msgspec.msgpack.encode(["P"])):
            await dealer.send(odd)
        async with beating(rig, dealer):
            await rig.states(ready=2)
            assert counters.HEARTBEATS.labels("unreadable")._value.get() == bad + 4
            assert {row["sources"] for row in rig.servers.status()} == {("heartbeats",)}
            assert (await rig.ask()).status == 200
        await until(lambda: not rig.servers.known)
        assert "no stock decode server is known" in (await rig.ask()).message
        await dealer.send(b"x" * 5000)  # ends its connection. A DEALER connects again by itself
        async with beating(rig, dealer):
            await rig.states(ready=2)


class Frame:
    """A frame of a sender on this machine."""

    def __init__(self, data: bytes) -> None:
        self.bytes = data

    def get(self, name: str) -> str:
        assert name == "Peer-Address"
        return "127.0.0.1"


class Flood:
    """A socket that always has a message. It stops a loop that gives no time to others."""

    def __init__(self, data: bytes) -> None:
        self.data, self.read = data, 0

    def recv_multipart(self, flags: int, *, copy: bool) -> list[Frame]:
        self.read += 1
        assert self.read < 100_000
        return [Frame(b"id"), Frame(self.data)]

    def getsockopt_string(self, option: int) -> str:
        return "tcp://127.0.0.1:1"

    def close(self, linger: int) -> None: ...


async def test_a_flood_leaves_time_for_others() -> None:
    async with forwarding(known=False) as rig:
        flood = Flood(beat(rig, "D"))
        async with hearing(rig, 5.0, flood):
            await rig.states(ready=1)
            assert flood.read < 10_000
