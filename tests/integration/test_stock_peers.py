"""One stock prefill server and one stock decode server with NixlConnector behind our frontends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.oracle import Oracle
from tests.support.stock_peers import (
    FORWARDERS,
    LONG,
    Peers,
    killed,
    prompt,
    right,
    stock_peers,
)
from tests.support.stock_vllm import SEQS, StockVllm

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        find_spec("nixl") is None, reason="nixl is not installed (make install-nixl)"
    ),
]
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
