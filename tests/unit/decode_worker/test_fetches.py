"""Which prompts have their prefix fetched."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pullfill.decode_worker.prefix import fetches
from tests.support.fetch_rig import LEAST, FetchWorker
from tests.support.kv_engine import BLOCK
from tests.support.transfer_rigs import RIGS

TOKENS = list(range(10 * BLOCK + 1))


@pytest.fixture
async def worker(tmp_path: Path) -> FetchWorker:
    return FetchWorker(RIGS["loopback"](tmp_path), "asker")


@pytest.fixture
def asked(worker: FetchWorker, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(worker.fetches, "_start", found.append)
    return found


def hint(worker: FetchWorker, tokens: int, name: str = "holder") -> Any:
    made = msgspec.structs.replace(worker.holds(0), instance_id=name, tokens=tokens)
    return msgspec.structs.replace(made, control="tcp://127.0.0.1:1")


async def look(worker: FetchWorker, holder: Any, hit: int = 0, **fields: Any) -> Any:
    request = worker.request(TOKENS, holder)
    for name, value in fields.items():
        setattr(request, name, value)
    answer = worker.side.decide(request, hit)
    await asyncio.sleep(0)
    return answer


async def test_a_prefix_that_is_hardly_longer_or_cannot_be_shared_is_computed(
    worker: FetchWorker, asked: list[Any]
) -> None:
    assert await look(worker, hint(worker, 10 * BLOCK), mm_features=[object()]) == (0, False)
    # One of the rules that look at the request alone: test_rules.py
    assert await look(worker, hint(worker, 10 * BLOCK), pooling_params=object()) == (0, False)
    assert await look(worker, hint(worker, 10 * BLOCK), hit=9 * BLOCK) == (0, False)
    assert await look(worker, hint(worker, LEAST - 1)) == (0, False)
    assert await look(worker, None) == (0, False)
    assert await look(worker, hint(worker, 10 * BLOCK, "asker")) == (0, False), "that is us"
    worker.config = msgspec.structs.replace(worker.config, min_fetch_tokens=0)
    assert await look(worker, hint(worker, 10 * BLOCK)) == (0, False), "it is switched off"
    assert asked == []


async def test_no_prompt_waits_for_an_asyncio_thread_that_hangs(
    worker: FetchWorker, asked: list[Any]
) -> None:
    request = worker.request(TOKENS, hint(worker, 10 * BLOCK))
    assert worker.side.decide(request, 0) == (None, False)
    assert worker.side.decide(request, 0) == (None, False)
    fetch = worker.fetches._open.get(request.request_id)
    assert fetch is not None
    fetch.answer_by = 0.0
    assert worker.side.decide(request, 0) == (0, False)
    assert worker.side.decide(request, 0) == (0, False)
    worker.side.request_finished(request)
    assert not worker.fetches._open


async def test_a_burst_of_prompts_asks_for_so_many_prefixes(
    worker: FetchWorker, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks about all prompts that wait before the asyncio thread gets a turn."""
    monkeypatch.setattr(fetches, "MOST", 2)
    burst = []
    for number in range(4):
        request = worker.request([number, *TOKENS[1:]], hint(worker, 10 * BLOCK))
        request.request_id = f"r{number}"
        burst.append(request)
    answers = [worker.side.decide(request, 0) for request in burst]
    assert answers == [(None, False), (None, False), (0, False), (0, False)]
    await asyncio.sleep(0)
    assert [fetch.request_id for fetch in asked] == ["r0", "r1"]
    for request in burst:
        worker.side.request_finished(request)
    later = worker.request(TOKENS, hint(worker, 10 * BLOCK))
    assert worker.side.decide(later, 0) == (None, False), "those that have ended do not count"
