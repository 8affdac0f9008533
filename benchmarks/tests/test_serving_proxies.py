"""The benchmark's proxies against small HTTP servers on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientSession, web

from benchmarks.serving import proxies
from tests.support.listening import serving

NOBODY = "http://127.0.0.1:9"
Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Notes what it is asked and answers by `reply`."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.bodies: list[Any] = []
        self.ids: list[str | None] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json() if request.can_read_body else None)
        self.ids.append(request.headers.get("x-request-id"))
        return await self.reply(request)


@asynccontextmanager
async def answering(reply: Reply) -> AsyncIterator[tuple[Server, str]]:
    server, app = Server(reply), web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", server.answer)
    async with serving(app) as url:
        yield server, url


@asynccontextmanager
async def asking(policy: proxies.Policy) -> AsyncIterator[ClientSession]:
    async with serving(proxies.Proxy(policy).app()) as url, ClientSession(url) as session:
        async with asyncio.timeout(20.0):
            yield session


def says(body: Any, status: int = 200) -> Reply:
    async def reply(_: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return reply


async def test_each_piece_of_a_stream_comes_before_the_next_is_made() -> None:
    seen = asyncio.Semaphore(0)

    async def reply(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(5):
            await response.write(b"data: %d\n\n" % number)
            await seen.acquire()  # not before the client has it
        return response

    async with answering(reply) as (_, url), asking(proxies.round_robin([url])) as session:
        async with session.post("/v1/completions", json={}) as got:
            for number in range(5):
                assert await got.content.readuntil(b"\n\n") == b"data: %d\n\n" % number
                seen.release()
            assert await got.content.read() == b""


async def test_long_prompts_and_refusals_are_passed_on() -> None:
    prompt = {"prompt": list(range(40_000))}
    async with answering(says({"error": "busy"}, 429)) as (server, url):
        async with asking(proxies.round_robin([url])) as session:
            headers = {"X-Request-Id": "r7"}
            async with session.post("/v1/completions", json=prompt, headers=headers) as got:
                assert (got.status, await got.json()) == (429, {"error": "busy"})
    assert (server.bodies, server.ids) == ([prompt], ["r7"])


async def test_requests_take_turns_and_a_dead_server_is_passed_over() -> None:
    async with answering(says("a")) as (_, a), answering(says("b")) as (_, b):
        async with asking(proxies.round_robin([a, b])) as session:
            order = []
            for _ in range(4):
                async with session.get("/health") as got:  # a look does not count
                    assert got.status == 200
                async with session.post("/v1/completions", json={}) as got:
                    order.append(await got.json())
        assert order == ["a", "b", "a", "b"]
        async with asking(proxies.round_robin([NOBODY, b])) as session:
            for _ in range(2):
                async with session.post("/v1/completions", json={}) as got:
                    assert await got.json() == "b"
    async with asking(proxies.round_robin([NOBODY])) as session:
        async with session.post("/v1/completions", json={}) as got:
            assert got.status == 502


PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[3, 4]], "remote_engine_id": "e"}
ASKED = {
    "prompt": [1, 2, 3], "max_tokens": 9, "min_tokens": 9, "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip


async def test_nixl_prefills_first_and_its_params_go_to_decode() -> None:
    async with (
        answering(says({"choices": [], "kv_transfer_params": PARAMS})) as (prefill, first_url),
        answering(says("tokens")) as (decode, second_url),
        asking(proxies.nixl(first_url, second_url)) as session,
    ):
        async with session.post("/v1/completions", json=ASKED) as got:
            assert await got.json() == "tokens"
        async with session.get("/health") as got:
            assert await got.json() == "tokens"
    (first,), (second, look) = prefill.bodies, decode.bodies
    assert (first["max_tokens"], first["stream"], first["prompt"]) == (1, False, [1, 2, 3])
    assert not {"stream_options", "min_tokens"} & first.keys()
    asks = first["kv_transfer_params"]
    assert (asks["do_remote_decode"], asks["do_remote_prefill"]) == (True, False)
    assert (second, look) == ({**ASKED, "kv_transfer_params": PARAMS}, None)


async def test_a_refused_prefill_is_the_answer() -> None:
    async with (
        answering(says({"error": "no"}, 400)) as (_, first_url),
        answering(says("never")) as (decode, second_url),
        asking(proxies.nixl(first_url, second_url)) as session,
    ):
        async with session.post("/v1/completions", json=ASKED) as got:
            assert (got.status, await got.json()) == (400, {"error": "no"})
    assert decode.bodies == []
