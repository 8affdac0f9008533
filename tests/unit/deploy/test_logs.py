"""`pullfill logs`, with real files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pullfill.deploy import logs
from pullfill.deploy.state import StateDir
from pullfill.errors import ConfigError
from tests.support.state_dir import entry, recorded


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path / "state")
    state.logs.mkdir(parents=True)
    for name in ("decode-0", "decode-1", "prefill-0", "nats"):
        state.log_of(name).write_text("".join(f"{name} line {i}\n" for i in range(30)))
    return state


def names(state: StateDir, name: str | None) -> list[str]:
    return [path.stem for path in logs.chosen(state, name)]


def command(state: StateDir, *arguments: str) -> list[str]:
    where = ["--state-dir", str(state.path)]
    return [sys.executable, "-m", "pullfill", "logs", *where, *arguments]


def printed(state: StateDir, *arguments: str) -> str:
    return subprocess.check_output(command(state, *arguments), text=True)


def test_the_last_lines(state: StateDir) -> None:
    assert printed(state, "decode-0", "-n", "2") == "decode-0 line 28\ndecode-0 line 29\n"
    assert printed(state, "-n", "1").split()[:3] == ["==>", str(state.log_of("decode-0")), "<=="]


@pytest.mark.timeout(60)
def test_the_log_of_another_up_is_followed(state: StateDir) -> None:
    log = state.log_of("decode-0")
    following = command(state, "decode-0", "-f", "-n", "1")
    with subprocess.Popen(following, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "decode-0 line 29\n"
        log.replace(log.with_suffix(".log.1"))
        log.write_text("begins\n")
        assert follower.stdout.readline() == "begins\n"
        follower.kill()


def test_a_role_or_an_instance_id_names_processes(state: StateDir) -> None:
    assert names(state, "decode") == ["decode-0", "decode-1"]
    assert names(state, "nats") == ["nats"]
    recorded(state.path, entry("prefill-0", instance_id="prefill-ab12"))
    assert names(state, "prefill-ab12") == ["prefill-0"]


def test_an_unknown_name_is_told_those_that_there_are(state: StateDir, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"decode-0, decode-1, nats, prefill-0\Z"):
        logs.chosen(state, "xyz")
    with pytest.raises(ConfigError, match="--state-dir"):
        logs.chosen(StateDir(tmp_path / "none"), None)
