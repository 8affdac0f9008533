"""What a worker settles for itself before it imports an engine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pullfill.engine.process import lazy_timers

# Eight threads allocate at the same time; malloc_info lists the arenas that there are.
CODE = """
import ctypes, sys, threading
from pullfill.engine.process import bound_arenas
if sys.argv[1] == "bound":
    bound_arenas()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
together = threading.Barrier(8)
def allocate():
    together.wait()
    libc.malloc(1000)
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
out = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.malloc_info(0, out)
libc.fclose(out)
"""


def arenas(argument: str, **env: str) -> int:
    clean = {k: v for k, v in os.environ.items() if k != "MALLOC_ARENA_MAX"}
    told = subprocess.run(
        [sys.executable, "-c", CODE, argument], env=clean | env, capture_output=True, check=True
    )
    return told.stdout.count(b"<heap nr=")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_threads_share_two_arenas_unless_told_otherwise() -> None:
    assert arenas("bound") == 2
    assert arenas("unbound") > 3
    assert arenas("bound", MALLOC_ARENA_MAX="3") == 3


def slack_ns() -> int:
    """Of the calling thread."""
    return int(Path(f"/proc/{threading.get_native_id()}/timerslack_ns").read_text())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a Linux thread attribute")
def test_only_threads_made_meanwhile_are_late() -> None:
    found: list[int] = []

    def start() -> None:
        thread = threading.Thread(target=lambda: found.append(slack_ns()))
        thread.start()
        thread.join()

    usual = slack_ns()
    with lazy_timers():
        start()
    start()
    assert found == [1_000_000_000, usual]
    assert slack_ns() == usual
