"""`pullfill logs`, with real files and a real process that follows them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pullfill.config import ClusterFile, ProcessEntry
from pullfill.deploy import logs
from pullfill.deploy.state import StateDir
from pullfill.errors import ConfigError


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path / "state")
    state.logs.mkdir(parents=True)
    for name, count in (("decode-0", 30), ("decode-1", 2), ("prefill-0", 1), ("nats", 0)):
        state.log_of(name).write_text("".join(f"{name} line {i}\n" for i in range(count)))
    return state


def shown(
    state: StateDir, name: str | None, capsys: pytest.CaptureFixture[str], n: int
) -> list[str]:
    assert logs.show(str(state.path), name, lines=n, follow=False) == 0
    return capsys.readouterr().out.splitlines()


def test_the_last_lines_of_one_process(state: StateDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(state, "decode-0", capsys, 3) == [f"decode-0 line {i}" for i in (27, 28, 29)]
    assert shown(state, "decode-1", capsys, 20) == ["decode-1 line 0", "decode-1 line 1"]
    assert shown(state, "decode-0", capsys, 0) == []
    assert shown(state, "nats", capsys, 5) == []


def test_all_processes_have_their_names_before_their_lines(
    state: StateDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(state, None, capsys, 1) == [
        "decode-0  | decode-0 line 29",
        "decode-1  | decode-1 line 1",
        "prefill-0 | prefill-0 line 0",
    ]


def test_a_role_or_an_instance_id_names_processes(state: StateDir) -> None:
    assert set(logs.chosen(state, "decode")) == {"decode-0", "decode-1"}
    entry = ProcessEntry(
        name="prefill-0", role="prefill", pid=1, instance_id="prefill-ab12", log="l", started=1
    )
    cluster = ClusterFile(
        namespace="n", nats_url="", etcd_url="", frontend_url="", processes=[entry]
    )
    state.write_cluster(cluster)
    assert set(logs.chosen(state, "prefill-ab12")) == {"prefill-0"}


def test_an_unknown_name_is_told_the_nearest(state: StateDir, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean prefill-0"):
        logs.chosen(state, "prefil-0")
    with pytest.raises(ConfigError, match="there are decode-0, decode-1, nats, prefill-0"):
        logs.chosen(state, "xyz")
    with pytest.raises(ConfigError, match="--state-dir"):
        logs.chosen(StateDir(tmp_path / "none"), None)


def test_follow_prints_what_comes_until_it_is_stopped(state: StateDir) -> None:
    code = "import signal, sys; from pullfill.deploy import logs; "
    # A test run that a script starts in the background ignores SIGINT.
    code += "signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "logs.show(sys.argv[1], None, lines=1, follow=True)"
    follower = subprocess.Popen(
        [sys.executable, "-u", "-c", code, str(state.path)], stdout=subprocess.PIPE, text=True
    )
    assert follower.stdout is not None
    read: Callable[[], str] = follower.stdout.readline
    try:
        assert [read().split("|")[1].strip() for _ in range(3)][-1] == "prefill-0 line 0"
        with state.log_of("decode-0").open("a") as log:
            log.write("half a ")
            log.flush()
            time.sleep(0.4)
            log.write("line\n")
        assert read() == "decode-0  | half a line\n"
        state.log_of("decode-2").write_text("a new process\n")
        assert read() == "decode-2  | a new process\n"
        state.log_of("decode-1").write_text("cut\n")
        assert read() == "decode-1  | cut\n"
        # A new `up`.
        state.log_of("decode-1").replace(state.log_of("decode-1").with_suffix(".log.1"))
        state.log_of("decode-1").write_text("a new cluster\n")
        assert read() == "decode-1  | a new cluster\n"
        follower.send_signal(signal.SIGINT)
        assert follower.wait(30) == 0
    finally:
        follower.kill()
        follower.wait()
        follower.stdout.close()
