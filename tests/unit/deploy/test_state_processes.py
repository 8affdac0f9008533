"""A process is its pid and its start time, and nothing else is ever signalled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pullfill.deploy.state import (
    CLUSTER_ENV,
    ProcessId,
    identify,
    is_alive,
    send,
    spawn,
    start_time,
    tagged,
)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, CLUSTER_ENV: "abc"})
    yield process
    process.kill()
    process.wait()


def _wait(condition: object, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.01)
    return False


def test_another_start_time_is_another_process(child: subprocess.Popen[bytes]) -> None:
    real = identify(child.pid)
    assert real is not None
    reused = ProcessId(child.pid, real.started - 1)
    assert not is_alive(reused)
    assert not send(reused, signal.SIGKILL)
    assert child.poll() is None
    assert send(real, signal.SIGKILL)
    assert child.wait(10) == -signal.SIGKILL


def test_a_zombie_is_dead(child: subprocess.Popen[bytes]) -> None:
    identity = identify(child.pid)
    assert identity is not None
    child.kill()
    # Not reaped: the entry in /proc stays, with state Z.
    assert _wait(lambda: not is_alive(identity))
    assert Path(f"/proc/{child.pid}").exists()
    assert not send(identity, signal.SIGTERM)


def test_a_name_with_spaces_and_brackets_is_parsed() -> None:
    code = (
        "import ctypes, time; ctypes.CDLL(None).prctl(15, b'a) S (b', 0, 0, 0); "
        "print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            boot = start_time(os.getpid())
            started = start_time(process.pid)
            assert started is not None
            assert boot is not None
            assert started >= boot
        finally:
            process.kill()


def test_tagged_finds_exactly_ours(child: subprocess.Popen[bytes]) -> None:
    # The environment shows once the child has become `sleep`.
    assert _wait(lambda: [p.pid for p in tagged("abc")] == [child.pid])
    assert tagged("ab") == []


def test_spawn_logs_and_leaves_our_session(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "x.log"
    code = "import os, sys; print(os.getsid(0) == os.getpid()); print('err', file=sys.stderr)"
    first = spawn([sys.executable, "-c", code], log=log, env=os.environ)
    assert first.wait(30) == 0
    second = spawn([sys.executable, "-c", "print('again')"], log=log, env=os.environ)
    assert second.wait(30) == 0
    assert sorted(log.read_text().split()) == ["True", "again", "err"]
    with pytest.raises(OSError, match="No such file"):
        spawn(["/does/not/exist"], log=log, env={})
