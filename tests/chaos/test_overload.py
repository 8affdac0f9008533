"""More than the cluster can take: refused politely, never collapsed, and nothing left behind."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.support import web
from tests.support.cluster import MODEL, Cluster, until
from tests.support.oracle import Oracle
from tests.support.prompts import random_prompt, truth

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS = 6
LIMIT = 24


def request(prompt: list[int], max_tokens: int, *, stream: bool = False) -> dict[str, Any]:
    return {
        "model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, "stream": stream,
    }  # fmt: skip


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(60)
    )


@pytest.fixture
def narrow(paired: Cluster) -> Iterator[Cluster]:
    """Its frontend serves LIMIT requests at once, and little KV may wait for prefill workers."""
    usual = paired.frontend_url
    paired.set_router(max_remote_kv_fraction=0.1)
    frontend = paired.launch("frontend", "--max-inflight", str(LIMIT))
    try:
        until(lambda: web.ready(paired.frontend_url), 60, "the narrow frontend is ready")
        yield paired
    finally:
        frontend.kill()
        paired.frontend_url = usual
        paired.set_router(max_remote_kv_fraction=0.5)


class Crowd:
    """Clients that send one request after the other, and again soon after a 429."""

    def __init__(self, url: str, prompts: list[list[int]]) -> None:
        self._url = f"{url}/v1/completions"
        self._prompts = prompts
        self.statuses: Counter[int] = Counter()
        self.answers: list[tuple[int, list[int]]] = []
        self.left = 0

    async def run(self, clients: int, seconds: float) -> None:
        async with session() as http:
            end = time.monotonic() + seconds
            await asyncio.gather(*(self._client(http, i, end) for i in range(clients)))

    async def _client(self, http: aiohttp.ClientSession, number: int, end: float) -> None:
        turn = number
        while time.monotonic() < end:
            turn += 1
            which = turn % len(self._prompts)
            if turn % 5 == 0:
                await self._go_away(http, which)
            else:
                await self._ask(http, which)

    async def _ask(self, http: aiohttp.ClientSession, which: int) -> None:
        async with http.post(self._url, json=request(self._prompts[which], STEPS)) as answer:
            self.statuses[answer.status] += 1
            body = await answer.json()
            if answer.status == 200:
                self.answers.append((which, body["choices"][0]["token_ids"]))
                return
            assert answer.headers["Retry-After"] == "1"
            assert "--max-inflight" in body["error"]["message"]
        await asyncio.sleep(0.1)

    async def _go_away(self, http: aiohttp.ClientSession, which: int) -> None:
        """A stream that is left after its first bytes: its place must be free again."""
        body = request(self._prompts[which], 500, stream=True)
        async with http.post(self._url, json=body) as answer:
            self.statuses[answer.status] += 1
            if answer.status == 200:
                self.left += bool(await answer.content.readany())
                answer.close()


@pytest.mark.essential
def test_overload_is_answered_rightly_or_refused(narrow: Cluster, oracle: Oracle) -> None:
    prompts = [random_prompt(length, seed=31_000 + i)
               for i in range(8) for length in (40, 400, 1200)]  # fmt: skip
    crowd, before = Crowd(narrow.frontend_url, prompts), _decided(narrow)
    asyncio.run(crowd.run(clients=60, seconds=6.0))
    assert crowd.statuses.keys() == {200, 429}
    assert len(crowd.answers) > 10
    assert crowd.left > 0
    expected = [tokens for tokens, _ in truth(oracle, prompts, STEPS)]
    for which, tokens in crowd.answers:
        assert tokens == expected[which]
    refused = narrow.counter("pullfill_frontend_refused_total", reason="full")
    assert refused == crowd.statuses[429]
    remote, full = (a - b for a, b in zip(_decided(narrow), before, strict=True))
    assert min(remote, full) > 0, "some prompts go remote, and some find too much KV waiting"
    narrow.assert_clean()
    # As many as there are places, at once: none of the places was lost on the way.
    after = Crowd(narrow.frontend_url, prompts)

    async def fill() -> None:
        async with session() as http:
            await asyncio.gather(*(after._ask(http, i) for i in range(LIMIT)))

    asyncio.run(fill())
    assert after.statuses == {200: LIMIT}


def _decided(cluster: Cluster) -> tuple[float, float]:
    name = "pullfill_decision_total"
    return cluster.counter(name, path="remote"), cluster.counter(name, reason="remote_full")
