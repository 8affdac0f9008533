"""`pullfill.testing.cluster`: it starts, says why it cannot, and leaves nothing behind.

With servers only, so without engines. tests/integration/test_examples.py uses one with workers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from pullfill.deploy.state import ProcessId, StateDir, identity, is_alive
from pullfill.errors import UnavailableError
from pullfill.testing import LocalCluster, cluster

SERVERS = "decode=0, prefill=0, frontends=0"
END_S = 30.0


@pytest.fixture(autouse=True)
def directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a failed start leaves is removed with the test's own directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def processes(c: LocalCluster) -> list[ProcessId]:
    file = StateDir(c.state_dir).cluster()
    assert file is not None
    return [identity(entry) for entry in file.processes]


def until_gone(found: list[ProcessId]) -> None:
    deadline = time.monotonic() + END_S
    while any(is_alive(process) for process in found):
        assert time.monotonic() < deadline, "still running"
        time.sleep(0.02)


def test_a_cluster_runs_within_with_and_leaves_nothing() -> None:
    with cluster(decode=0, prefill=0, frontends=0) as c:
        found = processes(c)
        assert set(c.pids) == {"nats", "etcd"}
        assert c.status()["workers"] == []
        with pytest.raises(UnavailableError, match="drain nobody"):
            c.pullfill("drain", "nobody")
        assert all(is_alive(process) for process in found)
    assert not any(is_alive(process) for process in found)
    assert not c.state_dir.parent.exists()


def test_logs_stay_when_the_test_fails() -> None:
    def fail() -> None:
        with cluster(decode=0, prefill=0, frontends=0) as c:
            seen.append(c)
            found.extend(processes(c))
            raise ZeroDivisionError

    seen: list[LocalCluster] = []
    found: list[ProcessId] = []
    with pytest.raises(ZeroDivisionError) as caught:
        fail()
    (c,) = seen
    assert caught.value.__notes__ == [f"logs of the cluster: {c.state_dir.parent}"]
    assert list(c.state_dir.glob("logs/*.log"))
    until_gone(found)


def test_a_user_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import time\nfrom pullfill.testing import cluster\n"
        f"with cluster({SERVERS}) as c:\n    print(c.state_dir, flush=True)\n    time.sleep(600)\n"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
    ) as user:
        assert user.stdout is not None
        c = LocalCluster(Path(user.stdout.readline().decode().strip()), "demo")
        found = processes(c)
        assert len(found) == 2
        user.kill()
    until_gone(found)
    # The record goes last.
    deadline = time.monotonic() + END_S
    while (c.state_dir / "cluster.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
