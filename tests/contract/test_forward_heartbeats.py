"""Stock servers that send heartbeats to a frontend: a real ZMQ socket, and real HTTP requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
import zmq
import zmq.asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pullfill.frontend import counters, main
from pullfill.frontend.forward import sources
from pullfill.frontend.forward.sources import Heartbeats, HeartbeatSocket
from pullfill.frontend.http_auth import HttpAuth
from pullfill.options import parse_networks
from tests.support.forward_rig import ForwardRig, forwarding, until

KEY = {"authorization": "Bearer admin"}


def beat(rig: ForwardRig, role: str) -> dict[str, Any]:
    fake = (rig.prefill if role == "P" else rig.decode)[0]
    return {"type": role, "http_address": fake.kv, "zmq_address": fake.kv, "tp_size": 1}


@asynccontextmanager
async def hearing(rig: ForwardRig, silence_s: float = 5.0) -> AsyncIterator[Heartbeats]:
    """Heartbeats that name the servers of a rig."""
    found = Heartbeats(
        lambda entries: rig.servers.set("heartbeats", entries), silence_s, publish_s=0.02
    )
    task = asyncio.create_task(found.run())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def dealing(beats: Heartbeats) -> AsyncIterator[Any]:
    """A DEALER, as connectors have one, that is connected to the frontend's socket."""
    socket = HeartbeatSocket("tcp://127.0.0.1:*", beats)
    task = asyncio.create_task(socket.run())
    dealer = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    dealer.connect(socket.url)
    try:
        yield dealer
    finally:
        dealer.close(linger=0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        socket.close()


@asynccontextmanager
async def beating(rig: ForwardRig, dealer: Any, roles: str = "PD") -> AsyncIterator[None]:
    """Send a heartbeat of each role every 0.1 s, until the block ends."""

    async def beats() -> None:
        while True:
            for role in roles:
                await dealer.send(msgspec.msgpack.encode(beat(rig, role)))
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
        hearing(rig, silence_s=1.0) as beats,
        dealing(beats) as dealer,
    ):
        bad = counters.HEARTBEATS.labels("unreadable")._value.get()
        for odd in ([b"\xc1"], [b"", b""], [b"x" * 4000], [msgspec.msgpack.encode(["P"])]):
            await dealer.send_multipart(odd)
        async with beating(rig, dealer):
            await rig.states(ready=2)
            assert counters.HEARTBEATS.labels("unreadable")._value.get() == bad + 4
            assert {row["sources"] for row in rig.servers.status()} == {("heartbeats",)}
            assert (await rig.ask()).status == 200
        await until(lambda: not rig.servers.known)
        assert "no stock decode server is known" in (await rig.ask()).message
        async with beating(rig, dealer):
            await rig.states(ready=2)


async def test_a_frame_that_is_too_long_ends_only_its_connection() -> None:
    async with (
        forwarding(known=False) as rig,
        hearing(rig) as beats,
        dealing(beats) as dealer,
        dealing(beats),
    ):
        await dealer.send(b"x" * 5000)
        await dealer.send(msgspec.msgpack.encode(beat(rig, "D")))
        # A DEALER connects again by itself. What it sends before may be lost.
        async with beating(rig, dealer, "P"):
            await until(lambda: rig.servers.ready("prefill"))


@dataclass
class Frame:
    """A frame of a sender with this address."""

    bytes: bytes
    sender: str

    def get(self, name: str) -> str:
        assert name == "Peer-Address"
        return self.sender


class Flood:
    """A socket that always has a message. It stops a loop that gives no time to others.

    messages: for each sender what it sends, in turns."""

    def __init__(self, messages: dict[str, bytes]) -> None:
        self.messages = list(messages.items())
        self.read = 0

    async def recv_multipart(self, *, copy: bool) -> list[Frame]:
        self.read += 1
        assert self.read < 100_000
        sender, data = self.messages[self.read % len(self.messages)]
        return [Frame(b"id", sender), Frame(data, sender)]


async def test_only_senders_on_this_machine_and_in_the_named_networks_are_heard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, bad = ["::ffff:10.1.0.9", "fd00::9", "127.0.0.1"], ["10.2.0.9", "fd01::9", "fe80::9%2"]
    sent = {
        sender: msgspec.msgpack.encode({"type": "D", "http_address": f"127.0.0.1:{port}"})
        for port, sender in enumerate(good + bad, 1)
    }
    async with forwarding(known=False) as rig, hearing(rig) as beats:
        networks = parse_networks("10.1.0.0/16, fd00::/64")
        socket = HeartbeatSocket("tcp://127.0.0.1:*", beats, networks)
        real, socket._socket = socket._socket, Flood(sent)  # type: ignore[assignment]
        task = asyncio.create_task(socket.run())
        try:
            await until(lambda: len(rig.servers.known) == len(good))
            assert {entry.url[-1] for entry in rig.servers.known} == {"1", "2", "3"}
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            real.close(linger=0)
    for sender in bad:
        assert f"from {sender}, which is in no network of --heartbeats-from: add it" in caplog.text


async def test_a_flood_leaves_time_for_others() -> None:
    async with forwarding(known=False) as rig, hearing(rig) as beats:
        socket = HeartbeatSocket("tcp://127.0.0.1:*", beats)
        flood = Flood({"127.0.0.1": msgspec.msgpack.encode(beat(rig, "D"))})
        real = socket._socket
        socket._socket = flood  # type: ignore[assignment]
        task = asyncio.create_task(socket.run())
        try:
            await rig.states(ready=1)
            assert not task.done()
            assert flood.read < 10_000
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            real.close(linger=0)


@asynccontextmanager
async def serving(beats: Heartbeats | None) -> AsyncIterator[str]:
    """URL of the route, behind the check of keys that guards it in a frontend."""

    async def handle(request: Request) -> Response:
        return await sources.answer_heartbeat(beats, request)

    app = Starlette(routes=[Route(sources.HEARTBEAT_PATH, handle, methods=["POST"])])
    listener = main.bind("127.0.0.1", 0)
    config = uvicorn.Config(HttpAuth(app, (), ("admin",)), log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield main.url_of(listener, tls=False) + sources.HEARTBEAT_PATH
    finally:
        server.should_exit = True
        await task


async def test_servers_that_send_heartbeats_over_http() -> None:
    async with (
        forwarding(known=False) as rig,
        hearing(rig) as beats,
        serving(beats) as url,
        httpx.AsyncClient() as http,
    ):
        assert (await http.post(url, json=beat(rig, "P"))).status_code == 403
        for role in "PD":
            answer = await http.post(url, json=beat(rig, role), headers=KEY)
            assert answer.status_code == 200, answer.text
        assert answer.json() == {
            "role": "decode", "url": rig.decode[0].url, "kv_address": rig.decode[0].kv,
            "silence_s": 5.0,
        }  # fmt: skip
        await rig.states(ready=2)
        assert (await rig.ask()).status == 200
        for content, status in ((b"{", 400), (b'{"type": "P"}', 400), (b" " * 99999, 413)):
            answer = await http.post(url, content=content, headers=KEY)
            assert answer.status_code == status
            assert "send type" in answer.text or "4096 bytes" in answer.text


async def test_a_frontend_without_stock_servers_says_so() -> None:
    async with serving(None) as url, httpx.AsyncClient() as http:
        answer = await http.post(url, content=b"", headers=KEY)
    assert answer.status_code == 409
    assert "--forwarder staged or batch" in answer.json()["error"]["message"]
