"""The one-at-a-time part of bench_frontend: what it counts, and what decides."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from benchmarks import bench_frontend_requests as requests
from benchmarks.bench_frontend_requests import KINDS, Kind, Taken
from benchmarks.live import BenchError
from tests.support import listening


@dataclass
class Server:
    """A server that says it streams so many tokens, or as many as it is asked for."""

    name: str = "s"
    url: str = ""
    pid: int = field(default_factory=os.getpid)
    pids: list[int] = field(default_factory=lambda: [os.getpid()])
    tokens: int | None = None
    texts: list[str] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.texts.append(body["prompt"])
        count = body["max_tokens"] if self.tokens is None else self.tokens
        usage = {"usage": {"completion_tokens": count}}
        if not body.get("stream"):
            return web.json_response(usage)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices":[]}\n\n')
        await asyncio.sleep(0.01)
        await response.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
        return response


@asynccontextmanager
async def serving(*servers: Server) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for server in servers:
            app = web.Application()
            app.router.add_post("/v1/completions", server.answer)
            server.url = await stack.enter_async_context(listening.serving(app))
        yield


class TestRequests:
    async def test_both_servers_get_the_same_and_nothing_runs_beside(self) -> None:
        ours, theirs = Server("ours"), Server("theirs")
        opened: list[bool] = []

        @contextmanager
        def window() -> Iterator[None]:
            assert not opened or not opened[-1], "two groups at once"
            opened.append(True)
            yield
            opened[-1] = False

        async with serving(ours, theirs):
            found = await requests.measure([ours, theirs], 1, "t{}".format, window)
        assert ours.texts == theirs.texts
        assert len(set(ours.texts)) == len(ours.texts) == 2 * len(KINDS) * requests.GROUP
        for taken in (found[kind][s.name] for kind in KINDS for s in (ours, theirs)):
            assert len(taken.first) == len(taken.whole) == requests.GROUP, "the warm-up counts"
            assert len(taken.http) == len(taken.all) == 1
            assert all(0 < a <= b for a, b in zip(taken.first, taken.whole, strict=True))
        streamed = found[KINDS[0]]["ours"]
        waits = [b - a for a, b in zip(streamed.first, streamed.whole, strict=True)]
        assert max(waits) >= 9, "the server pauses for 10 ms after the first part"

    async def test_an_answer_of_another_length_is_no_result(self) -> None:
        server = Server(tokens=15)
        async with serving(server):
            with pytest.raises(BenchError, match="not 1 token, streamed"):
                await requests.measure([server], 1, "t{}".format, _window)


@contextmanager
def _window() -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("kind", "answer", "count"),
    [
        (Kind(1, False), b'{"usage": {"completion_tokens": 7}}', 7),
        (Kind(1, True), b'data: {"usage":{"completion_tokens":7}}\n\ndata: [DONE]\n\n', 7),
        (Kind(1, True), b'data: {"usage":{"completion_tokens":7}}\n\n', -1),
        (Kind(1, True), b'data: {"error":"x"}\n\ndata: [DONE]\n\n', -1),
        (Kind(1, False), b'{"error": "x"}', -1),
        (Kind(1, False), b"", -1),
    ],
)
def test_tokens_by_the_usage_of_a_whole_answer(kind: Kind, answer: bytes, count: int) -> None:
    assert requests.counted(kind, answer) == count


@pytest.mark.parametrize(("ours", "ok"), [(12.9, True), (13.1, False)])
def test_the_difference_of_the_medians_decides(ours: float, ok: bool) -> None:
    slow = Taken([ours, ours, 99.0], [20.0], [2.0], [5.0])
    plain = Taken([1.0, 10.0, 10.0], [20.0], [4.0], [5.0])
    taken = {"pullfill": slow, "vllm": plain}
    rows = {r.metric: r for r in requests.rows_of(Kind(16, True), taken, "pullfill", "vllm")}
    added = rows["added to the first token of 16 tokens, streamed, p50"]
    assert added.value == pytest.approx(ours - 10.0)
    assert added.ok is ok
    assert rows["added to the whole answer of 16 tokens, streamed, p50"].ok
    assert rows["CPU of the HTTP process for a request of 16 tokens, streamed"].ratio == 0.5
