"""One decode worker reads another one's cached prefix: both ends, over sockets and real memory."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pullfill.decode_worker.kv_reader import KvReader
from pullfill.decode_worker.prefix import fetches, read_leases
from pullfill.decode_worker.prefix.holders import Holders
from pullfill.errors import TransferFailed
from pullfill.runtime import tracing
from pullfill.transfer.shm.fence import ShmHold
from pullfill.wire import ExplainRecord, FenceToken, Lease, u32
from tests.support.fetch_rig import LEAST, FetchWorker, without_vllm
from tests.support.handoff_rig import Served
from tests.support.kv_engine import BLOCK, NUM_BLOCKS
from tests.support.otlp import HEADERS, Receiver
from tests.support.transfer_rigs import RIGS
from tests.support.waiting import soon

PREFIX = 10 * BLOCK


def prompt(length: int = PREFIX + 1, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


class Pair:
    """A decode worker that holds prefixes, and one that asks for them."""

    def __init__(self, holder: FetchWorker, asker: FetchWorker) -> None:
        self.holder, self.asker = holder, asker

    def request(self, seed: int = 1, *, cached: bool = True) -> Any:
        """Make a request of the asker, and have the holder cache its prompt."""
        tokens = prompt(seed=seed)
        if cached:
            self.holder.cache(tokens)
        return self.asker.request(tokens, self.holder.holds(PREFIX))

    async def ask(self, seed: int = 1, *, cached: bool = True) -> ExplainRecord:
        """Serve such a request up to its computation."""
        return await self.asker.ask(self.request(seed, cached=cached))

    async def reading(self, gate: Gate) -> Served:
        """Return a request of the asker, whose read has reached the gate."""
        served = await self.asker.admit(self.request())
        await soon(gate.reached.is_set)
        return served


@pytest.fixture
async def pair(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pair]:
    without_vllm(monkeypatch)
    rig = RIGS[getattr(request, "param", "shm")](tmp_path)
    made = Pair(FetchWorker(rig, "holder"), FetchWorker(rig, "asker"))
    await made.holder.start()
    await made.asker.start()
    try:
        yield made
        await made.holder.check_back()
        await made.asker.check_back()
    finally:
        await made.asker.stop()
        await made.holder.stop()


class Gate:
    """Stops each read until `open` is set, or until it is interrupted, as over TCP."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        interrupted = threading.Event()
        real = KvReader._read

        def fetch(reader: KvReader, fence: Any, source: Any, target: Any, wanted: Any) -> Any:
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

        monkeypatch.setattr(KvReader, "_read", fetch)
        monkeypatch.setattr(KvReader, "interrupt", lambda _: interrupted.set())


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


async def test_another_salt_is_another_prompt(pair: Pair) -> None:
    tokens = prompt()
    pair.holder.cache(tokens, salt="theirs")
    for salt, fetch in (("ours", "not_held"), ("theirs", "fetched")):
        request = pair.asker.request(tokens, pair.holder.holds(PREFIX), salt)
        assert (await pair.asker.ask(request)).fetch == fetch


async def test_workers_that_round_differently_read_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(pair.holder.leases.ours, computes="another")
    monkeypatch.setattr(pair.holder.leases, "ours", other)
    assert (await pair.ask()).fetch == "unreachable"
    assert (await pair.ask(cached=False)).fetch == "unreachable", "it is not asked again at once"


async def test_leased_blocks_are_not_reused(pair: Pair, gate: Gate) -> None:
    served = await pair.reading(gate)
    leased = {block for (_, block) in pair.holder.pool.cached.items()}
    others = pair.holder.pool.allocate(NUM_BLOCKS - len(leased))
    assert not leased & set(others)
    assert not pair.holder.pool.free, "all that is left is pinned"
    gate.open.set()
    told = await pair.asker.end(served)
    assert told.fetch == "fetched"
    pair.holder.pool.release(others)


