"""Minimal proxies for the rivals: round robin over servers, and vLLM's way to use NIXL.

What a server answers is passed on as it comes. A client that goes away ends its request there.

    python -m benchmarks.serving.proxies round-robin --port 9000 --server URL --server URL
    python -m benchmarks.serving.proxies nixl --port 9000 --prefill URL --decode URL
"""

from __future__ import annotations

import argparse
import itertools
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import msgspec
import uvloop
from aiohttp import web

GENERATES = ("/v1/completions", "/v1/chat/completions")

Policy = Callable[["Proxy", web.Request, bytes], Awaitable[web.StreamResponse]]
"""Answers a request of this path and body. May raise aiohttp.ClientError: no server answers."""


class Proxy:
    """Serves one policy over one pool of connections."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.session: aiohttp.ClientSession

    def app(self) -> web.Application:
        made = web.Application(client_max_size=64 << 20)
        made.router.add_route("*", "/{path:.*}", self._answer)
        made.cleanup_ctx.append(self._connections)
        return made

    async def _connections(self, _: web.Application) -> Any:
        none, all_at_once = aiohttp.ClientTimeout(), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=none, connector=all_at_once) as self.session:
            yield

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._policy(self, request, await request.read())
        except aiohttp.ClientError as exc:
            return web.json_response({"error": {"message": str(exc)}}, status=502)

    async def pass_on(self, server: str, request: web.Request, body: bytes) -> web.StreamResponse:
        """Send the request to a server and its answer to the client."""
        kept = ("content-type", "x-request-id", "authorization")
        headers = {name: request.headers[name] for name in kept if name in request.headers}
        url = server + request.path_qs
        async with self.session.request(request.method, url, data=body, headers=headers) as came:
            # An empty answer, as of /health, has no type: then it gets the default one.
            answer = web.StreamResponse(
                status=came.status,
                headers={"content-type": came.headers.get("content-type", came.content_type)},
            )
            await answer.prepare(request)
            async for data in came.content.iter_any():
                await answer.write(data)
            return answer


def round_robin(servers: Sequence[str]) -> Policy:
    """Each request to the next server; one that cannot be reached is passed over."""
    turns = itertools.cycle(range(len(servers)))

    async def answer(proxy: Proxy, request: web.Request, body: bytes) -> web.StreamResponse:
        first = next(turns) if request.method == "POST" else 0
        for offset in range(len(servers)):
            try:
                return await proxy.pass_on(servers[(first + offset) % len(servers)], request, body)
            except aiohttp.ClientConnectorError:
                continue
        raise aiohttp.ClientError("no server answers")

    return answer


def nixl(prefill: str, decode: str) -> Policy:
    """Prefill first, with one token to generate; the server that did it says where the KV is, and
    the decode server gets that along with the request. As in vLLM's own example of such a proxy."""

    async def answer(proxy: Proxy, request: web.Request, body: bytes) -> web.StreamResponse:
        if request.method != "POST" or request.path not in GENERATES:
            return await proxy.pass_on(decode, request, body)
        asked = msgspec.json.decode(body, type=dict[str, Any])
        headers = {"x-request-id": str(uuid.uuid4())}
        url = prefill + request.path
        async with proxy.session.post(url, json=prefill_body(asked), headers=headers) as first:
            told = await first.read()
            if first.status != 200:
                return web.Response(status=first.status, body=told, content_type="application/json")
        params = msgspec.json.decode(told, type=dict[str, Any]).get("kv_transfer_params")
        if params:
            asked["kv_transfer_params"] = params
        return await proxy.pass_on(decode, request, msgspec.json.encode(asked))

    return answer


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """The same request, to be prefilled only and its KV kept for a decode server."""
    dropped = ("stream_options", "min_tokens", "min_completion_tokens")
    first = {key: value for key, value in body.items() if key not in dropped}
    first |= {"stream": False, "max_tokens": 1}
    if "max_completion_tokens" in first:
        first["max_completion_tokens"] = 1
    unknown = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    return {**first, "kv_transfer_params": params | dict.fromkeys(unknown)}


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.proxies")
    kinds = parser.add_subparsers(dest="kind", required=True)
    robin = kinds.add_parser("round-robin")
    robin.add_argument("--server", action="append", required=True)
    pair = kinds.add_parser("nixl")
    pair.add_argument("--prefill", required=True)
    pair.add_argument("--decode", required=True)
    for kind in (robin, pair):
        kind.add_argument("--port", type=int, required=True)
    options = parser.parse_args(argv)
    if options.kind == "nixl":
        policy = nixl(options.prefill, options.decode)
    else:
        policy = round_robin(options.server)
    web.run_app(
        Proxy(policy).app(), host="127.0.0.1", port=options.port, print=None,
        handler_cancellation=True, loop=uvloop.new_event_loop(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
