"""One stock prefill server and one stock decode server with NixlConnector behind our frontends."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from pullfill.frontend.forward.servers import load_of
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
FORWARDERS = {"staged": ("staged",), "batch": ("batch", "--dispatch", "serial")}
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
    """The servers, prefill servers first. frontends: by forwarder, see FORWARDERS."""

    servers: list[StockVllm]
    frontends: dict[str, Served]

    def of(self, role: str) -> list[StockVllm]:
        return [server for server in self.servers if server.role == role]

    async def ask(
        self, how: str, ids: Sequence[int], got: Got | None = None, *, path: str = "completions",
        **fields: Any,
    ) -> Got:  # fmt: skip
        """Send a request with this prompt and read the answer to its end."""
        got = got or Got()
        told = body(ids) | fields
        url = f"{self.frontends[how].url}/v1/{path}"
        async with asyncio.timeout(END_S), httpx.AsyncClient(verify=False, timeout=END_S) as http:
            async with http.stream(
                "POST", url, json=told, headers={"x-request-id": got.request_id}
            ) as answer:
                got.status = answer.status_code
                async for part in answer.aiter_bytes():
                    got.body += part
                    got.first.set()
        return got

    async def stages(self, how: str, got: Got) -> list[tuple[str, str]]:
        """What became of each stage of a request to /v1/completions: its name and its result."""
        url = f"{self.frontends[how].url}/pullfill/requests/cmpl-{got.request_id}"
        async with asyncio.timeout(END_S), httpx.AsyncClient(verify=False) as http:
            while "path" not in (told := (await http.get(url)).json()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return [(stage["stage"], stage["result"]) for stage in told["stages"]]

    async def ready(self, prefill: int, decode: int) -> None:
        """Wait until the frontends see so many servers that can take requests."""
        wanted = {"prefill": prefill, "decode": decode}
        async with asyncio.timeout(END_S), httpx.AsyncClient(verify=False) as http:
            for served in self.frontends.values():
                while (await http.get(f"{served.url}/ready")).json()["stock"] != wanted:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

    async def idle(self) -> None:
        """Wait until no server that is alive works at a request or has one that waits."""
        await self._loads(lambda load: (load.running, load.waiting) == (0, 0), 5.0)

    async def freed(self) -> None:
        """Wait until no server that is alive holds a block. Blocks that nobody has read, a prefill
        server holds for its lease."""
        await self._loads(
            lambda load: (load.running, load.waiting, load.kv_used) == (0, 0, 0), LEASE_S + 20.0
        )

    async def counter(self, name: str, server: StockVllm) -> float:
        """The sum of a counter in a server's /metrics."""
        async with httpx.AsyncClient(verify=False) as http:
            lines = (await http.get(f"{server.url}/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    async def _loads(self, holds: Any, within_s: float) -> None:
        async with httpx.AsyncClient(verify=False) as http, asyncio.timeout(within_s):
            for server in (s for s in self.servers if s.alive):
                while not holds(load_of((await http.get(f"{server.url}/metrics")).text)):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)


@contextmanager
def stock_peers(directory: Path, model: Path, prefill: int, decode: int) -> Iterator[Peers]:
    """So many servers of each role, and the frontends, all ready."""
    roles = ["prefill"] * prefill + ["decode"] * decode
    (directory / "etcd").mkdir()
    with ExitStack() as stack:
        servers = stack.enter_context(stock_vllm(directory, model, roles))
        etcd = stack.enter_context(EtcdServer(directory / "etcd"))
        names = ",".join(f"{server.role}={server.url}" for server in servers)
        frontends = {}
        for how, flags in FORWARDERS.items():
            told = ("--port", "0", "--servers", names, "--forwarder", *flags)
            log = directory / f"frontend-{how}.log"
            frontends[how] = stack.enter_context(frontend(etcd, log, model, *told))
        peers = Peers(servers, frontends)
        for server in servers:
            server.ready()
        asyncio.run(peers.ready(prefill, decode))
        yield peers


async def killed(peers: Peers, server: StockVllm, first: int) -> tuple[list[list[int]], list[Got]]:
    """Kill a server while both frontends have requests, and wait for all answers.

    The first answer has begun then. Returns the prompts and the answers."""
    prompts = [prompt(first + n, 300) for n in range(4 * SEQS)]
    answers = [Got() for _ in prompts]
    ways = list(FORWARDERS)
    asking = asyncio.gather(
        *(
            peers.ask(ways[n % 2], ids, got, stream=n % 4 < 2, max_tokens=LONG)
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


each = pytest.mark.parametrize("how", FORWARDERS)
READ = "vllm:external_prefix_cache_hits_total"
"""Counts the tokens whose KV a server has got through its connector."""


@pytest.fixture(scope="module")
def pair(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    with stock_peers(tmp_path_factory.mktemp("pair"), model_path, 1, 1) as peers:
        yield peers


@each
@pytest.mark.essential
async def test_a_pair_answers_as_one_engine(how: str, pair: Peers, oracle: Oracle) -> None:
    first = list(FORWARDERS).index(how) * 10
    prompts = [prompt(first), prompt(first + 1, 17), prompt(first + 2, 700)]
    (decode,) = pair.of("decode")
    before = await pair.counter(READ, decode)
    asked = [await pair.ask(how, ids, stream=n % 2 == 0) for n, ids in enumerate(prompts)]
    assert [got.tokens for got in asked] == right(oracle, prompts)
    said = [{"role": "user", "content": "What is said here is long enough for a block of KV."}]
    chat = [
        await pair.ask(how, (), path="chat/completions", messages=said, stream=stream)
        for stream in (False, True)
    ]
    asked_for = chat[0].events[0]["prompt_token_ids"]
    assert [got.tokens for got in chat] == right(oracle, [asked_for]) * 2
    assert await pair.counter(READ, decode) - before > 800, "the KV has been read, not computed"
    await pair.idle()


async def _comes_back(pair: Peers, server: StockVllm, oracle: Oracle, first: int) -> None:
    """Start a server again. KV travels as before."""
    server.launch()
    await asyncio.to_thread(server.ready)
    await pair.ready(1, 1)
    (decode,) = pair.of("decode")
    before = await pair.counter(READ, decode)
    prompts = [prompt(first), prompt(first + 1)]
    asked = [await pair.ask(how, ids) for how, ids in zip(FORWARDERS, prompts, strict=True)]
    assert [got.tokens for got in asked] == right(oracle, prompts)
    assert await pair.counter(READ, decode) - before > 300


@pytest.mark.long
async def test_no_request_fails_when_the_prefill_server_is_killed(
    pair: Peers, oracle: Oracle
) -> None:
    (prefill,) = pair.of("prefill")
    prompts, answers = await killed(pair, prefill, 200)
    assert [got.error for got in answers] == [""] * len(answers)
    assert [got.tokens for got in answers] == right(oracle, prompts, LONG)
    stages = [
        await pair.stages(how, got)
        for how, got in zip([*FORWARDERS] * 2 * SEQS, answers, strict=True)
    ]
    assert {told[-1] for told in stages} == {("decode", "ok")}
    assert any(prefill.url in result for told in stages for _, result in told)
    await _comes_back(pair, prefill, oracle, 250)


@pytest.mark.long
async def test_each_request_ends_when_the_decode_server_is_killed(
    pair: Peers, oracle: Oracle
) -> None:
    (decode,) = pair.of("decode")
    prompts, answers = await killed(pair, decode, 300)
    failed = [got for got in answers if got.error]
    assert failed
    for got, expected in zip(answers, right(oracle, prompts, LONG), strict=True):
        assert got.tokens == expected[: len(got.tokens)]
        assert got.error or got.tokens == expected
    for got in failed:
        assert f"decode server {decode.url} " in got.error
        assert "look whether it runs" in got.error
    for how in FORWARDERS:
        refused = await pair.ask(how, prompt(1))
        assert refused.status == 503
        assert f"no stock decode server is ready: {decode.url} is failing" in refused.error
    await pair.freed()
    await _comes_back(pair, decode, oracle, 350)
