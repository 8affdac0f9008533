"""One stock prefill server and one stock decode server with NixlConnector behind our frontend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support import web
from tests.support.answers import Heard, ask_for
from tests.support.frontend_http import Served, serve
from tests.support.oracle import Oracle
from tests.support.stock_vllm import LEASE_S, SEQS, StockVllm, stock_vllm
from tests.support.waiting import eventually, until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        find_spec("nixl") is None, reason="nixl is not installed (make install-nixl)"
    ),
]
LONG = 64
"""Tokens of an answer that a server is killed in."""
END_S = 60.0
"""No request may take longer, whatever happens to the servers."""
WORK = ("vllm:num_requests_running", "vllm:num_requests_waiting")
READ = "vllm:external_prefix_cache_hits_total"
"""Counts the tokens whose KV a server has got through its connector."""
TEXT = "What is said here is long enough for a block of KV."


@dataclass
class Pair:
    """The servers, and the frontend before them."""

    prefill: StockVllm
    decode: StockVllm
    frontend: Served

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.frontend.url}/v1", api_key="none", max_retries=0, timeout=END_S
        )

    def ask(self, prompt: Sequence[int] | str, max_tokens: int = 8, **options: Any) -> Heard:
        """Begin a request."""
        return ask_for(self, prompt, max_tokens, model="m", **options)

    def told(self, *prompts: Sequence[int] | str) -> list[list[int]]:
        """The answers to these prompts. Each second one is streamed."""
        asked = [self.ask(prompt, stream=n % 2 == 0) for n, prompt in enumerate(prompts)]
        assert all(heard.done.wait(END_S) for heard in asked)
        return [heard.tokens for heard in asked]

    def stages(self, heard: Heard) -> list[dict[str, Any]]:
        """What became of each stage of a request. Its record comes a moment after its answer."""
        url = f"{self.frontend.url}/pullfill/requests/{heard.request_id}"
        found: list[dict[str, Any]] = until(lambda: web.get(url).json().get("stages"), 20, "told")
        return found

    def ready(self) -> None:
        """Wait until the frontend sees both."""
        url, both = self.frontend.url, {"prefill": 1, "decode": 1}
        until(lambda: web.ready(url).get("stock") == both, END_S, "both are ready")

    def idle(self, *gauges: str, within_s: float = 5.0) -> None:
        """Wait until no server that is alive works at a request or has one that waits."""
        alive = [server for server in (self.prefill, self.decode) if server.alive]
        until(
            lambda: not any(count(name, server) for name in (*WORK, *gauges) for server in alive),
            within_s,
            "no server works",
        )

    def killed(self, server: StockVllm, first: int) -> tuple[list[list[int]], list[Heard]]:
        """Kill a server while there are requests, and wait for all answers.

        The first answer has begun then. Returns the prompts and the answers."""
        prompts = [prompt(first + n, 300) for n in range(4 * SEQS)]
        answers = [self.ask(ids, LONG, stream=n % 4 < 2) for n, ids in enumerate(prompts)]
        eventually(lambda: any(heard.tokens for heard in answers))
        server.kill()
        assert all(heard.done.wait(END_S) for heard in answers)
        self.idle()
        return prompts, answers

    def comes_back(self, server: StockVllm, oracle: Oracle, first: int) -> None:
        """Start a server again. KV travels as before."""
        server.launch()
        server.ready()
        self.ready()
        before = count(READ, self.decode)
        prompts = [prompt(first), prompt(first + 1)]
        assert self.told(*prompts) == right(oracle, prompts)
        assert count(READ, self.decode) - before > 300


def count(name: str, server: StockVllm) -> float:
    """The sum of a counter in a server's /metrics."""
    lines = web.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def prompt(number: int, length: int = 200) -> list[int]:
    """A prompt that begins unlike those with other numbers."""
    return [5 + (number * 37 + n * (number + 3)) % 300 for n in range(length)]


def right(oracle: Oracle, prompts: list[list[int]], tokens: int = 8) -> list[list[int]]:
    """What one plain engine answers."""
    return [list(told.token_ids) for told in oracle.generate(prompts, tokens, ignore_eos=True)]


@pytest.fixture(scope="module")
def pair(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack:
        servers = stack.enter_context(stock_vllm(directory, model_path, ["prefill", "decode"]))
        names = ",".join(f"{server.role}={server.url}" for server in servers)
        made = Pair(*servers, stack.enter_context(serve(directory, model_path, "--servers", names)))
        for server in servers:
            server.ready()
        made.ready()
        yield made


@pytest.mark.essential
def test_a_pair_answers_as_one_engine(pair: Pair, oracle: Oracle) -> None:
    before = count(READ, pair.decode)
    prompts = [prompt(0), prompt(1, 17), prompt(2, 700)]
    assert pair.told(*prompts) == right(oracle, prompts)
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 8, "temperature": 0}
    url = f"{pair.frontend.url}/v1/chat/completions"
    body |= {"model": "m", "ignore_eos": True, "return_token_ids": True}
    chat = web.post(url, json=body, timeout=END_S).json()
    expected = right(oracle, [chat["prompt_token_ids"]])
    assert [chat["choices"][0]["token_ids"]] == pair.told(TEXT) == expected
    read = count(READ, pair.decode) - before
    assert read > 800, "the KV has been read, not computed"
    pair.idle()


@pytest.mark.long
def test_no_request_fails_when_the_prefill_server_is_killed(pair: Pair, oracle: Oracle) -> None:
    prompts, answers = pair.killed(pair.prefill, 200)
    assert [heard.error for heard in answers] == [""] * len(answers)
    assert [heard.tokens for heard in answers] == right(oracle, prompts, LONG)
    told = [pair.stages(heard) for heard in answers]
    assert {(stages[-1]["stage"], stages[-1]["result"]) for stages in told} == {("decode", "ok")}
    assert any(pair.prefill.url in stage["result"] for stages in told for stage in stages)
    pair.comes_back(pair.prefill, oracle, 250)


@pytest.mark.long
def test_each_request_ends_when_the_decode_server_is_killed(pair: Pair, oracle: Oracle) -> None:
    decode = pair.decode
    prompts, answers = pair.killed(decode, 300)
    failed = [heard.error for heard in answers if heard.error]
    assert failed
    for heard, expected in zip(answers, right(oracle, prompts, LONG), strict=True):
        assert heard.tokens == expected[: len(heard.tokens)]
        assert heard.error or heard.tokens == expected
    for error in failed:
        assert f"decode server {decode.url} " in error
        assert "look whether it runs" in error
    refused = pair.ask(prompt(1))
    assert refused.done.wait(END_S)
    assert refused.status == 503
    assert f"no stock decode server is ready: {decode.url} is failing" in refused.error
    # Blocks that nobody has read, a prefill server holds for its lease.
    pair.idle("vllm:kv_cache_usage_perc", within_s=LEASE_S + 20.0)
    pair.comes_back(decode, oracle, 350)
