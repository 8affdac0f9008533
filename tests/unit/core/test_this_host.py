"""Which processes share memory: those with one host id."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pullfill import ids
from pullfill.net import this_host


def test_host_id_is_the_same_in_another_process() -> None:
    code = "from pullfill.net.this_host import host_id; print(host_id())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == this_host.host_id()
    assert ids.is_name(this_host.host_id())


def test_who_shares_another_directory_shares_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    here = this_host.host_id.__wrapped__()
    monkeypatch.setenv(this_host.SHM_DIR_ENV, "/dev/shm")
    assert this_host.host_id.__wrapped__() == here
    monkeypatch.setenv(this_host.SHM_DIR_ENV, "/proc")
    assert this_host.host_id.__wrapped__() != here
