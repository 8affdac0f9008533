"""An engine becomes ready, gets stuck, dies, and keeps its memory for whoever copies by address.

vLLM frees its KV cache when its engine ends, also after a step that failed; what another allocation
puts there would be written, digested and committed as KV.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine.host import EngineHost, Pulse
from pullfill.engine.life import EngineLife, EngineWatchdog
from pullfill.errors import EngineStuck, NotNow
from pullfill.worker import memory
from pullfill.worker.context import WorkerContext
from tests.support.engine_host import engine_threads
from tests.support.fakes import FakeClock
from tests.support.late import Late
from tests.support.waiting import eventually

torch: Any = Late("torch")
shm_pool: Any = Late("pullfill.transfer.shm.kv_pool")

LAYERS, BLOCKS, HEADS, ROWS, WIDTH = 2, 4, 2, 4, 8
NBYTES = LAYERS * BLOCKS * HEADS * ROWS * WIDTH
PATIENCE_S = 20.0


# --------------------------------------------------------------------------- vLLM's tensors


def test_memory_once_told_outlives_vllm_s_tensors(tmp_path: Path) -> None:
    pool = shm_pool.SharedKvPool("decode-a", 0, tmp_path)
    with pool:
        buffer = torch.zeros(NBYTES, dtype=torch.int8, device="cpu")
    views = buffer.view(LAYERS, BLOCKS, HEADS, ROWS, WIDTH)
    caches = {f"layers.{i}": views[i] for i in range(LAYERS)}
    told = shm_pool.tell(pool, caches, BLOCKS).memory
    assert told is not None
    views.fill_(7)
    caches.clear()
    del buffer, views
    gc.collect()
    assert any(start <= told.address < end for start, end in mapped()), "the memory is gone"
    again = torch.full((NBYTES,), 65, dtype=torch.int8)
    assert ctypes.string_at(told.address, NBYTES) == bytes([7]) * NBYTES, "used for something else"
    del again


def mapped() -> list[tuple[int, int]]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    pairs = [line.split(" ", 1)[0].split("-") for line in lines]
    return [(int(start, 16), int(end, 16)) for start, end in pairs]


# --------------------------------------------------------------------------- the engine's thread


class Host(EngineHost):
    """The real thing around a core that runs `step` and frees its memory in `shutdown`.

    workers: the processes of its ranks, as vLLM has them."""

    def __init__(self, step: Callable[[], object] = lambda: None, workers: Any = ()) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.freed = threading.Event()
        self._step = step
        self._executor = SimpleNamespace(workers=workers)

    def build(self) -> None:
        self.core = SimpleNamespace(shutdown=self.freed.set, model_executor=self._executor)

    def loop(self) -> None:
        while not self._stopping:
            self._step()


@asynccontextmanager
async def running(host: Host) -> AsyncIterator[EngineLife[None]]:
    engine = EngineLife(lambda: host, lambda: None)
    engine.start()
    await engine.ready
    yield engine
    await engine.stop()
    host.stop()
    await asyncio.to_thread(eventually, lambda: not engine_threads(), "it goes on")


async def test_an_engine_that_died_is_known_as_such_and_keeps_its_memory() -> None:
    die = threading.Event()

    def step() -> None:
        die.wait()
        raise RuntimeError("a step failed")

    host = Host(step)
    async with running(host) as engine:
        die.set()
        await asyncio.wait_for(engine.dead.wait(), PATIENCE_S)
        assert str(engine.failure) == "a step failed"
        await engine.halt()
        assert not host.freed.wait(0.05), "its memory is gone and somebody may still use it"
    assert host.freed.is_set()


def rank_of(number: int) -> tuple[Any, int]:
    """A rank as vLLM has it, and the descriptor whose closing is the end of its process."""
    sentinel, alive = os.pipe()
    return SimpleNamespace(rank=number, proc=SimpleNamespace(sentinel=sentinel)), alive


async def test_an_engine_whose_rank_dies_is_given_up_and_frees_nothing() -> None:
    """Its thread hangs in a step, as vLLM does when a rank is gone. Nobody may wait for it."""
    go_on = threading.Event()
    rank, alive = rank_of(3)
    host = Host(go_on.wait, [rank])
    async with running(host) as engine:
        os.close(alive)
        await asyncio.wait_for(engine.dead.wait(), PATIENCE_S)
        assert isinstance(engine.failure, EngineStuck)
        assert str(engine.failure) == "the process of rank 3 ended"
        await engine.stop()
        assert engine_threads(), "it waited"
        go_on.set()
        host.stop()
    assert not host.freed.is_set()
    os.close(rank.proc.sentinel)


async def test_ranks_that_are_ended_on_purpose_are_no_news() -> None:
    rank, alive = rank_of(0)
    async with running(Host(workers=[rank])) as engine:
        await engine.stop()
        os.close(alive)
        await asyncio.sleep(0.01)
    assert engine.failure is None
    os.close(rank.proc.sentinel)


async def test_memory_that_a_dying_process_still_holds_is_no_mistake() -> None:
    def make() -> EngineHost:
        raise ValueError("Free memory on device cuda:0 (3/80 GiB) is less than desired\nmore")

    engine = EngineLife(make, lambda: None)
    engine.start()
    with pytest.raises(NotNow, match=r"^the engine did not start: Free memory .* desired$"):
        await engine.ready
    await engine.stop()


# --------------------------------------------------------------------------- the watchdog

STALL_S = 8.0


class Watched:
    """An engine that beats when told to, and its watchdog."""

    def __init__(self) -> None:
        self.beat, self.busy, self.given_up = 1, "a step", list[str]()
        self.clock = FakeClock()
        self.told: list[bool] = []
        me: Any = self
        self.host = me
        self.guard = EngineWatchdog(me, STALL_S, self.told.append, self.clock)
        self.guard.look()

    def pulse(self) -> Pulse:
        return Pulse(self.beat, self.busy, 3)

    def give_up(self, why: str) -> None:
        self.given_up.append(why)

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.clock.advance(1.0)
            self.guard.look()


def test_a_step_that_takes_too_long_is_told_and_then_given_up() -> None:
    rig = Watched()
    rig.wait(STALL_S - 1)
    assert (rig.told, rig.guard.detail()) == ([], {})
    rig.wait(1)
    assert rig.told == [True]
    said = "the engine is stuck in a step for 8 s with 3 requests"
    assert rig.guard.detail() == {"reason": said}
    rig.wait(STALL_S - 1)
    assert not rig.given_up
    rig.wait(1)
    rig.beat += 1
    rig.wait(3)
    assert rig.given_up == ["the engine is stuck in a step for 16 s with 3 requests"]
    assert rig.told == [True], "given up is given up"


def test_a_process_that_was_stopped_does_not_blame_its_engine() -> None:
    rig = Watched()
    rig.clock.advance(3600.0)
    rig.guard.look()
    assert rig.told == []
    rig.wait(STALL_S - 3)
    assert rig.told == [], "the hour counts for two looks"
    rig.wait(3)
    assert rig.told == [True]


# --------------------------------------------------------------------------- the workers


class Owner:
    """Closes, unless the engine still runs and may ask it, or has freed what it receives into."""

    def __init__(self, engine: EngineLife[None], host: Host) -> None:
        self._engine, self._host = engine, host
        self.closed = False

    def close(self) -> None:
        assert self._engine.dead.is_set(), "the engine may still ask the fences"
        assert not self._host.freed.is_set(), "the memory is gone, and the port was open"
        self.closed = True


@pytest.mark.essential
async def test_a_decode_worker_closes_its_port_between_the_last_step_and_the_memory() -> None:
    host = Host()
    async with running(host) as engine:
        owner = Owner(engine, host)
        await memory.end(engine, WorkerContext("decode-1", owner=owner), [])  # type: ignore[arg-type]
        assert owner.closed
        assert host.freed.is_set()


async def test_a_prefill_worker_waits_for_its_last_copy_before_the_memory_goes() -> None:
    """`TransferWorker.join` waits for its copies."""
    host = Host()
    async with running(host) as engine:
        copied, owner = threading.Event(), Owner(engine, host)
        copies: Any = SimpleNamespace(join=copied.wait)
        context = WorkerContext("prefill-1", owner=owner)  # type: ignore[arg-type]
        ending = asyncio.create_task(memory.end(engine, context, [[copies]]))
        await asyncio.wait_for(engine.dead.wait(), PATIENCE_S)
        assert not (await asyncio.wait([ending], timeout=0.05))[0]
        assert not host.freed.is_set()
        assert not owner.closed
        copied.set()
        await asyncio.wait_for(ending, PATIENCE_S)
        assert owner.closed
        assert host.freed.is_set()


async def test_a_copy_without_end_does_not_hold_a_worker_that_leaves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = Host()
    async with running(host) as engine:
        stuck = SimpleNamespace(join=lambda timeout_s: timeout_s > 1.0)
        context: Any = SimpleNamespace(owner=Owner(engine, host))
        await memory.end(engine, context, [[stuck]], copies_s=0.02)
        assert "exiting while a KV copy still runs" in caplog.text
        assert host.freed.is_set()
