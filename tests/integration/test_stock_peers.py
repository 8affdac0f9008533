"""One stock prefill server and one stock decode server with NixlConnector behind our frontend."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.etcd import EtcdServer
from tests.support.frontend_http import Served, frontend
from tests.support.oracle import Oracle
from tests.support.stock_vllm import LEASE_S, SEQS, StockVllm, stock_vllm

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        find_spec("nixl") is None, reason="nixl is not installed (make install-nixl)"
    ),
]
COUNT = 8
"""How many tokens an answer has unless a test says otherwise."""
LONG = 64
"""Tokens of an answer that a server is killed in."""
END_S = 60.0
"""No request may take longer, whatever happens to the servers."""


@dataclass
class Got:
    """What a client gets. first: set when the first bytes of the answer have come."""

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    status: int = 0
    body: bytes = b""
    first: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of a stream, or the whole answer as the only one."""
        if not self.body.startswith(b"data: "):
            return [json.loads(self.body)]
        lines = self.body.decode().split("\n\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    @property
    def error(self) -> str:
        """The text of the error that it is, or ends with. Empty: it is none."""
        last = self.events[-1]
        return str(last["error"]["message"]) if "error" in last else ""

    @property
    def tokens(self) -> list[int]:
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return [token for choice in choices for token in choice.get("token_ids") or ()]


@dataclass
class Peers:
    """The servers, and the frontend before them."""

    prefill: StockVllm
    decode: StockVllm
    frontend: Served

    async def ask(
        self,
        ids: Sequence[int],
        got: Got | None = None,
        *,
        path: str = "completions",
        **fields: Any,
    ) -> Got:
        """Send a request with this prompt and read the answer to its end."""
        got = got or Got()
        told = body(ids) | fields
        url = f"{self.frontend.url}/v1/{path}"
        async with asyncio.timeout(END_S), httpx.AsyncClient(verify=False, timeout=END_S) as http:
            async with http.stream(
                "POST", url, json=told, headers={"x-request-id": got.request_id}
            ) as answer:
                got.status = answer.status_code
                async for part in answer.aiter_bytes():
                    got.body += part
                    got.first.set()
        return got

    async def stages(self, got: Got) -> list[tuple[str, str]]:
        """What became of each stage of a request to /v1/completions: its name and its result."""
        url = f"{self.frontend.url}/pullfill/requests/cmpl-{got.request_id}"
        async with asyncio.timeout(END_S), httpx.AsyncClient(verify=False) as http:
            while "path" not in (told := (await http.get(url)).json()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return [(stage["stage"], stage["result"]) for stage in told["stages"]]

    async def ready(self) -> None:
        """Wait until the frontend sees both."""
        wanted, url = {"prefill": 1, "decode": 1}, f"{self.frontend.url}/ready"
        async with asyncio.timeout(END_S), httpx.AsyncClient(verify=False) as http:
            while (await http.get(url)).json()["stock"] != wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def idle(self) -> None:
        """Wait until no server that is alive works at a request or has one that waits."""
        await self._none(WORK, 5.0)

    async def freed(self) -> None:
        """Wait until no server that is alive holds a block. Blocks that nobody has read, a prefill
        server holds for its lease."""
        await self._none([*WORK, "vllm:kv_cache_usage_perc"], LEASE_S + 20.0)

    async def counter(self, name: str, server: StockVllm) -> float:
        """The sum of a counter in a server's /metrics."""
        async with httpx.AsyncClient(verify=False) as http:
            lines = (await http.get(f"{server.url}/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    async def _none(self, gauges: Sequence[str], within_s: float) -> None:
        async with asyncio.timeout(within_s):
            for server in (s for s in (self.prefill, self.decode) if s.alive):
                while any([await self.counter(name, server) for name in gauges]):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)


async def killed(peers: Peers, server: StockVllm, first: int) -> tuple[list[list[int]], list[Got]]:
    """Kill a server while the frontend has requests, and wait for all answers.

    The first answer has begun then. Returns the prompts and the answers."""
    prompts = [prompt(first + n, 300) for n in range(4 * SEQS)]
    answers = [Got() for _ in prompts]
    asking = asyncio.gather(
        *(
            peers.ask(ids, got, stream=n % 4 < 2, max_tokens=LONG)
            for n, (ids, got) in enumerate(zip(prompts, answers, strict=True))
        )
    )
    begun = [asyncio.create_task(got.first.wait()) for got in answers]
    await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
    for task in begun:
        task.cancel()
    await asyncio.to_thread(server.kill)
    await asking
    await peers.idle()
    return prompts, answers


def body(ids: Sequence[int]) -> dict[str, Any]:
    """A request with this prompt."""
    told = {"model": "m", "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    return told | {"prompt": list(ids), "return_token_ids": True}


def prompt(number: int, length: int = 200) -> list[int]:
    """A prompt that begins unlike those with other numbers."""
    return [5 + (number * 37 + n * (number + 3)) % 300 for n in range(length)]


def right(oracle: Oracle, prompts: list[list[int]], count: int = COUNT) -> list[list[int]]:
    """What one plain engine answers."""
    return [list(told.token_ids) for told in oracle.generate(prompts, count, ignore_eos=True)]


WORK = ["vllm:num_requests_running", "vllm:num_requests_waiting"]
READ = "vllm:external_prefix_cache_hits_total"
"""Counts the tokens whose KV a server has got through its connector."""


@pytest.fixture(scope="module")
def pair(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    directory = tmp_path_factory.mktemp("pair")
    (directory / "etcd").mkdir()
    with ExitStack() as stack:
        servers = stack.enter_context(stock_vllm(directory, model_path, ["prefill", "decode"]))
        etcd = stack.enter_context(EtcdServer(directory / "etcd"))
        told = ("--port", "0", "--servers", ",".join(f"{s.role}={s.url}" for s in servers))
        served = stack.enter_context(frontend(etcd, directory / "frontend.log", model_path, *told))
        peers = Peers(*servers, served)
        for server in servers:
            server.ready()
        asyncio.run(peers.ready())
        yield peers


@pytest.mark.essential
async def test_a_pair_answers_as_one_engine(pair: Peers, oracle: Oracle) -> None:
    prompts = [prompt(0), prompt(1, 17), prompt(2, 700)]
    before = await pair.counter(READ, pair.decode)
    asked = [await pair.ask(ids, stream=n % 2 == 0) for n, ids in enumerate(prompts)]
    assert [got.tokens for got in asked] == right(oracle, prompts)
    said = [{"role": "user", "content": "What is said here is long enough for a block of KV."}]
    chat = [
        await pair.ask((), path="chat/completions", messages=said, stream=stream)
        for stream in (False, True)
    ]
    asked_for = chat[0].events[0]["prompt_token_ids"]
    assert [got.tokens for got in chat] == right(oracle, [asked_for]) * 2
    read = await pair.counter(READ, pair.decode) - before
    assert read > 800, "the KV has been read, not computed"
    await pair.idle()


async def _comes_back(pair: Peers, server: StockVllm, oracle: Oracle, first: int) -> None:
    """Start a server again. KV travels as before."""
    server.launch()
    await asyncio.to_thread(server.ready)
    await pair.ready()
    before = await pair.counter(READ, pair.decode)
    prompts = [prompt(first), prompt(first + 1)]
    asked = [await pair.ask(ids) for ids in prompts]
    assert [got.tokens for got in asked] == right(oracle, prompts)
    assert await pair.counter(READ, pair.decode) - before > 300


@pytest.mark.long
async def test_no_request_fails_when_the_prefill_server_is_killed(
    pair: Peers, oracle: Oracle
) -> None:
    prompts, answers = await killed(pair, pair.prefill, 200)
    assert [got.error for got in answers] == [""] * len(answers)
    assert [got.tokens for got in answers] == right(oracle, prompts, LONG)
    stages = [await pair.stages(got) for got in answers]
    assert {told[-1] for told in stages} == {("decode", "ok")}
    assert any(pair.prefill.url in result for told in stages for _, result in told)
    await _comes_back(pair, pair.prefill, oracle, 250)


@pytest.mark.long
async def test_each_request_ends_when_the_decode_server_is_killed(
    pair: Peers, oracle: Oracle
) -> None:
    decode = pair.decode
    prompts, answers = await killed(pair, decode, 300)
    failed = [got for got in answers if got.error]
    assert failed
    for got, expected in zip(answers, right(oracle, prompts, LONG), strict=True):
        assert got.tokens == expected[: len(got.tokens)]
        assert got.error or got.tokens == expected
    for got in failed:
        assert f"decode server {decode.url} " in got.error
        assert "look whether it runs" in got.error
    refused = await pair.ask(prompt(1))
    assert refused.status == 503
    assert f"no stock decode server is ready: {decode.url} is failing" in refused.error
    await pair.freed()
    await _comes_back(pair, decode, oracle, 350)
