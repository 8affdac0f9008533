"""Draining is bounded whatever hangs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pullfill.runtime import lifecycle

STUBBORN = """
import asyncio, time
from pullfill.runtime import lifecycle

async def main():
    {before}
    print("ready", flush=True)
    {hang}

asyncio.run(main())
"""

SLEEP = "await asyncio.sleep(60)"
HANGS = "lifecycle.exit_within(0.2, 3); time.sleep(60)"


async def test_a_process_that_is_told_to_leave_makes_a_file_for_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it then dies, `up` does not start it again."""
    mark = tmp_path / "id.leaving"
    monkeypatch.setenv(lifecycle.LEAVING_ENV, str(mark))
    stop = lifecycle.Stop()
    assert not mark.exists()
    stop.ask("lease revoked")
    assert mark.exists()


@pytest.mark.parametrize(
    ("before", "hang", "code"),
    [
        ("", HANGS, 3),
        ("stop = lifecycle.Stop(); stop.starting = True; stop.install()", SLEEP, 0),
    ],
    ids=["hangs on its way out", "is told to end while it starts"],
)
def test_a_process_that_ends_early_leaves_nothing_behind(
    tmp_path: Path, before: str, hang: str, code: int
) -> None:
    """KV memory in files outlives the process. A worker may load its model for minutes, and has no
    work to finish then. What is done last may take longer than planned: the machine is slow, or the
    process stood still."""
    left = tmp_path / "left"
    last = (
        "from pathlib import Path; lifecycle.at_leave(lambda: time.sleep(0.3)); "
        f"lifecycle.at_leave(Path({str(left)!r}).touch); "
    )
    program = STUBBORN.format(before=last + before, hang=hang)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            if code == 0:
                process.send_signal(signal.SIGTERM)
            assert process.wait(20) == code
        finally:
            process.kill()
    assert left.exists()


async def test_only_a_second_signal_forces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal after a revoked lease (`pullfill drain`, then `pullfill down`) is the first one."""
    ends: list[int] = []
    monkeypatch.setattr(lifecycle, "exit_within", lambda seconds, code: ends.append(code))
    stop = lifecycle.Stop()
    for reason in ("lease revoked", "lease revoked", "SIGTERM", "lease revoked"):
        stop.ask(reason)
    assert stop.drain.is_set()
    assert not stop.force.is_set()
    assert stop.reason == "lease revoked"
    stop.ask("SIGTERM")
    assert stop.force.is_set()
    assert ends == [1]


async def test_a_task_that_drops_a_cancellation_is_cancelled_again() -> None:
    begun = asyncio.Event()

    async def deaf() -> None:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    task = asyncio.create_task(deaf())
    await begun.wait()
    async with asyncio.timeout(10):
        await lifecycle.end(task, again_s=0.01)
    assert task.cancelled()
