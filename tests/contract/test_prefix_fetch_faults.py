"""Prefix fetches when something is late, broken or about to end."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import pytest

from pullfill.decode_worker.kv_reader import KvReader
from pullfill.decode_worker.prefix import fetches, read_leases
from pullfill.decode_worker.prefix.holders import Holders
from pullfill.errors import PeerUnavailable, TransferFailed
from pullfill.transfer.shm.fence import ShmHold
from pullfill.wire import FenceToken, Lease, u32
from tests.contract.test_prefix_fetch import PREFIX, Pair, pair, prompt, until
from tests.support.kv_engine import BLOCK, NUM_BLOCKS

__all__ = ["pair"]


class SlowReads:
    """The first read waits until `open` is set, or until it is interrupted, as over TCP."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.begun = 0
        interrupted = threading.Event()
        real = KvReader._fetch

        def fetch(reader: KvReader, fence: Any, source: Any, target: Any, wanted: Any) -> Any:
            self.begun += 1
            self.reached.set()
            if not reader.connected:
                reader._connect()
            if not wanted():
                return real(reader, fence, source, target, lambda: False)
            while not self.open.wait(0.005):
                if interrupted.is_set():
                    interrupted.clear()
                    raise TransferFailed("interrupted")
            return real(reader, fence, source, target, lambda: True)

        monkeypatch.setattr(KvReader, "_fetch", fetch)
        monkeypatch.setattr(KvReader, "interrupt", lambda _: interrupted.set())


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowReads:
    return SlowReads(monkeypatch)


