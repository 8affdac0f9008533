"""One stock prefill server and one stock decode server with NixlConnector behind our frontend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import openai
import pytest

from tests.support import web
from tests.support.answers import ask_for
from tests.support.cluster import StockWorker, stock_vllm, until
from tests.support.frontend_http import Served, serve
from tests.support.oracle import Oracle

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        find_spec("nixl") is None, reason="nixl is not installed (make install-nixl)"
    ),
]
END_S = 60.0
"""No request may take longer."""
WORK = ("vllm:num_requests_running", "vllm:num_requests_waiting")
READ = "vllm:external_prefix_cache_hits_total"
"""Counts the tokens whose KV a server has got through its connector."""
TEXT = "What is said here is long enough for a block of KV."


@dataclass
class Pair:
    """The servers, and the frontend before them."""

    prefill: StockWorker
    decode: StockWorker
    frontend: Served

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.frontend.url}/v1", api_key="none", max_retries=0, timeout=END_S
        )

    def told(self, *prompts: Sequence[int] | str) -> list[list[int]]:
        """The answers to these prompts. Each second one is streamed."""
        asked = [
            ask_for(self, prompt, 8, model="m", stream=n % 2 == 0)
            for n, prompt in enumerate(prompts)
        ]
        assert all(heard.done.wait(END_S) for heard in asked)
        return [heard.tokens for heard in asked]

    def ready(self) -> None:
        """Wait until the frontend sees both."""
        url, both = self.frontend.url, {"prefill": 1, "decode": 1}
        until(lambda: web.ready(url).get("stock") == both, END_S, "both are ready")


def prompt(number: int, length: int = 200) -> list[int]:
    """A prompt that begins unlike those with other numbers."""
    return [5 + (number * 37 + n * (number + 3)) % 300 for n in range(length)]


def right(oracle: Oracle, prompts: list[list[int]]) -> list[list[int]]:
    """What one plain engine answers."""
    return [list(told.token_ids) for told in oracle.generate(prompts, 8, ignore_eos=True)]


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
    before = pair.decode.counter(READ)
    prompts = [prompt(0), prompt(1, 17), prompt(2, 700)]
    assert pair.told(*prompts) == right(oracle, prompts)
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 8, "temperature": 0}
    url = f"{pair.frontend.url}/v1/chat/completions"
    body |= {"model": "m", "ignore_eos": True, "return_token_ids": True}
    chat = web.post(url, json=body, timeout=END_S).json()
    expected = right(oracle, [chat["prompt_token_ids"]])
    assert [chat["choices"][0]["token_ids"]] == pair.told(TEXT) == expected
    read = pair.decode.counter(READ) - before
    assert read > 800, "the KV has been read, not computed"
    working = [(server, name) for server in (pair.prefill, pair.decode) for name in WORK]
    until(lambda: not any(s.counter(name) for s, name in working), 5.0, "no server works")
