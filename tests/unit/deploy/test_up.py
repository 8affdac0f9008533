"""What `pullfill up` prints, and what goes on behind `--detach`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pullfill.config import STATE_DIR_ENV
from pullfill.deploy import up
from pullfill.deploy.state import StateDir
from pullfill.deploy.view import ProcessView, SteadyConsole
from pullfill.options import UpOptions
from tests.support.waiting import eventually

CODE = """
import asyncio, os, signal, sys, time
from pullfill.deploy import up
from pullfill.options import UpOptions
from pullfill.deploy.state import StateDir

class Supervisor:
    def __init__(self, options, state, view):
        state.logs.mkdir(parents=True)

    async def start(self):
        print(f"session {os.getsid(0) == os.getpid()}", flush=True)
        START
        return True

    async def watch(self, *, detached):
        print("it goes on", flush=True)
        await asyncio.sleep(0.3)

def fork_with_a_slow_parent():
    if child := fork():
        time.sleep(SLOW)
    return child

fork, os.fork = os.fork, fork_with_a_slow_parent
up.Supervisor = Supervisor
sys.exit(up.up(UpOptions(frontends=0), StateDir(sys.argv[1]), detach=True))
"""

SIGNAL_THE_COMMAND = "os.kill(os.getppid(), signal.SIGTERM); signal.pause()"


def _up(directory: Path, start: str, slow: float = 0) -> subprocess.CompletedProcess[str]:
    """Run the command, whose supervisor starts like this. Returns when its pipes are closed.

    slow: seconds that the command stands still after it has forked."""
    code = CODE.replace("START", start).replace("SLOW", str(slow))
    command = [sys.executable, "-c", code, str(directory / "state")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_it_names_a_state_directory_that_is_not_the_default_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another cluster may run from the default one, and `pullfill down` would end that."""
    monkeypatch.delenv(STATE_DIR_ENV, raising=False)
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "b c" / ".pullfill"
    for path, flag in ((None, ""), (other, f" --state-dir '{other}'")):
        up._say_ready(UpOptions(frontends=0), StateDir(path), True)
        told = capsys.readouterr().out.splitlines()[-1]
        assert told == "  stop: pullfill down" + flag


def test_it_says_why_a_frontend_of_stock_servers_cannot_serve_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(up.members, "why_not_ready", lambda *_, **__: ["no server is ready"])
    up._say_ready(UpOptions(decode=0, prefill=0, port=9), StateDir(tmp_path), False)
    assert "  but not yet: no server is ready" in capsys.readouterr().out


def test_the_cluster_goes_on_when_nobody_reads_what_it_prints(tmp_path: Path) -> None:
    """As of `pullfill up --detach | head -1`."""
    done = _up(tmp_path, "r, w = os.pipe(); os.close(r); os.dup2(w, 1)")
    assert done.returncode == 0, done.stderr
    log = tmp_path / "state" / "logs" / "supervisor.log"
    eventually(lambda: log.exists() and "it goes on" in log.read_text(), "it has gone on")


@pytest.mark.parametrize(
    ("start", "code", "said", "slow"),
    [
        ("raise SystemExit(3)", 3, "", 0),
        ("return False", 130, "interrupted: everything that was started is stopped", 0),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "the start was killed by SIGKILL: clean up", 0),
        (f"time.sleep(0.2); {SIGNAL_THE_COMMAND}", 1, "killed by SIGTERM", 0),
        (SIGNAL_THE_COMMAND, 1, "killed by SIGTERM", 0.5),
    ],
    ids=["failed", "interrupted", "killed", "the command gets a signal", "and does not wait yet"],
)
def test_it_tells_why_the_cluster_did_not_start(
    tmp_path: Path, start: str, code: int, said: str, slow: float
) -> None:
    done = _up(tmp_path, start, slow)
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert "it goes on" not in done.stdout


def test_a_reader_that_left_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default rich ends the process in this case. If a supervisor ends like that, the processes
    that it has started go on without it."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        view = ProcessView(SteadyConsole())
        for _ in range(2):
            view.say("etcd died")
