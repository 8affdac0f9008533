"""`pullfill.testing.cluster`: it starts, says why it cannot, and leaves nothing behind.

With servers only, so without engines. tests/integration/test_examples.py uses one with workers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from pullfill.deploy.state import is_alive
from pullfill.errors import UnavailableError
from pullfill.testing import LocalCluster, cluster
from tests.support.command_line import recorded
from tests.support.waiting import until

SERVERS = {"decode": 0, "prefill": 0, "frontends": 0}


def test_a_cluster_runs_within_with_and_leaves_nothing_but_the_logs_of_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for failure in (None, ZeroDivisionError()):
        with suppress(ZeroDivisionError):
            with cluster(**SERVERS) as c:
                found = recorded(c.state_dir)
                assert set(c.pids) == {"nats", "etcd"}
                assert c.status()["workers"] == []
                with pytest.raises(UnavailableError, match="drain nobody"):
                    c.pullfill("drain", "nobody")
                assert all(is_alive(process) for process in found)
                if failure:
                    raise failure
        notes = [f"logs of the cluster: {c.state_dir.parent}"] if failure else []
        assert getattr(failure, "__notes__", []) == notes
        assert not any(is_alive(process) for process in found)
        assert bool(list(c.state_dir.glob("logs/*.log"))) == bool(failure)


def test_a_user_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import time\nfrom pullfill.testing import cluster\n"
        f"with cluster(**{SERVERS}) as c:\n"
        "    print(c.state_dir, flush=True)\n    time.sleep(600)\n"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
    ) as user:
        assert user.stdout is not None
        c = LocalCluster(Path(user.stdout.readline().decode().strip()), "demo")
        found = recorded(c.state_dir)
        assert len(found) == 2
        user.kill()
    until(lambda: not any(is_alive(process) for process in found), 30, "all have ended")
    until(lambda: not (c.state_dir / "cluster.json").exists(), 30, "the record goes last")
