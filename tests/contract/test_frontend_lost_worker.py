"""A decode worker process that is stopped or killed, seen over real TCP. No vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tests.support.fake_decode import FakeDecode, request
from tests.support.frontend_rig import rig, until

WORKER = """
import sys, time
from tests.support.fake_decode import FakeDecode
fake = FakeDecode("decode-1", step_s=0.02, hold=sys.argv[1] == "hold").start()
print(fake.record.data, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("started", [True, False])
async def test_a_lost_process_is_noticed_within_five_seconds(fault: int, started: bool) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        WORKER,
        "go" if started else "hold",
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    other = FakeDecode("decode-2")
    try:
        address = (await process.stdout.readline()).decode().strip()
        async with rig() as r:
            r.directory.put(
                msgspec.structs.replace(other.record, instance_id="decode-1", data=address)
            )
            await r.ready(1)
            r.dispatcher.submit(request("a", max_tokens=100_000))
            await until(lambda: bool(r.sink.tokens) == started)
            await asyncio.sleep(0.1)
            r.add(other.start())
            await r.ready(2)
            process.send_signal(fault)
            at = time.monotonic()
            if started:
                await until(lambda: "a" in r.sink.failures)
                assert "decode-1 was lost" in r.sink.failures["a"]
            else:
                await until(lambda: "a" in r.sink.tokens)
                assert [q.request_id for q in other.added] == ["a~1"]
            assert time.monotonic() - at < 5.0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        other.die()
