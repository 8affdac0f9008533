"""What a prefill worker sets up before it pulls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from pullfill.config import ClusterRef
from pullfill.options import WorkerOptions
from pullfill.prefill_worker.reach import OutOfReach
from pullfill.prefill_worker.side import PrefillRole
from pullfill.runtime.lifecycle import end
from pullfill.transfer.gpu import copies
from tests.support.fakes import FakeChunks, FakeRequest
from tests.support.waiting import soon


def test_urgent_prompts_go_past_others_unless_the_decode_side_orders_all() -> None:
    cluster, options = ClusterRef("n", "http://e", "nats://q"), WorkerOptions(model="m")
    beside: Any = object()
    told = []
    for role in (PrefillRole(cluster, options), PrefillRole(cluster, options, beside)):
        chunks = FakeChunks(streams=0)
        for name, ttft_ms in (("calm", 9000), ("urgent", 500)):
            params = SimpleNamespace(extra_args={"ttft_ms": ttft_ms})
            chunks.waiting.append(FakeRequest(name, list(range(300)), sampling_params=params))
        half = role.make_half(lambda: None)
        half.built(SimpleNamespace(tier=None, chunks=chunks, hit=lambda _: 0))  # type: ignore[arg-type]
        half.plan()
        told.append([sorted(order, key=order.__getitem__) for order, _, _ in chunks.told])
    assert told == [[["urgent", "calm"]], []]


async def test_its_engine_is_told_when_gpu_copies_have_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it would take job after job, and fail to write each."""

    told: list[str] = []
    role = PrefillRole(ClusterRef("n", "http://e", "nats://q"), WorkerOptions(model="m"))

    monkeypatch.setattr(role, "_hello", Mock(side_effect=StopAsyncIteration))
    role.make_half(lambda: None)
    monkeypatch.setattr(copies, "_watchers", [])
    view = SimpleNamespace(config=None)
    engine: Any = SimpleNamespace(fail=told.append, view=view, context=None)
    with pytest.raises(StopAsyncIteration):
        await role.build(engine, None, AsyncExitStack())  # type: ignore[arg-type]
    for tell in copies._watchers:
        tell("copies on a GPU have failed")
    assert told == ["copies on a GPU have failed"]


def beside_streams(waiting: Callable[[float], set[str]] = lambda _: set(), **tasks: Any) -> Any:
    """Return the role of a prefill side. waiting: which requests wait for free blocks."""
    role: Any = PrefillRole(ClusterRef("n", "e", "q"), WorkerOptions(model="m", instance_id="w"))
    steps = SimpleNamespace(max_num_batched_tokens=100)
    view = SimpleNamespace(config=SimpleNamespace(scheduler_config=steps))
    load = SimpleNamespace(tokens_per_s=50.0)
    scheduler = SimpleNamespace(load=lambda: load, tasks=tasks)
    role._scheduler = scheduler
    role._engine = SimpleNamespace(view=view, loop=SimpleNamespace(waiting_for_blocks=waiting))
    return role


async def test_a_gap_between_two_streams_brings_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its steps would delay the next stream."""
    role = beside_streams()
    said = ["streams", *[""] * 9, "streams", *[""] * 10]
    whys, asked = list[str](), list[float | None]()

    def busy(step_s: float | None) -> str:
        asked.append(step_s)
        if len(asked) > len(said):
            raise StopIteration
        return said[len(asked) - 1]

    async def no_time(_: float) -> None:
        return None

    monkeypatch.setattr(asyncio, "sleep", no_time)
    spares = list[int | None]()
    puller: Any = SimpleNamespace(
        pause=lambda what, why: whys.append(f"{what} {why}"), spare=spares.append
    )
    beside: Any = SimpleNamespace(busy=busy, most=lambda step_s: int(step_s == 2.0))
    with pytest.raises(RuntimeError):  # what a coroutine makes of StopIteration
        await role._yield(beside, puller)
    assert whys == ["busy streams", "busy streams", "busy "]
    assert set(asked) == {2.0}
    assert set(spares) == {1}


async def test_a_job_that_gets_no_blocks_goes_back_at_once() -> None:
    """Two workers whose requests wait for each other's jobs would else wait until a timeout."""
    asked, ended = list[float](), dict[str, BaseException]()

    def waiting(longer_than_s: float) -> set[str]:
        asked.append(longer_than_s)
        return {"j.1", "own"}

    tasks = {
        name: SimpleNamespace(end=partial(ended.__setitem__, name)) for name in ("j.1", "runs.1")
    }
    beside: Any = SimpleNamespace(busy=lambda _: "", most=lambda _: None)
    puller: Any = SimpleNamespace(pause=lambda *_: None, spare=lambda _: None)
    yields = asyncio.create_task(beside_streams(waiting, **tasks)._yield(beside, puller))
    await soon(lambda: bool(ended))
    await end(yields)
    assert [*ended] == ["j.1"]
    assert isinstance(ended["j.1"], OutOfReach), "another worker may have room for it"
    assert 0 < max(asked) < 1
