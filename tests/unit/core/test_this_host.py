"""Which processes share memory: those with one host id."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pullfill.net import this_host


def test_who_shares_another_directory_shares_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    here = this_host.host_id.__wrapped__()
    monkeypatch.setenv(this_host.SHM_DIR_ENV, "/dev/shm")
    assert this_host.host_id.__wrapped__() == here
    monkeypatch.setenv(this_host.SHM_DIR_ENV, "/proc")
    assert this_host.host_id.__wrapped__() != here


def test_pids_of_another_namespace_are_not_valid_here() -> None:
    code = "from pullfill.net.this_host import pid_space; print(pid_space())"
    contained = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    told = {}
    for name, command in (("here", contained[4:]), ("contained", contained)):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode and command is contained:
            pytest.skip(f"no pid namespace can be made here: {done.stderr}")
        told[name] = this_host.is_own_space(done.stdout.strip())
    assert told == {"here": True, "contained": False}


def test_a_host_keeps_its_pids_when_it_gets_another_name() -> None:
    _, _, rest = this_host.pid_space().partition("/")
    assert this_host.is_own_space(f"new-name/{rest}")
