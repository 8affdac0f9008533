"""Forwarders over scripted servers, driven as ASGI apps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from pullfill.frontend.forward import sources
from pullfill.frontend.forward.layer import Layer
from pullfill.frontend.forward.protocols import dispatch_of, protocol_of
from pullfill.frontend.forward.servers import Servers
from pullfill.frontend.forward.stock import Stock
from pullfill.frontend.request_log import RequestLog
from pullfill.frontend.routing import choice
from pullfill.options import Dispatch, ForwarderName
from pullfill.wire import DecodePolicy
from tests.support.fake_stock import FakeStock, World, events, whole
from tests.support.frontend_rig import until

PATIENCE_S = 20.0
FEW_BLOCKS = 1 << 10
"""A frontend takes 13 MB for each role. To touch them takes longer than most tests."""


@dataclass
class Got:
    """What a client gets. parts: the pieces of the body as they came."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    ended: bool = False
    first: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        text: str = self.json["error"]["message"]
        return text


class FakeApp:
    """vLLM's app, with as much of it as `pull` needs. open: requests that it works at."""

    def __init__(self) -> None:
        self.requests = self.open = 0
        self.stalls: asyncio.Event | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        body = json.loads(message["body"])
        names = dict(scope["headers"])
        request_id = names.get(b"x-request-id", b"x").decode()
        self.requests += 1
        self.open += 1
        work = asyncio.create_task(self._answer(request_id, body, send))
        gone = asyncio.create_task(receive())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self.open -= 1

    async def _answer(self, request_id: str, body: dict[str, Any], send: Any) -> None:
        if self.stalls is not None:
            await self.stalls.wait()
        stream = body.get("stream")
        kind = b"text/event-stream; charset=utf-8" if stream else b"application/json"
        head = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        if not stream:
            await send({"type": "http.response.body", "body": whole(request_id, body)})
            return
        for event in events(request_id, body):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@dataclass
class ForwardRig:
    """share: what `router.stock_share` says. workers: whether `pull` has decode workers."""

    prefill: list[FakeStock]
    decode: list[FakeStock]
    servers: Servers
    stock: Stock
    app: FakeApp
    requests: RequestLog
    policy: DecodePolicy = DecodePolicy.ROUND_ROBIN
    share: float = 1.0
    workers: bool = False
    layer: Layer = field(init=False)

    def __post_init__(self) -> None:
        self.layer = Layer(
            self.app, lambda: self.workers, self.stock, lambda: self.share, self.requests
        )

    @property
    def all(self) -> list[FakeStock]:
        return [*self.prefill, *self.decode]

    async def ask(
        self,
        body: Any = None,
        *,
        path: str = "/v1/completions",
        headers: Any = (),
        leave: asyncio.Event | None = None,
        got: Got | None = None,
        **fields: Any,
    ) -> Got:
        """Send a request. leave: when set, the client goes away."""
        if body is None:
            body = {"model": "m", "prompt": "hello", **fields}
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        messages = [{"type": "http.request", "body": raw, "more_body": False}]
        got, leave = got or Got(), leave or asyncio.Event()
        scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                assert not got.status
                got.status = message["status"]
                got.headers = {k.decode(): v.decode() for k, v in message["headers"]}
                return
            assert not got.ended
            got.parts.append(message.get("body", b""))
            got.first.set()
            got.ended = not message.get("more_body", False)

        async with asyncio.timeout(PATIENCE_S):
            await self.layer(scope, receive, send)
        return got

    async def idle(self) -> None:
        """Wait until no server works at anything."""
        await until(lambda: not any(s.open for s in self.all) and not self.app.open)

    async def states(self, **wanted: int) -> None:
        """Wait until so many servers are in each state."""

        def now() -> bool:
            found = [s.state for s in self.servers.known.values()]
            return all(found.count(state) == count for state, count in wanted.items())

        await until(now)


@asynccontextmanager
async def forwarding(
    name: str = "staged",
    protocol: str = "nixl",
    dispatch: str | None = None,
    *,
    prefill: int = 1,
    decode: int = 1,
    silence_s: float = 10.0,
    known: bool = True,
    wait: bool = True,
    key: str = "",
    look_s: float = 0.02,
) -> AsyncIterator[ForwardRig]:
    """A forwarder with so many servers. known: they are registered. wait: until they are ready.

    key: the API key that it has for them. look_s: how often it looks at them."""
    async with AsyncExitStack() as stack:
        world = World()
        fakes = [FakeStock(world, protocol) for _ in range(prefill + decode)]
        for fake in fakes:
            fake.fetches = dispatch == "single"
            await stack.enter_async_context(fake.running())
        session = aiohttp.ClientSession(auto_decompress=False)
        stack.push_async_callback(session.close)
        spoken, forwarder = protocol_of(protocol), ForwarderName(name)
        order = dispatch_of(spoken, forwarder, Dispatch(dispatch) if dispatch else None)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(choice, "PREDICTED_BLOCKS", FEW_BLOCKS)
            servers = Servers(
                session, ("m",), "/m", spoken, lambda: rig.policy, headers,
                look_s=look_s, answer_s=0.5,
            )  # fmt: skip
        stack.push_async_callback(servers.close)
        stock = Stock(forwarder, spoken, order, servers, session, key=key, silence_s=silence_s)
        rig = ForwardRig(fakes[:prefill], fakes[prefill:], servers, stock, FakeApp(), RequestLog())
        if known:
            found = [sources.make("prefill", f.url, f.kv) for f in rig.prefill]
            servers.set("test", found + [sources.make("decode", f.url, f.kv) for f in rig.decode])
        if known and wait:
            await rig.states(ready=len(fakes))
        yield rig
        await rig.idle()
