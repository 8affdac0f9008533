"""A decode worker process that is stopped or killed, seen over real TCP. No vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from pullfill.wire import WorkerRecord
from tests.support.fake_vllm import answer, request
from tests.support.frontend_rig import FakeDecode, Rig, rig
from tests.support.waiting import soon

WORKER = """
import time
from tests.support.frontend_rig import FakeDecode
fake = FakeDecode("decode-1", step_s=0.02).start()
print(fake.record.data, flush=True)
time.sleep(600)
"""
BOUND_S, TICK_S = 5.0, 0.02
PROMPT = [1, 2, 3]
TOKENS = 400


@asynccontextmanager
async def worker_process() -> AsyncIterator[tuple[asyncio.subprocess.Process, WorkerRecord]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER,
        stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    template = FakeDecode("decode-1")
    try:
        address = (await process.stdout.readline()).decode().strip()
        yield process, msgspec.structs.replace(template.record, data=address)
    finally:
        template.die()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@asynccontextmanager
async def stopwatch() -> AsyncIterator[Callable[[], float]]:
    """Measures seconds in which this event loop could run. A busy machine may stop it for
    others."""
    passed_s = 0.0

    async def tick() -> None:
        nonlocal passed_s
        while True:
            await asyncio.sleep(TICK_S)
            passed_s += TICK_S

    task = asyncio.create_task(tick())
    try:
        yield lambda: passed_s
    finally:
        task.cancel()


async def begun(r: Rig, record: WorkerRecord, request_id: str) -> None:
    """A frontend with a request whose tokens come from the process."""
    r.directory.put(record)
    await r.ready(1)
    r.dispatcher.submit(request(request_id, PROMPT, max_tokens=TOKENS))
    await soon(lambda: len(r.sink.tokens.get(request_id, [])) > 3)


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.essential
async def test_a_lost_process_is_noticed_within_five_seconds(fault: int) -> None:
    """Two frontends: one knows another worker and goes on there, one does not and says so."""
    other = FakeDecode("decode-2")
    async with worker_process() as (process, record), rig() as lucky, rig() as alone:
        await asyncio.gather(begun(lucky, record, "a"), begun(alone, record, "b"))
        lucky.add(other)
        await lucky.ready(2)
        process.send_signal(fault)
        async with stopwatch() as passed_s:
            await soon(lambda: bool(other.added))
            assert passed_s() < BOUND_S
            await soon(lambda: "b" in alone.sink.failures)
            assert passed_s() < BOUND_S
        assert "decode-1 was lost" in alone.sink.failures["b"]
        await soon(lambda: "a" in lucky.sink.finished)
        assert lucky.sink.tokens["a"] == answer(PROMPT, TOKENS)
        assert [q.request_id for q in other.added] == ["a~1"]
