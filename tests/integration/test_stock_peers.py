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
    Got,
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


_SAID = [
    {"role": "user", "content": "What is said in a chat is long enough for a few blocks of KV."}
]


@pytest.mark.long
async def test_more_requests_than_the_servers_take_at_once(pair: Peers, oracle: Oracle) -> None:
    prompts = [prompt(100 + n, 90 + n) for n in range(6 * SEQS)]
    ways = list(FORWARDERS)
    asked = await asyncio.gather(
        *(pair.ask(ways[n % 2], ids, stream=n % 4 < 2) for n, ids in enumerate(prompts))
    )
    assert [got.tokens for got in asked] == right(oracle, prompts)
    await pair.idle()


@pytest.mark.long
async def test_nothing_runs_on_for_clients_that_leave(pair: Peers) -> None:
    ways = [(how, stream, early) for how in FORWARDERS for stream in (0, 1) for early in (0, 1)]
    for number, (how, stream, early) in enumerate(ways):
        answers = [Got() for _ in range(3)]
        asking = [
            asyncio.create_task(
                pair.ask(how, prompt(number + n, 900), got, stream=bool(stream), max_tokens=1000)
            )
            for n, got in enumerate(answers, 50)
        ]
        if stream and not early:
            await answers[0].first.wait()
        else:
            await asyncio.sleep(0.1 if early else 0.5)
        assert not any(task.done() for task in asking)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await pair.idle()
    await pair.freed()


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
