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


def run(state: Path, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """One command to its end."""
    return subprocess.run(
        [*PULLFILL, *arguments],
        capture_output=True,
        text=True,
        timeout=patience(timeout),
        env={**os.environ, "PULLFILL_STATE_DIR": str(state)},
    )


@contextmanager
def foreground(state: Path, *flags: str, ready: str = "") -> Iterator[subprocess.Popen[str]]:
    """Run `up`, and kill it at the end of the `with`. ready: reads its output up to the line that
    has this."""
    with subprocess.Popen(
        [*PULLFILL, "up", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PULLFILL_STATE_DIR": str(state)},
    ) as up:
        try:
            seen = ""
            while ready not in seen:
                line = up.stdout.readline()
                assert line, f"ended without {ready!r}:\n{seen}"
                seen += line
            yield up
        finally:
            up.kill()


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
