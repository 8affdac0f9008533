"""Block events from a decode worker's request server to frontends, over real ZMQ sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from pullfill.decode_worker.prefix import block_events
from pullfill.engine import front_wire
from pullfill.frontend.decode_connection import DecodeConnection
from pullfill.frontend.routing.prefixes import Prefixes
from tests.support.block_server import SIZE, BlockServer, prompt_hashes
from tests.support.frontend_rig import Rig, rig, until

A = list(range(100, 100 + 5 * SIZE))
WORKER = "decode-1"


@pytest.fixture
async def worker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BlockServer]:
    made = BlockServer(monkeypatch, WORKER)
    yield made
    await made.die()


async def joined(r: Rig, worker: BlockServer) -> DecodeConnection:
    r.directory.put(worker.record)
    await r.ready(1)
    return r.pool.candidates()[0]


def known(r: Rig) -> int:
    return int(r.pool.prefixes.status(WORKER, 0.0).get("blocks", 0))


def matched(r: Rig, tokens: list[int]) -> int:
    return r.pool.prefixes.matched(prompt_hashes(tokens)).blocks.get(WORKER, 0)


async def warm(r: Rig, count: int) -> None:
    def is_warm() -> bool:
        return r.pool.prefixes.state(WORKER) == "warm" and known(r) == count

    await until(is_warm)


async def test_blocks_stored_before_and_after_a_frontend_came(worker: BlockServer) -> None:
    worker.store(A)
    async with rig(prefixes=Prefixes(1000)) as r:
        await joined(r, worker)
        await warm(r, 5)
        assert matched(r, [*A, 1]) == 5
        assert matched(r, A[: 2 * SIZE] + [1] * SIZE) == 2
        worker.remove(A, A[: 4 * SIZE])
        await warm(r, 3)
        worker.store([7] * SIZE)
        await warm(r, 4)
        assert matched(r, [7] * SIZE) == 1


async def test_a_frontend_without_an_index_is_sent_nothing(
    worker: BlockServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[bytes] = []
    handle = DecodeConnection._handle
    monkeypatch.setattr(
        DecodeConnection,
        "_handle",
        lambda self, kind, frames: (kinds.append(kind), handle(self, kind, frames)),
    )
    async with rig() as plain, rig(prefixes=Prefixes(1000)) as r:
        await joined(plain, worker)
        await joined(r, worker)
        await warm(r, 0)
        worker.store(A)
        await warm(r, 5)
        assert plain.pool.prefixes.state(WORKER) == "none"
        assert kinds.count(front_wire.BLKS) == 2, "one answer, and one batch of events"


async def test_more_blocks_than_the_ring_has_events(
    worker: BlockServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot comes in pages, while blocks come and go."""
    monkeypatch.setattr(block_events, "RING_EVENTS", 100)
    small = BlockServer(monkeypatch, WORKER)
    rng = random.Random(3)
    prompts = [[rng.randrange(999) for _ in range(SIZE)] for _ in range(1000)]
    for prompt in prompts:
        small.store(prompt)
    await until(lambda: small.blocks.status()["events"] == 1000)
    async with rig(prefixes=Prefixes(10_000)) as r:
        await joined(r, small)
        for prompt in prompts[:50]:
            small.remove(prompt)
        await warm(r, 950)
        assert (matched(r, prompts[0]), matched(r, prompts[-1])) == (0, 1)
    await small.die()


@pytest.mark.parametrize("payload", [b"", b"nonsense"])
async def test_a_question_that_cannot_be_read_ends_that_connection_alone(
    worker: BlockServer, payload: bytes
) -> None:
    worker.store(A)
    async with rig(prefixes=Prefixes(1000)) as bad, rig(prefixes=Prefixes(1000)) as good:
        connection = await joined(bad, worker)
        await joined(good, worker)
        await warm(good, 5)
        connection.send(front_wire.FOLW, payload)
        await until(lambda: bad.sink.gone == [WORKER])
        worker.remove(A)
        await warm(good, 4)
        assert good.sink.gone == []


async def test_an_engine_in_long_steps_delays_events_and_loses_none(worker: BlockServer) -> None:
    async with rig(prefixes=Prefixes(10_000)) as r:
        await joined(r, worker)
        await warm(r, 0)
        worker.step_s = 0.2
        for number in range(200):
            worker.store([number] * SIZE)
            if number % 20 == 0:
                await asyncio.sleep(0.02)
        await warm(r, 200)