async def test_a_copy_after_the_lease_does_not_count(pair: Pair, gate: Gate) -> None:
    served = await pair.reading(gate)
    pair.holder.expire()
    await soon(lambda: not pair.holder.leases.open)
    pair.holder.cache(prompt(NUM_BLOCKS * BLOCK, seed=2))  # everything is overwritten
    gate.open.set()
    told = await pair.asker.end(served)
    assert told.fetch == "expired"


async def test_a_holder_in_a_long_step_is_not_waited_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.asker.prefill_s = 0.5
    pair.holder.host.held = True
    assert (await pair.ask()).fetch == "unreachable"
    pair.holder.host.held = False
    pair.holder.host.run()
    assert (await pair.ask(cached=False)).fetch == "unreachable", "it is left alone for a while"
    pair.asker.holders._not_before.clear()
    pair.asker.prefill_s = 4.0
    assert (await pair.ask(cached=False)).fetch == "fetched"


async def test_no_lease_while_a_step_runs_nor_beside_as_many_as_there_may_be(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pipeline parallelism the blocks of a step that still runs are cached already."""
    pair.holder.view.mid_step = True
    assert (await pair.ask()).fetch == "busy"
    pair.holder.view.mid_step = False
    monkeypatch.setattr(read_leases, "MOST", 0)
    assert (await pair.ask(seed=2)).fetch == "busy"


async def test_leases_pin_a_quarter_of_the_blocks_at_most(pair: Pair) -> None:
    tokens = prompt((NUM_BLOCKS // 2) * BLOCK + 1)
    pair.holder.cache(tokens)
    told = await pair.asker.ask(pair.asker.request(tokens, pair.holder.holds(len(tokens))))
    assert told.fetched_tokens == NUM_BLOCKS // read_leases.SHARE * BLOCK


async def test_a_holder_that_drains_waits_for_its_readers(pair: Pair, gate: Gate) -> None:
    served = await pair.reading(gate)
    draining = asyncio.create_task(pair.holder.leases.drain())
    await asyncio.sleep(0.05)
    assert not draining.done()
    gate.open.set()
    assert (await pair.asker.end(served)).fetch == "fetched"
    await draining
    assert (await pair.ask(seed=3)).fetch == "busy"


@pytest.mark.parametrize("lasting", [(3.0,), (0.03, 3.0)], ids=["whole", "cut off"])
@pytest.mark.parametrize("pair", ["shm", "tcp"], indirect=True)
async def test_whatever_happens_what_is_loaded_is_right(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, lasting: tuple[float, ...]
) -> None:
    """Both workers hold, evict, read and are read at once. Leases and reads end at any moment,
    clients go away. `FetchWorker.end` compares each loaded block with what computing would have
    given.

    lasting: seconds that a lease is valid."""
    rng = random.Random(len(lasting))
    talks = [prompt(12 * BLOCK, seed=number) for number in range(6)]
    seen: list[str | None] = []
    if len(lasting) > 1:
        real = KvReader._read

        def read(*args: Any) -> Any:
            time.sleep(rng.random() * 0.004)
            return real(*args)

        monkeypatch.setattr(KvReader, "_read", read)
        monkeypatch.setattr(fetches, "_COPY_S", (0.0, 0.004))
        monkeypatch.setattr(Holders, "failed", lambda *_: None)  # else the first one ends them all
        pair.holder.prefill_s = pair.asker.prefill_s = 0.0005

    async def client() -> None:
        for _ in range(12):
            monkeypatch.setattr(read_leases, "LEASE_S", rng.choice(lasting))
            here, there = rng.sample([pair.holder, pair.asker], 2)
            talk = rng.choice(talks)
            tokens = [*talk[: rng.randrange(3, 12) * BLOCK], rng.randrange(1000)]
            if rng.random() < 0.8:
                there.cache(talk[: rng.randrange(3, 12) * BLOCK])
            served = await here.admit(here.request(tokens, there.holds(len(tokens))))
            if served.loaded is None and rng.random() < 0.2:
                here.abort(served)
                await soon(lambda served=served: served.loaded is not None)
                here.traces.finish(served.request.request_id)
            else:
                seen.append((await here.end(served)).fetch)

    await asyncio.gather(*(client() for _ in range(3)))
    assert len(lasting) > 1 or seen.count("fetched") > 3, seen
    assert set(seen) - {None, "not_held"}


async def test_it_has_a_span_below_that_of_the_request(pair: Pair, receiver: Receiver) -> None:
    request = pair.request()
    request.trace_headers = HEADERS
    told = await pair.asker.ask(request)
    tracing.close()
    fetch, above = receiver.one("decode.prefix_fetch"), receiver.one("decode.request")
    assert fetch.parent == above.id
    assert fetch.within(above)
    assert fetch.attributes == {
        "pullfill.fetched_from": "holder",
        "pullfill.outcome": "fetched",
        "pullfill.kv_bytes": told.kv_bytes,
    }
    assert told.timings_ms.fetch == pytest.approx((fetch.end_ns - fetch.start_ns) / 1e6, abs=1.0)


# ------------------------------------------------------------------ late, broken, or about to end


async def test_a_read_in_the_queue_does_not_interrupt_the_one_before_it(
    pair: Pair, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await pair.reading(gate)
    # Long enough that the read begins in time on a busy machine: one that does not is `busy`.
    monkeypatch.setattr(fetches, "_COPY_S", (0.5, 0.5))
    two = await pair.asker.admit(pair.request(seed=2))
    await soon(lambda: two.loaded is not None or one.loaded is not None)
    assert one.loaded is None
    assert two.loaded is False, "it is computed, and need not wait for the lane"
    gate.open.set()
    assert (await pair.asker.end(one)).fetch == "fetched"
    assert (await pair.asker.end(two)).fetch == "busy"


async def test_a_read_that_is_too_slow_is_interrupted(
    pair: Pair, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough that the read begins in time on a busy machine: one that does not is `busy`.
    monkeypatch.setattr(fetches, "_COPY_S", (0.5, 0.5))
    assert (await pair.ask()).fetch == "lost"


async def test_no_prompt_waits_for_a_session_that_does_not_open(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder answers, but its KV port does not. What opens too late copies nothing."""
    go, real = threading.Event(), pair.asker.holders.reach

    def reach(regions: Any) -> Any:
        def open_session() -> Any:
            assert go.wait(20.0)
            return real(regions)()

        return open_session

    monkeypatch.setattr(pair.asker.holders, "reach", reach)
    monkeypatch.setattr(fetches, "_COPY_S", (0.2, 0.2))
    served = await pair.asker.admit(pair.request())
    (reader,) = pair.asker.holders._readers
    try:
        async with asyncio.timeout(3.0):
            await soon(lambda: served.loaded is not None)
    finally:
        go.set()
    assert await asyncio.to_thread(reader._thread.wait, 10.0)
    assert (pair.asker.pages[:, served.table] == 0xAA).all()
    assert (await pair.asker.end(served)).fetch == "lost"
    assert pair.asker.holders.away("holder"), "or the next prompt would wait as long"


async def test_a_lease_is_given_back_when_its_prompt_goes_another_way(pair: Pair) -> None:
    """With pipeline parallelism a step may run when vLLM asks again. Then nothing is fetched."""
    side, request = pair.asker.side, pair.request()
    assert side.decide(request, 0) == (None, False)
    await soon(lambda: pair.holder.leases.open)
    side._scheduled.append([])
    assert side.decide(request, 0) == (0, False)
    side.enqueue(request, [[]], 0)
    side._scheduled.clear()
    async with asyncio.timeout(2.0):
        await soon(lambda: not pair.holder.leases.open)
    side.request_finished(request)


@pytest.mark.parametrize("wrong", ["beyond", "odd", "many", "late"])
async def test_a_holder_that_answers_nonsense(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    real = read_leases.ReadLeases._give

    async def give(self: Any, asker: Any, ask: Any) -> None:
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
        await real(self, asker, ask)

    monkeypatch.setattr(read_leases.ReadLeases, "_give", give)
    told = await pair.ask()
    assert (told.fetch == "fetched") is (wrong == "many"), told


async def test_blocks_of_an_asker_that_is_stopped_stay_pinned_and_are_counted(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go = threading.Event(), threading.Event()

    def stopped(hold: ShmHold, token: FenceToken, enter: Any = ShmHold.enter) -> None:
        enter(hold, token)
        reached.set()
        assert go.wait(20.0)

    monkeypatch.setattr(ShmHold, "enter", stopped)
    tokens = prompt()
    leased = set(pair.holder.cache(tokens))
    served = await pair.asker.admit(pair.asker.request(tokens, pair.holder.holds(PREFIX)))
    await soon(reached.is_set)
    pair.holder.expire()
    assert pair.holder.leases.unproved_blocks == len(leased)
    assert not leased & pair.holder.pool.free
    async with asyncio.timeout(read_leases.LEASE_S / 2):
        await pair.holder.leases.drain()  # does not wait for it
    go.set()
    assert (await pair.asker.end(served)).fetch == "expired"
    await soon(lambda: not pair.holder.leases.open)
    assert pair.holder.leases.unproved_blocks == 0


# ------------------------------------------------------------------ which prompts have it fetched

PROMPT = list(range(PREFIX + 1))


@pytest.fixture
async def worker(tmp_path: Path) -> FetchWorker:
    return FetchWorker(RIGS["loopback"](tmp_path), "asker")


@pytest.fixture
def asked(worker: FetchWorker, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(worker.fetches, "_start", found.append)
    return found


def hint(worker: FetchWorker, tokens: int, name: str = "holder") -> Any:
    made = replace(worker.holds(0), instance_id=name, tokens=tokens)
    return replace(made, control="tcp://127.0.0.1:1")


async def look(worker: FetchWorker, holder: Any, hit: int = 0, **fields: Any) -> Any:
    request = worker.request(PROMPT, holder)
    for name, value in fields.items():
        setattr(request, name, value)
    answer = worker.side.decide(request, hit)
    await asyncio.sleep(0)
    return answer


async def test_a_prefix_that_is_hardly_longer_or_cannot_be_shared_is_computed(
    worker: FetchWorker, asked: list[Any]
) -> None:
    assert await look(worker, hint(worker, PREFIX), mm_features=[object()]) == (0, False)
    # One of the rules that look at the request alone: test_rules.py
    assert await look(worker, hint(worker, PREFIX), pooling_params=object()) == (0, False)
    assert await look(worker, hint(worker, PREFIX), hit=9 * BLOCK) == (0, False)
    assert await look(worker, hint(worker, LEAST - 1)) == (0, False)
    assert await look(worker, None) == (0, False)
    assert await look(worker, hint(worker, PREFIX, "asker")) == (0, False), "that is us"
    worker.config = replace(worker.config, min_fetch_tokens=0)
    assert await look(worker, hint(worker, PREFIX)) == (0, False), "it is switched off"
    assert asked == []


async def test_no_prompt_waits_for_an_asyncio_thread_that_hangs(
    worker: FetchWorker, asked: list[Any]
) -> None:
    request = worker.request(PROMPT, hint(worker, PREFIX))
    assert worker.side.decide(request, 0) == (None, False)
    assert worker.side.decide(request, 0) == (None, False)
    fetch = worker.fetches._open.get(request.request_id)
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
        request = worker.request([number, *PROMPT[1:]], hint(worker, PREFIX))
        request.request_id = f"r{number}"
        burst.append(request)
    answers = [worker.side.decide(request, 0) for request in burst]
    assert answers == [(None, False), (None, False), (0, False), (0, False)]
    await asyncio.sleep(0)
    assert [fetch.request_id for fetch in asked] == ["r0", "r1"]
    for request in burst:
        worker.side.request_finished(request)
    later = worker.request(PROMPT, hint(worker, PREFIX))
    assert worker.side.decide(later, 0) == (None, False), "those that have ended do not count"
