"""The state directory and `down`: nobody else's process is signalled, and none of ours stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from pullfill.config import CLUSTER_FILE, ClusterRef, ProcessId
from pullfill.deploy import down
from pullfill.deploy.state import (
    CLUSTER_ENV,
    Locked,
    StateDir,
    identify,
    is_alive,
    send,
    start_time,
    tagged,
)
from pullfill.deploy.view import ProcessView
from pullfill.errors import ConfigError
from pullfill.net.this_host import SHM_DIR_ENV, pid_space
from tests.support.state_dir import entry, recorded
from tests.support.waiting import eventually


@pytest.mark.parametrize("where", ["another host/another boot/pid:[1]", None])
def test_processes_of_another_host_or_container_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str | None
) -> None:
    """There the pids are those of other processes. where: None: only the pid namespace differs."""
    monkeypatch.setenv(SHM_DIR_ENV, str(tmp_path))
    (tmp_path / "pullfill-decode-1").touch()
    space = where or pid_space().rpartition("/")[0] + "/pid:[1]"
    state = StateDir(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as child:
        started = start_time(child.pid) or 0
        found = entry(pid=child.pid, started=started, space=space)
        recorded(tmp_path, found, supervisor=ProcessId(child.pid, started, space))
        (tmp_path / "lock").touch()
        before = {file: file.read_bytes() for file in tmp_path.iterdir()}
        for command in (state.refuse_if_live, lambda: asyncio.run(down.down(state, timeout_s=0))):
            with pytest.raises(ConfigError, match="run this command there") as told:
                command()
            assert space.partition("/")[0] in str(told.value)
            assert "\n" not in str(told.value)
        assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
        assert not send(found, signal.SIGKILL)
        assert child.poll() is None
        child.kill()


@pytest.mark.timeout(30)
def test_only_one_works_on_it_and_down_does_not_wait_for_what_is_not_ours(tmp_path: Path) -> None:
    with StateDir(tmp_path).locked(), pytest.raises(Locked, match="another"):
        StateDir(tmp_path).locked().__enter__()
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").mkdir()  # nobody holds a lock there: no time helps
    with pytest.raises(ConfigError, match="cannot write"):
        asyncio.run(down.down(StateDir(tmp_path), timeout_s=60))


def test_a_record_that_cannot_be_read_is_not_no_record(tmp_path: Path) -> None:
    (tmp_path / CLUSTER_FILE).mkdir()
    (tmp_path / "file").touch()
    for directory in (tmp_path, tmp_path / "file"):
        with pytest.raises(ConfigError, match=r"cannot read .*cluster\.json .*--state-dir"):
            ClusterRef.resolve(state_dir=directory)
        with pytest.raises(ConfigError, match="cannot read"):
            StateDir(directory).live()


def test_prepare_keeps_old_logs_and_drops_old_servers(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    for folder in ("etcd", "nats", "logs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.log").write_text("old")
    state.mark_stopping()
    state.prepare()
    assert not (tmp_path / "etcd").exists()
    assert not (tmp_path / "nats").exists()
    assert (tmp_path / "logs/x.log.1").read_text() == "old"
    assert not (tmp_path / "logs/x.log").exists()
    assert not state.stopping()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, CLUSTER_ENV: "abc"})
    yield process
    process.kill()
    process.wait()


def test_another_start_time_is_another_process(child: subprocess.Popen[bytes]) -> None:
    real = identify(child.pid)
    assert real is not None
    reused = ProcessId(child.pid, real.started - 1)
    assert not is_alive(reused)
    assert not send(reused, signal.SIGKILL)
    assert child.poll() is None
    assert send(real, signal.SIGKILL)
    assert child.wait(10) == -signal.SIGKILL


def test_tagged_finds_exactly_ours(child: subprocess.Popen[bytes]) -> None:
    # The environment shows once the child has become `sleep`.
    eventually(lambda: [p.pid for p in tagged("abc")] == [child.pid], "it shows")
    assert tagged("ab") == []


def test_a_straggler_that_dies_slowly_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of the cluster that no record names."""
    cluster_id, state = f"straggler-{os.getpid()}", StateDir(tmp_path / "state")

    def slow(process: ProcessId, sig: int) -> bool:
        threading.Timer(0.3, send, (process, sig)).start()
        return True

    monkeypatch.setattr(down, "send", slow)
    view = ProcessView(Console(quiet=True))
    with subprocess.Popen(["sleep", "60"], env={CLUSTER_ENV: cluster_id}), state.locked():
        recorded(state.path, cluster_id=cluster_id, supervisor=ProcessId(os.getpid(), 0))
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
        ("nats", 20.0, 0.2, 9),
        ("frontend", None, 20.0, 7),
        ("frontend", None, 0.2, 9),
    ],
)
def test_frontends_have_as_long_as_workers_and_servers_have_not(
    role: str, given: float | None, started_with: float, code: int
) -> None:
    """When all workers have ended, a frontend may still have streams of stock servers.

    given: what `down --timeout` says. Without it each has what `up` has started it with."""
    view = ProcessView(Console(quiet=True))
    with subprocess.Popen(["sh", "-c", SLOW_TO_END], stdout=subprocess.PIPE) as slow:
        assert slow.stdout is not None
        slow.stdout.readline()  # it has set its trap
        threading.Thread(target=slow.wait).start()  # or its pid would stay
        started = start_time(slow.pid) or 0
        found = entry(role, pid=slow.pid, started=started, drain_s=started_with)
        stop = down.stop_in_order([found], view, given, lambda: False)
        assert asyncio.run(stop) == []
        assert slow.wait() == code
