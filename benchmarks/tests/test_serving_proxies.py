"""The benchmark's proxies against small HTTP servers on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import ClientConnectionError, ClientPayloadError, ClientSession

from benchmarks.serving import proxies
from tests.support.listening import listening, until_closed

LIMIT_S = 20.0
Reply = Callable[[proxies.Request, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class Server:
    """An HTTP server that notes what it is asked and answers by `reply`."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.asked: list[proxies.Request] = []
        self.gone = asyncio.Event()
        self.address: proxies.Address = ("127.0.0.1", 0)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await proxies.read_request(reader)
        self.asked.append(request)
        answer = asyncio.create_task(self.reply(request, writer))
        with suppress(OSError):
            await asyncio.wait(
                [answer, asyncio.create_task(reader.read(1))], return_when=asyncio.FIRST_COMPLETED
            )
        if not answer.done():
            self.gone.set()
            answer.cancel()
        writer.close()

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.body) for request in self.asked]


@asynccontextmanager
async def answering(reply: Reply) -> AsyncIterator[Server]:
    server = Server(reply)
    async with listening(server) as server.address:
        yield server


@asynccontextmanager
async def proxy(policy: proxies.Policy) -> AsyncIterator[str]:
    """The URL of a running proxy."""
    async with until_closed(await proxies.Proxy(policy).start("127.0.0.1", 0)) as (host, port):
        yield f"http://{host}:{port}"


@asynccontextmanager
async def client() -> AsyncIterator[ClientSession]:
    async with asyncio.timeout(LIMIT_S), ClientSession() as session:
        yield session


def says(body: Any, status: str = "200 OK") -> Reply:
    """Answers with JSON."""

    async def reply(_: proxies.Request, writer: asyncio.StreamWriter) -> None:
        raw = json.dumps(body).encode()
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)

    return reply


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(text: str) -> bytes:
    return f"{len(text):x}\r\n{text}\r\n".encode()


async def unused() -> proxies.Address:
    """Where nobody listens."""
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as listener:
        host, port = listener.sockets[0].getsockname()[:2]
    return str(host), int(port)


class TestPassingOn:
    async def test_each_piece_of_a_stream_comes_before_the_next_is_made(self) -> None:
        seen = asyncio.Semaphore(0)

        async def reply(_: proxies.Request, writer: asyncio.StreamWriter) -> None:
            writer.write(HEAD)
            for number in range(5):
                writer.write(event(f"data: {number}\n\n"))
                await seen.acquire()  # not before the client has it
            writer.write(b"0\r\n\r\n")

        async with answering(reply) as server, proxy(proxies.RoundRobin([server.address])) as url:
            async with client() as session, session.post(url + "/v1/completions", data=b"x") as got:
                for number in range(5):
                    assert await got.content.readuntil(b"\n\n") == b"data: %d\n\n" % number
                    seen.release()
                assert await got.content.read() == b""

    async def test_the_request_arrives_as_it_was_sent(self) -> None:
        prompt = json.dumps({"prompt": list(range(40_000))}).encode()
        async with answering(says("yes")) as server:
            async with proxy(proxies.RoundRobin([server.address])) as url, client() as session:
                async with session.post(
                    url + "/v1/completions?a=b", data=prompt, headers={"X-Request-Id": "r7"}
                ) as got:
                    assert await got.json() == "yes"
        (request,) = server.asked
        assert (request.path, request.body) == ("/v1/completions?a=b", prompt)
        assert request.headers["x-request-id"] == "r7"
        assert request.headers["connection"] == "close"

    async def test_a_refusal_of_the_server_is_the_clients(self) -> None:
        async with answering(says({"error": "busy"}, "429 Too Many Requests")) as server:
            async with proxy(proxies.RoundRobin([server.address])) as url, client() as session:
                async with session.post(url, data=b"x") as got:
                    assert (got.status, await got.json()) == (429, {"error": "busy"})

    async def test_a_client_that_leaves_ends_its_request_at_the_server(self) -> None:
        async def reply(_: proxies.Request, writer: asyncio.StreamWriter) -> None:
            writer.write(HEAD + event("data: 0\n\n"))
            await asyncio.Event().wait()

        async with answering(reply) as server, proxy(proxies.RoundRobin([server.address])) as url:
            async with client() as session, session.post(url, data=b"x") as got:
                await got.content.readuntil(b"\n\n")
                got.close()
                await server.gone.wait()

    async def test_a_server_that_dies_in_a_stream_leaves_a_stream_that_is_cut(self) -> None:
        async def reply(_: proxies.Request, writer: asyncio.StreamWriter) -> None:
            writer.write(HEAD + event("data: 0\n\n"))
            await writer.drain()
            writer.transport.abort()

        async with answering(reply) as server, proxy(proxies.RoundRobin([server.address])) as url:
            async with client() as session:
                with pytest.raises((ClientPayloadError, ClientConnectionError)):
                    async with session.post(url, data=b"x") as got:
                        await got.content.read()

    @pytest.mark.parametrize(
        ("raw", "why"),
        [
            (b"nonsense\r\n\r\n", b"not an HTTP request"),
            (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", b"content-length"),
            (b"POST / HTTP/1.1\r\na: " + b"b" * 70_000 + b"\r\n\r\n", b"too long"),
        ],
    )
    async def test_what_is_no_request_is_refused(self, raw: bytes, why: bytes) -> None:
        async with proxy(proxies.RoundRobin([await unused()])) as url, asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection(*proxies.address(url))
            writer.write(raw)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 400")
            assert why in answer
            writer.close()


class TestRoundRobin:
    async def test_requests_take_turns_and_looks_do_not_count(self) -> None:
        async with answering(says("a")) as a, answering(says("b")) as b:
            robin = proxies.RoundRobin([a.address, b.address])
            async with proxy(robin) as url, client() as session:
                order = []
                for _ in range(4):
                    async with session.get(url + "/health") as got:
                        assert got.status == 200
                    async with session.post(url, data=b"x") as got:
                        order.append(await got.json())
        assert order == ["a", "b", "a", "b"]

    async def test_a_dead_server_is_passed_over(self) -> None:
        async with answering(says("alive")) as alive:
            robin = proxies.RoundRobin([await unused(), alive.address])
            async with proxy(robin) as url, client() as session:
                for _ in range(3):
                    async with session.post(url, data=b"x") as got:
                        assert (got.status, await got.json()) == (200, "alive")

    async def test_none_alive_is_a_bad_gateway(self) -> None:
        async with proxy(proxies.RoundRobin([await unused()])) as url, client() as session:
            async with session.post(url, data=b"x") as got:
                assert got.status == 502


PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[3, 4]], "remote_engine_id": "e"}
ASKED = {
    "model": "m",
    "prompt": [1, 2, 3],
    "max_tokens": 9,
    "min_tokens": 9,
    "stream": True,
    "stream_options": {"include_usage": True},
}


