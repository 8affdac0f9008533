"""The engine's loop around a core that is told what to do, and the heap of its process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import zmq

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
    """Three steps with one output each. waits: the first runs no model, so the loop pauses."""

    def __init__(self, said: list[str], waits: bool) -> None:
        self.left = 3
        self.batch_queue = None
        self._said, self._waits = said, waits
        self.scheduler = SimpleNamespace(
            has_requests=lambda: self.left > 0,
            get_request_counts=lambda: (self.left, 0),
            _update_from_kv_xfer_finished=lambda told: None,
        )

    def step_fn(self) -> tuple[dict[int, str], bool]:
        self._said.append("step")
        self.left -= 1
        return {0: "tokens"}, not (self._waits and self.left == 2)

    def post_step(self, executed: bool) -> None:
        pass


def run(monkeypatch: pytest.MonkeyPatch, cores: set[int], waits: bool = True) -> list[str]:
    """What a loop of three steps does, in order; KV of a prompt has come before the second."""
    outputs = ModuleType("vllm.v1.outputs")
    outputs.KVConnectorOutput = SimpleNamespace  # type: ignore[attr-defined]
    for name, module in (("vllm", ModuleType("vllm")), ("vllm.v1", ModuleType("vllm.v1"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "vllm.v1.outputs", outputs)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    monkeypatch.setattr(time, "sleep", lambda seconds: said.append("leaves its core"))
    said: list[str] = []
    core: Any = Core(said, waits)

    def before_step() -> bool:
        if core.left == 2:
            host.received(["a"])
        if core.left == 0:
            host.stop()
        return False

    config: Any = None
    host = EngineHost(config, on_outputs=lambda _: said.append("outputs"), before_step=before_step)
    monkeypatch.setattr(host, "_pause", lambda core: 1)
    monkeypatch.setattr(host, "build", lambda: core)
    host._poller = zmq.Poller()
    host.core = core
    host.run()
    return said


PLAIN = ["step", "outputs"]


def test_first_tokens_after_remote_prefills_go_before_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one core, after a rest: the threads that carry them would wait for it."""
    assert run(monkeypatch, {3}) == [*PLAIN, *PLAIN, "leaves its core", *PLAIN]


def test_in_a_stream_of_steps_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, {3}, waits=False) == PLAIN * 3


def test_with_a_core_to_spare_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, {2, 3}) == PLAIN * 3
