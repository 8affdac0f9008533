"""What a worker settles for itself before it imports an engine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
