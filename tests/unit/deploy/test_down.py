"""`pullfill down` leaves no process of its cluster behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from pathlib import Path

import pytest
from rich.console import Console

from pullfill.config import ProcessEntry
from pullfill.deploy import down
from pullfill.deploy.state import (
    CLUSTER_ENV,
    Launch,
    ProcessId,
    StateDir,
    new_cluster_id,
    send,
    start_time,
    tagged,
)
from pullfill.deploy.view import ProcessView


def test_a_straggler_that_dies_slowly_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of the cluster that no record names."""
    cluster_id, state = new_cluster_id(), StateDir(tmp_path / "state")

    def slow(process: ProcessId, sig: int) -> bool:
        threading.Timer(0.3, send, (process, sig)).start()
        return True

    monkeypatch.setattr(down, "send", slow)
    view = ProcessView(Console(quiet=True), "stopping")
    with subprocess.Popen(["sleep", "60"], env={CLUSTER_ENV: cluster_id}), state.locked():
        own = ProcessId(os.getpid(), 0)
        state.write_launch(Launch(cluster_id=cluster_id, model="m", supervisor=own))
        stop = down.take_down(state, [], view, drain_s=1.0, force=lambda: False)
        assert asyncio.run(stop) == []
        assert tagged(cluster_id) == []


SLOW_TO_END = """
trap 'trap "exit 9" TERM; sleep 0.6; exit 7' TERM
echo
while :; do sleep 0.02; done
"""
"""A process that takes 0.6 s to end after SIGTERM, with exit code 7. If it gets a second SIGTERM in
that time, its exit code is 9."""


@pytest.mark.parametrize(
    ("role", "given", "started_with", "code"),
    [
        ("frontend", 20.0, 0.2, 7),
        ("nats", 20.0, 20.0, 9),
        ("frontend", None, 20.0, 7),
        ("frontend", None, 0.2, 9),
    ],
)
def test_frontends_have_as_long_as_workers_and_servers_have_not(
    role: str, given: float | None, started_with: float, code: int
) -> None:
    """When all workers have ended, a frontend may still have streams of stock servers.

    given: what `down --timeout` says. Without it each has what `up` has started it with."""
    view = ProcessView(Console(quiet=True), "stopping")
    with subprocess.Popen(["sh", "-c", SLOW_TO_END], stdout=subprocess.PIPE) as slow:
        assert slow.stdout is not None
        slow.stdout.readline()  # it has set its trap
        threading.Thread(target=slow.wait).start()  # or its pid would stay
        entry = ProcessEntry(
            name=role, role=role, instance_id=None, pid=slow.pid, log="",
            started=start_time(slow.pid) or 0, drain_s=started_with,
        )  # fmt: skip
        stop = down.stop_in_order([entry], view, given, lambda: False, 0.2)
        assert asyncio.run(stop) == []
        assert slow.wait() == code
