"""The load generator of the serving benchmark: against a server that streams, stalls and breaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession

from benchmarks.serving.contract import Ask, Kind
from benchmarks.serving.load import Plan, Result, heard, send
from benchmarks.serving.proxies import Proxy, round_robin
from benchmarks.serving.workloads import Workload
from tests.support.listening import listening, serving

Step = bytes | float
"""Bytes to write, or seconds to wait. b"" breaks the connection off."""
Script = Callable[[dict[str, Any]], Sequence[Step]]

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def event(value: dict[str, Any] | str) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"data: {text}\n\n".encode()


def token_event(body: dict[str, Any], *tokens: int) -> bytes:
    choice: dict[str, Any] = {"index": 0, "text": "x" * len(tokens)}
    if body.get("return_token_ids"):
        choice["token_ids"] = list(tokens)
    return event({"id": "cmpl-1", "choices": [choice]})


def usage_event(body: dict[str, Any], cached: int = 0) -> bytes:
    usage = {
        "prompt_tokens": len(body["prompt"]),
        "completion_tokens": body["max_tokens"],
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return event({"id": "cmpl-1", "choices": [], "usage": usage})


def whole(body: dict[str, Any]) -> list[Step]:
    """Return an answer without faults, in which each token has its own event."""
    tokens = [chunk(token_event(body, n)) for n in range(body["max_tokens"])]
    return [HEAD, *tokens, chunk(usage_event(body)), chunk(event("[DONE]")), END]


class SseServer:
    """bodies: of the requests so far, in order."""

    def __init__(self, script: Script = whole) -> None:
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[SseServer]:
        async with listening(self._serve) as (host, port):
            self.url = f"http://{host}:{port}"
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            body = json.loads(await reader.readexactly(length))
            self.bodies.append(body)
            for step in self.script(body):
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif step:
                    writer.write(step)
                    await writer.drain()
                else:
                    break
        except ConnectionError:
            pass
        finally:
            writer.close()


BODY = {"return_token_ids": True, "prompt": [1, 2], "max_tokens": 3}


def ask(kind: Kind = Kind.SHORT, lane: str = "a", **more: Any) -> Ask:
    return Ask(kind, more.pop("prompt", (1, 2)), more.pop("max_tokens", 3), lane, **more)


async def asked(
    server: SseServer, *asks: Ask, seconds: float | None = None, limit_s: float = 5.0
) -> Result:
    async with server.running():
        return await send(Plan(server.url, "m", Workload(asks, seconds), limit_s))


class TestAnswers:
    async def test_tokens_times_and_what_was_cached(self) -> None:
        def script(body: dict[str, Any]) -> list[Step]:
            first, *rest = [chunk(token_event(body, n)) for n in (7, 8, 9)]
            return [HEAD, first, 0.05, *rest, chunk(usage_event(body, 16)), chunk(event("[DONE]"))
                    + END]  # fmt: skip

        result = await asked(SseServer(script), ask())
        (answer,) = result.answers
        assert (answer.tokens, answer.cached, answer.error) == ([7, 8, 9], 16, "")
        assert answer.request_id == "cmpl-1"
        assert 0 <= answer.sent_s <= answer.token_s[0] < answer.token_s[1]
        # The first may be heard late. The server waits after it has sent that one.
        assert answer.token_s[1] - answer.sent_s >= 0.05
        assert result.took_s >= answer.token_s[-1]
        assert result.cpu_s > 0

    @pytest.mark.parametrize("size", [1, 7])
    def test_reads_may_be_cut_anywhere(self, size: int) -> None:
        raw = b"".join(step for step in whole(BODY) if isinstance(step, bytes))
        reads = [(float(n), raw[n : n + size]) for n in range(0, len(raw), size)]
        came = heard(reads, 3)
        assert (came.tokens, came.error) == ([0, 1, 2], "")
        assert came.token_s == sorted(came.token_s)
        # The time of the read that completed the event, not of the one that began it.
        ends = raw.index(b"\n\n") + 2
        assert came.token_s[0] == (ends - 1) // size * size


class TestFailures:
    BREAKS: tuple[tuple[list[bytes], str], ...] = (
        ([HEAD, chunk(token_event(BODY, 1)), b""], "broke off after 1 tokens"),
        ([HEAD, chunk(token_event(BODY, 1)), END], "broke off after 1 tokens"),
        ([HEAD, chunk(token_event(BODY, 1)), chunk(event("[DONE]")), END], "1 tokens instead of 3"),
        ([HEAD, chunk(event({"error": {"message": "engine died"}})), END], "engine died"),
        ([HEAD, chunk(event("{oops")), END], "not JSON"),
        ([HEAD, b"zz\r\n", END], "broke off"),
        ([b""], "connection was closed"),
        ([b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nfull"], "503 Busy: full"),
    )

    @pytest.mark.parametrize(("steps", "why"), BREAKS)
    async def test_each_is_an_answer_that_says_why(self, steps: list[bytes], why: str) -> None:
        (answer,) = (await asked(SseServer(lambda _: steps), ask())).answers
        assert why in answer.error

    async def test_a_server_that_never_ends_is_cut(self) -> None:
        server = SseServer(lambda body: [HEAD, chunk(token_event(body, 1)), 30.0])
        (answer,) = (await asked(server, ask(), limit_s=1.0)).answers
        assert answer.error == "not over within 1 s"
        assert answer.tokens == [1]


class TestLanes:
    async def test_closed_loops_stop_with_the_window_and_running_answers_are_kept(self) -> None:
        def script(body: dict[str, Any]) -> list[Step]:
            return [0.04, *whole(body)]

        asks = [ask() for _ in range(9)]
        result = await asked(SseServer(script), *asks, seconds=0.1)
        assert all(a.sent_s < 0.1 and not a.error for a in result.answers)
        assert result.answers[-1].token_s[-1] >= 0.1
        assert not result.dry

    async def test_due_and_late(self) -> None:
        def script(body: dict[str, Any]) -> list[Step]:
            return [0.15, *whole(body)]

        asks = ask(at_s=0.02), ask(at_s=0.05), ask(lane="b", at_s=0.05)
        one, two, free = (await asked(SseServer(script), *asks, seconds=0.1)).answers
        assert (one.due_s, two.due_s) == (0.02, 0.05)
        assert one.sent_s >= 0.02
        assert two.sent_s >= one.token_s[-1]  # the lane was not free: due long before it was sent
        assert free.sent_s < one.token_s[0]


class TestChat:
    async def test_each_turn_brings_all_that_was_said(self) -> None:
        server = SseServer()
        turns = [ask(Kind.TURN, prompt=(n,), grows=True, max_tokens=2) for n in (10, 20, 30)]
        answers = (await asked(server, *turns)).answers
        assert [body["prompt"] for body in server.bodies] == [
            [10], [10, 0, 1, 20], [10, 0, 1, 20, 0, 1, 30]
        ]  # fmt: skip
        assert [a.tokens for a in answers] == [[0, 1]] * 3


async def test_the_proxy_passes_on_an_answer_without_a_type() -> None:
    """As vLLM answers /health: a system whose proxy fails there never starts."""

    async def bare(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with listening(bare) as (host, port):
        proxy = Proxy(round_robin([f"http://{host}:{port}"]))
        async with serving(proxy.app()) as url, ClientSession() as http:
            assert (await http.get(f"{url}/health")).status == 200