async def test_a_read_in_the_queue_does_not_interrupt_the_one_before_it(
    pair: Pair, slow: SlowReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = prompt(PREFIX + 1), prompt(PREFIX + 1, seed=2)
    pool = pair.holder.pool
    cached = pair.holder.cache(first)
    pool.touch([pool.blocks[b] for b in cached])
    pair.holder.cache(second)
    pool.release(cached)
    one = await pair.asker.admit(pair.asker.request(first, pair.holder.holds(PREFIX)))
    await until(slow.reached.is_set)
    # Long enough that the read begins in time on a busy machine: one that does not is `busy`.
    monkeypatch.setattr(fetches, "_COPY_S", (0.5, 0.5))
    two = await pair.asker.admit(pair.asker.request(second, pair.holder.holds(PREFIX)))
    await until(lambda: two.loaded is not None or one.loaded is not None)
    assert one.loaded is None
    assert two.loaded is False, "it is computed, and need not wait for the lane"
    slow.open.set()
    assert (await pair.asker.end(one)).fetch == "fetched"
    assert (await pair.asker.end(two)).fetch == "busy"


async def test_a_read_that_is_too_slow_is_interrupted(
    pair: Pair, slow: SlowReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough that the read begins in time on a busy machine: one that does not is `busy`.
    monkeypatch.setattr(fetches, "_COPY_S", (0.5, 0.5))
    tokens = prompt(PREFIX + 1)
    pair.holder.cache(tokens)
    served = await pair.asker.admit(pair.asker.request(tokens, pair.holder.holds(PREFIX)))
    assert (await pair.asker.end(served)).fetch == "lost"


async def test_no_prompt_waits_for_a_session_that_does_not_open(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder answers, but its KV port does not. What opens too late copies nothing."""
    go, real = threading.Event(), pair.asker.holders._reach

    def reach(regions: Any) -> Any:
        def open_session() -> Any:
            assert go.wait(20.0)
            return real(regions)()

        return open_session

    monkeypatch.setattr(pair.asker.holders, "_reach", reach)
    monkeypatch.setattr(fetches, "_COPY_S", (0.2, 0.2))
    tokens = prompt(PREFIX + 1)
    pair.holder.cache(tokens)
    served = await pair.asker.admit(pair.asker.request(tokens, pair.holder.holds(PREFIX)))
    (reader,) = pair.asker.holders._readers
    try:
        async with asyncio.timeout(3.0):
            await until(lambda: served.loaded is not None)
    finally:
        go.set()
    assert await asyncio.to_thread(reader._thread.wait, 10.0)
    assert (pair.asker.pages[:, served.table] == 0xAA).all()
    assert (await pair.asker.end(served)).fetch == "lost"
    assert pair.asker.holders.away("holder"), "or the next prompt would wait as long"


async def test_a_lease_is_given_back_when_its_prompt_goes_another_way(pair: Pair) -> None:
    """With pipeline parallelism a step may run when vLLM asks again. Then nothing is fetched."""
    tokens = prompt(PREFIX + 1)
    pair.holder.cache(tokens)
    side, request = pair.asker.side, pair.asker.request(tokens, pair.holder.holds(PREFIX))
    assert side.decide(request, 0) == (None, False)
    await until(lambda: pair.holder.leases.open)
    side._scheduled.append([])
    assert side.decide(request, 0) == (0, False)
    side.enqueue(request, [[]], 0)
    side._scheduled.clear()
    async with asyncio.timeout(2.0):
        await until(lambda: not pair.holder.leases.open)
    assert not pair.asker.fetches._by_key, "other prompts would wait until this request is over"
    side.request_finished(request.request_id)


async def test_blocks_that_come_as_the_worker_leaves(pair: Pair) -> None:
    request = await pair.leased()
    served = pair.allocate(request)
    fetch = pair.asker.fetches._open.get(request.request_id)
    assert fetch is not None
    pair.asker.fetches._stop(fetch)  # what `close` does
    pair.asker.side.enqueue(request, [served.table], PREFIX)
    await until(lambda: served.loaded is not None)
    told = await pair.asker.end(served)
    assert (served.loaded, told.fetched_tokens) == (False, 0)


async def test_a_connection_that_is_made_while_the_worker_leaves(pair: Pair) -> None:
    using = asyncio.create_task(pair.asker.holders.use(pair.holder.holds(PREFIX)))
    await asyncio.sleep(0)
    await pair.asker.holders.close()
    with pytest.raises(PeerUnavailable):
        await using
    await until(lambda: not pair.holder.leases._askers)


@pytest.mark.parametrize("wrong", ["beyond", "odd", "many", "late"])
async def test_a_holder_that_answers_nonsense(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    tokens = prompt(PREFIX + 1)
    pair.holder.cache(tokens)
    real = read_leases.ReadLeases._given

    def given(self: Any, asker: Any, ask: Any, lease: Any) -> None:
        write = asker.channel.write

        def other(message: Any) -> None:
            if isinstance(message, Lease):
                ids = u32.unpack(message.block_ids)
                blocks, within_s = {
                    "beyond": (u32.pack([NUM_BLOCKS + 9, *ids[1:]]), 10.0),
                    "odd": (message.block_ids[:-1], 10.0),
                    "many": (u32.pack([*ids, *ids, 1 << 31]), 10.0),
                    "late": (message.block_ids, -1.0),
                }[wrong]
                message = Lease(
                    rid=message.rid, lease=message.lease, block_ids=blocks, fence=message.fence,
                    within_s=within_s,
                )  # fmt: skip
            write(message)

        monkeypatch.setattr(asker.channel, "write", other, raising=False)
        real(self, asker, ask, lease)

    monkeypatch.setattr(read_leases.ReadLeases, "_given", given)
    served = await pair.asker.admit(pair.asker.request(tokens, pair.holder.holds(PREFIX)))
    told = await pair.asker.end(served)
    assert served.loaded is (wrong == "many"), told


async def test_blocks_of_an_asker_that_is_stopped_stay_pinned_and_are_counted(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go = threading.Event(), threading.Event()

    def stopped(hold: ShmHold, token: FenceToken, enter: Any = ShmHold.enter) -> None:
        enter(hold, token)
        reached.set()
        assert go.wait(20.0)

    monkeypatch.setattr(ShmHold, "enter", stopped)
    tokens = prompt(PREFIX + 1)
    leased = set(pair.holder.cache(tokens))
    served = await pair.asker.admit(pair.asker.request(tokens, pair.holder.holds(PREFIX)))
    await until(reached.is_set)
    pair.holder.expire()
    assert pair.holder.leases.unproved_blocks == len(leased)
    assert not leased & pair.holder.pool.free
    async with asyncio.timeout(read_leases.LEASE_S / 2):
        await pair.holder.leases.drain()  # does not wait for it
    pair.holder.leases.reopen()
    go.set()
    assert (await pair.asker.end(served)).fetch == "expired"
    await until(lambda: not pair.holder.leases.open)
    assert pair.holder.leases.unproved_blocks == 0


@pytest.mark.parametrize("seed", range(2))
async def test_reads_that_are_cut_off_at_any_moment(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Each loaded block is what computing gives, and no copy goes on after its prompt was told."""
    rng = random.Random(seed)
    real = KvReader._fetch

    def fetch(reader: KvReader, *args: Any) -> Any:
        time.sleep(rng.random() * 0.004)
        return real(reader, *args)

    monkeypatch.setattr(KvReader, "_fetch", fetch)
    monkeypatch.setattr(fetches, "_COPY_S", (0.0, 0.004))
    monkeypatch.setattr(Holders, "failed", lambda *_: None)  # else the first one ends them all
    talks = [prompt(PREFIX, seed=number) for number in range(3)]
    seen = set()

    async def client(number: int) -> None:
        for turn in range(8):
            talk = rng.choice(talks)
            if rng.random() < 0.8:
                pair.holder.cache(talk)
            pair.asker.pool.cached.clear()
            tokens = [*talk[: rng.randrange(4, 10) * BLOCK], number, turn]
            served = await pair.asker.admit(pair.asker.request(tokens, pair.holder.holds(PREFIX)))
            seen.add((await pair.asker.end(served)).fetch)

    pair.asker.prefill_s = 0.0005
    await asyncio.gather(*map(client, range(3)))
    assert seen - {"not_held"}
