"""Stand-ins for stock vLLM servers with a KV connector, as read from the connectors' sources.

A prefill server leaves blocks in the `World`, a decode server takes them there. So a test sees
whether the prefill that a decode server was told about has really run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.listening import serving

TOKENS = 4
"""Tokens of an answer, unless the request says otherwise."""


@dataclass
class World:
    """The blocks that prefill servers hold, by the name that the connector gives them."""

    blocks: dict[str, asyncio.Event] = field(default_factory=dict)

    def of(self, name: str) -> asyncio.Event:
        return self.blocks.setdefault(name, asyncio.Event())


def events(request_id: str, body: dict[str, Any]) -> list[bytes]:
    """The stream of an answer, event by event."""
    found = []
    for number in range(body.get("max_tokens", TOKENS)):
        choice = {"index": 0, "text": f" {number}é"}
        event = {"id": f"cmpl-{request_id}", "choices": [choice]}
        found.append(b"data: " + json.dumps(event).encode() + b"\n\n")
    return [*found, b"data: [DONE]\n\n"]


def whole(request_id: str, body: dict[str, Any], params: Any = None) -> bytes:
    text = "".join(f" {number}é" for number in range(body.get("max_tokens", TOKENS)))
    answer = {
        "id": f"cmpl-{request_id}",
        "choices": [{"index": 0, "text": text}],
        "usage": {"prompt_tokens": len(str(body.get("prompt", "")))},
        "kv_transfer_params": params,
    }
    return json.dumps(answer).encode()


def error(status: int, text: str) -> bytes:
    body = {"message": text, "type": "SomeError", "param": None, "code": status}
    return json.dumps({"error": body}).encode()


class FakeStock:
    """One server. Change its fields to make it fail.

    connector: the protocol, or empty: it has none.
    refuse: status and text of its answers to requests. late: a stream begins with it instead.
    breaks: it closes the connection after so many events; 0: at once.
    stalls: it answers no request until this is set.
    stops: it sends nothing after the first event of a stream.
    ends: the first token ends each answer. Then most connectors give no KV.
    leaves_out: what its parameters lack.
    key: an API key that it asks for, or empty.
    fetches: as a decode server it has the prefill run itself (single dispatch).
    alive: /health answers. metrics_status: of /metrics. root: what /v1/models says of its model.
    requests: (path, headers, body) of each request. remote: how many came with blocks.
    open: requests that it works at. left: requests whose client has left."""

    def __init__(self, world: World, connector: str = "nixl", *, root: str = "/m") -> None:
        self.world, self.connector, self.root = world, connector, root
        self.refuse: tuple[int, str] | None = None
        self.late = False
        self.blocks: Any = [[1, 2]]
        self.breaks: int | None = None
        self.stalls: asyncio.Event | None = None
        self.stops = False
        self.fetches = self.ends = False
        self.key = self.leaves_out = ""
        self.alive = True
        self.metrics_status = 200
        self.metrics = "vllm:num_requests_running{} 0.0\n"
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.remote = self.open = self.left = 0
        self.url = ""

    @property
    def kv(self) -> str:
        return self.url.removeprefix("http://")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeStock]:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/query", self._query)
        app.router.add_post("/{path:.*}", self._request)
        async with serving(app, cancelling=True) as self.url:
            yield self

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.alive else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics, status=self.metrics_status)

    def _locked(self, request: web.Request) -> bool:
        return bool(self.key) and request.headers.get("authorization") != f"Bearer {self.key}"

    async def _models(self, request: web.Request) -> web.Response:
        if self._locked(request):
            return self._error(401, "Unauthorized")
        return web.json_response({"data": [{"id": "m", "root": self.root}]})

    async def _query(self, _: web.Request) -> web.Response:
        return web.json_response({"0": {"engine_id": "engine-7", "worker_addr": {}}})

    async def _request(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        if self._locked(request):
            return self._error(401, "Unauthorized")
        try:
            body = json.loads(raw)
        except ValueError:
            return self._error(400, "no JSON")
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((request.path, headers, body))
        self.open += 1
        try:
            return await self._answer(request, headers["x-request-id"], body)
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise
        finally:
            self.open -= 1

    async def _answer(
        self, request: web.Request, request_id: str, body: dict[str, Any]
    ) -> web.StreamResponse:
        if self.refuse is not None:
            if self.late and body.get("stream"):
                first = b"data: " + error(*self.refuse) + b"\n\ndata: [DONE]\n\n"
                return web.Response(body=first, content_type="text/event-stream")
            return self._error(*self.refuse)
        if self.breaks == 0:
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(60)
        if self.stalls is not None:
            await self.stalls.wait()
        params = None
        stops = self.ends and (not body.get("ignore_eos") or body.get("stop_token_ids"))
        if not stops or body["max_tokens"] != 1:
            params = await self._connect(request_id, body.get("kv_transfer_params") or {})
        kind = "application/json"
        if not body.get("stream"):
            return web.Response(body=whole(request_id, body, params), content_type=kind)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        for number, event in enumerate(events(request_id, body)):
            if number == self.breaks:
                await answer.write(event[:9])
                await asyncio.sleep(0.01)
                assert request.transport is not None
                request.transport.abort()
                await asyncio.sleep(60)
            await answer.write(event)
            await asyncio.sleep(60 if self.stops else 0)
        await answer.write_eof()
        return answer

    def _error(self, status: int, text: str) -> web.Response:
        return web.Response(
            status=status, body=error(status, text), content_type="application/json"
        )

    async def _connect(self, request_id: str, params: dict[str, Any]) -> Any:
        """What the connector does before the answer. Returns its parameters, if it has any."""
        if not self.connector:
            return None
        if self.connector == "p2p" and not request_id.startswith("___prefill_addr_"):
            # P2pNcclConnector takes the KV of each prompt to be elsewhere.
            await asyncio.Event().wait()
        name = request_id if self.connector == "p2p" else params.get("transfer_id", request_id)
        if params.get("do_remote_decode"):
            self.world.of(name).set()
            if self.connector != "nixl":
                return None
            told = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": self.blocks,
                "remote_engine_id": "e",
                "remote_request_id": name,
                "remote_host": "127.0.0.1",
                "remote_port": 5600,
                "tp_size": 1,
            }
            return {name: value for name, value in told.items() if name != self.leaves_out}
        if params.get("do_remote_prefill"):
            if self.connector == "mooncake":
                assert params["remote_engine_id"] == "engine-7"
                assert params["remote_bootstrap_addr"].startswith("http://127.0.0.1:")
            if self.fetches:
                self.world.of(name).set()
            await self.world.of(params.get("remote_request_id", name)).wait()
            self.remote += 1
        return None
