"""Lines about processes that start."""

from __future__ import annotations

import errno
import io
import os
import sys

import pytest
from rich.console import Console

from pullfill.deploy.view import ProcessView, SteadyConsole


class _Full(io.StringIO):
    full = False

    def flush(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_lines_tell_how_long_it_took_and_a_full_disk_ends_nobody() -> None:
    stream = _Full()
    view = ProcessView(Console(file=stream), "x")
    with view:
        view.set("etcd", "starting", "http://[::1]:1")
        view.set("etcd", "starting", "http://[::1]:1")
        view.set("etcd", "ready")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "http://[::1]:1" in lines[0]
    assert "ready after" in lines[1]
    stream.full = True
    view.set("etcd", "starting")
    view.say("etcd died")


def test_a_reader_that_left_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default rich ends the process in this case. If a supervisor ends like that, the processes
    that it has started go on without it."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        view = ProcessView(SteadyConsole(), "x")
        with view:
            for _ in range(2):
                view.say("etcd died")
