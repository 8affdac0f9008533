"""The engine's loop around a core that is told what to do, and the heap of its process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pullfill.engine.heap import EVERY_S, Heap
from pullfill.engine.host import EngineHost
from tests.support.fakes import FakeClock

# Blocks of 16 KiB, every other one freed: holes, each with whole pages, and no end to cut off.
CODE = """
import ctypes
from pathlib import Path
from pullfill.engine.heap import trim
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
blocks = [libc.malloc(16384) for _ in range(2000)]
for block in blocks:
    ctypes.memset(block, 1, 16384)
for block in blocks[::2]:
    libc.free(block)
before = resident()
trim()
print(before - resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_a_trim_gives_holes_back() -> None:
    told = subprocess.run([sys.executable, "-c", CODE], capture_output=True, check=True)
    assert int(told.stdout) > 1000 * 8192


def test_the_heap_is_trimmed_at_times_while_there_is_work() -> None:
    clock, trims = FakeClock(), []
    kept = Heap(clock, lambda: trims.append(clock.monotonic()))
    kept.after_step()
    clock.advance(EVERY_S - 0.1)
    kept.after_step()
    assert not trims
    clock.advance(10 * EVERY_S)
    for _ in range(3):
        kept.after_step()
    assert len(trims) == 1
    clock.advance(EVERY_S)
    kept.after_step()
    assert len(trims) == 2


class Core:
    """Takes `steps` steps with one output each, then has nothing to do."""

    def __init__(self, said: list[str], steps: int, before: Callable[[int], None]) -> None:
        self.left = steps
        self.batch_queue = None
        self._said, self._before = said, before
        self.scheduler = SimpleNamespace(
            has_requests=lambda: self.left > 0,
            get_request_counts=lambda: (self.left, 0),
            _update_from_kv_xfer_finished=lambda told: None,
        )

    def step_fn(self) -> tuple[dict[int, str], bool]:
        self._said.append("step")
        self.left -= 1
        return {0: "tokens"}, True

    def post_step(self, executed: bool) -> None:
        self._before(self.left)


def run(monkeypatch: pytest.MonkeyPatch, cores: set[int]) -> list[str]:
    """What a loop of three steps does, in order; KV of a prompt has come before the second."""
    outputs = ModuleType("vllm.v1.outputs")
    outputs.KVConnectorOutput = SimpleNamespace  # type: ignore[attr-defined]
    for name, module in (("vllm", ModuleType("vllm")), ("vllm.v1", ModuleType("vllm.v1"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "vllm.v1.outputs", outputs)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    said: list[str] = []
    config: Any = None
    host = EngineHost(config, on_outputs=lambda _: said.append("outputs"))
    monkeypatch.setattr(time, "sleep", lambda seconds: said.append("leaves its core"))

    def before(left: int) -> None:
        if left == 2:
            host.received(["a"])
        if left == 0:
            host.stop()

    core: Any = Core(said, 3, before)
    monkeypatch.setattr(host, "build", lambda: core)
    import zmq

    host._poller = zmq.Poller()
    host.core = core
    host.run()
    return said


def test_first_tokens_after_remote_prefills_go_before_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one core: the threads that carry them would wait for it."""
    plain, first = ["step", "outputs"], ["step", "outputs", "leaves its core"]
    assert run(monkeypatch, {3}) == plain + first + plain


def test_with_a_core_to_spare_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, {2, 3}) == ["step", "outputs"] * 3
