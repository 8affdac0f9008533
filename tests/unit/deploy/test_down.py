"""`pullfill down` leaves no process of its cluster behind."""

from __future__ import annotations

import io
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from pullfill.deploy import down, procs
from pullfill.deploy.procs import ProcessId
from pullfill.deploy.state import Launch, StateDir, new_cluster_id
from pullfill.deploy.view import ProcessView


@pytest.fixture
def cluster_id() -> str:
    return new_cluster_id()


@pytest.fixture
def straggler(cluster_id: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the cluster that no record names."""
    with subprocess.Popen(["sleep", "60"], env={procs.CLUSTER_ENV: cluster_id}) as process:
        yield process
        process.kill()


async def test_a_straggler_that_dies_slowly_is_waited_for(
    tmp_path: Path,
    cluster_id: str,
    straggler: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow(process: ProcessId, sig: int) -> bool:
        threading.Timer(0.3, procs.send, (process, sig)).start()
        return True

    monkeypatch.setattr(down, "send", slow)
    state = StateDir(tmp_path / "state")
    view = ProcessView(Console(file=io.StringIO()), "stopping")
    with state.locked():
        state.write_launch(Launch(cluster_id=cluster_id, model="m", supervisor_pid=os.getpid()))
        assert [process.pid for process in procs.tagged(cluster_id)] == [straggler.pid]
        assert await down.take_down(state, [], view, drain_s=1.0, force=lambda: False) == []
        assert procs.tagged(cluster_id) == []