class TestNixl:
    async def test_prefill_comes_first_and_its_params_go_to_decode(self) -> None:
        decoded = asyncio.Event()

        async def prefilled(request: proxies.Request, writer: asyncio.StreamWriter) -> None:
            assert not decoded.is_set()
            await says({"choices": [], "kv_transfer_params": PARAMS})(request, writer)

        async def decoding(_: proxies.Request, writer: asyncio.StreamWriter) -> None:
            decoded.set()
            writer.write(HEAD + event("data: 0\n\n") + b"0\r\n\r\n")

        async with answering(prefilled) as prefill, answering(decoding) as decode:
            nixl = proxies.Nixl(prefill.address, decode.address)
            async with proxy(nixl) as url, client() as session:
                async with session.post(url + "/v1/completions", json=ASKED) as got:
                    assert await got.content.read() == b"data: 0\n\n"
        (first,), (second,) = prefill.bodies(), decode.bodies()
        assert (first["max_tokens"], first["stream"], first["prompt"]) == (1, False, [1, 2, 3])
        assert not {"stream_options", "min_tokens"} & first.keys()
        asks = first["kv_transfer_params"]
        assert (asks["do_remote_decode"], asks["do_remote_prefill"]) == (True, False)
        assert second == {**ASKED, "kv_transfer_params": PARAMS}
        ids = {server.asked[0].headers["x-request-id"] for server in (prefill, decode)}
        assert len(ids) == 1

    async def test_a_refused_prefill_is_the_answer(self) -> None:
        async with answering(says({"error": "no"}, "400 Bad Request")) as prefill:
            async with answering(says("never")) as decode:
                nixl = proxies.Nixl(prefill.address, decode.address)
                async with proxy(nixl) as url, client() as session:
                    async with session.post(url + "/v1/completions", json=ASKED) as got:
                        assert (got.status, await got.json()) == (400, {"error": "no"})
                assert not decode.asked

    async def test_a_prefill_server_that_dies_is_a_bad_gateway(self) -> None:
        async def dies(_: proxies.Request, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")

        async with answering(dies) as prefill, answering(says("never")) as decode:
            nixl = proxies.Nixl(prefill.address, decode.address)
            async with proxy(nixl) as url, client() as session:
                async with session.post(url + "/v1/completions", json=ASKED) as got:
                    assert got.status == 502
            assert not decode.asked

    async def test_short_prompts_and_looks_go_to_decode_alone(self) -> None:
        async with answering(says({"kv_transfer_params": PARAMS})) as prefill:
            async with answering(says("decode")) as decode:
                nixl = proxies.Nixl(prefill.address, decode.address, direct_below=4)
                async with proxy(nixl) as url, client() as session:
                    async with session.get(url + "/health") as got:
                        assert await got.json() == "decode"
                    async with session.post(url + "/v1/completions", json=ASKED) as got:
                        assert await got.json() == "decode"
                    assert not prefill.asked
                    longer = {**ASKED, "prompt": [1, 2, 3, 4]}
                    async with session.post(url + "/v1/completions", json=longer) as got:
                        assert got.status == 200
                    assert len(prefill.asked) == 1


def test_an_address_needs_host_and_port() -> None:
    assert proxies.address("http://127.0.0.1:80") == ("127.0.0.1", 80)
    with pytest.raises(ValueError, match="no host and port"):
        proxies.address("127.0.0.1")
