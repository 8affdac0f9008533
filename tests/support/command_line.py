"""The `pullfill` command over a state directory: run it, start it, and read what it recorded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pullfill.config import ClusterFile, ProcessEntry
from pullfill.deploy.state import StateDir, is_alive
from tests.support.waiting import patience

SERVERS_ONLY = ("--decode", "0", "--prefill", "0", "--frontends", "0")
PULLFILL = (sys.executable, "-P", "-m", "pullfill.deploy.cli")


_started: list[subprocess.Popen[str]] = []


def run(state: Path, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """One command to its end."""
    return subprocess.run(
        [*PULLFILL, *arguments],
        capture_output=True,
        text=True,
        timeout=patience(timeout),
        env={**os.environ, "PULLFILL_STATE_DIR": str(state)},
    )


def start(state: Path, *arguments: str) -> subprocess.Popen[str]:
    """One command that goes on; the `state` fixture ends it."""
    process = subprocess.Popen(
        [*PULLFILL, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PULLFILL_STATE_DIR": str(state)},
    )
    _started.append(process)
    return process


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Read the output of a process up to the line that has `text`, and return it. Fails if the
    process ends first."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"ended without {text!r}:\n{seen}")


def cluster(state: Path) -> ClusterFile:
    """What `up` has recorded."""
    found = StateDir(state).cluster()
    assert found is not None
    return found


@contextmanager
def detached(state: Path, *flags: str) -> Iterator[ClusterFile]:
    """Run a cluster with `up --detach` for the length of the `with`, then end it with `down`."""
    up = run(state, "up", "--detach", *flags, timeout=400)
    assert up.returncode == 0, up.stdout + up.stderr
    launch = cluster(state)
    try:
        yield launch
    finally:
        down = run(state, "down")
        assert down.returncode == 0, down.stderr
        assert not is_alive(launch.supervisor)


def entry(state: Path, name: str) -> ProcessEntry:
    return next(each for each in cluster(state).processes if each.name == name)


def end_started() -> None:
    """Kill the processes of `start` that still run."""
    while _started:
        process = _started.pop()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
