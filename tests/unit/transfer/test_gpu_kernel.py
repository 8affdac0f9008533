"""The Triton kernel under Triton's interpreter, against plain copies."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from tests.support.late import Late

torch: Any = Late("torch")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """kernel.py, defined anew: Triton asks then whether to interpret."""
    pytest.importorskip("triton")  # before that, so that only our kernel is interpreted
    name = "pullfill.transfer.gpu.kernel"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield import_module(name)
    del sys.modules[name]


@pytest.fixture
def kernel(module: Any) -> Any:
    return module.RunKernel(torch.device("cpu"), 0, 32)


def copied(kernel, runs):  # type: ignore[no-untyped-def]
    """Launch; compare with numpy, the bytes around every run included."""
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, 1 << 18, np.uint8)
    target = rng.integers(0, 256, 1 << 18, np.uint8)
    s0, t0 = (-source.ctypes.data % 16, -target.ctypes.data % 16)
    expected = target.copy()
    for s, t, n in runs:
        expected[t0 + t : t0 + t + n] = source[s0 + s : s0 + s + n]
    table = np.array(runs, np.uint64)
    base_s, base_t = np.uint64(source.ctypes.data + s0), np.uint64(target.ctypes.data + t0)
    kernel.launch(table[:, 1] + base_t, table[:, 0] + base_s, table[:, 2])
    np.testing.assert_array_equal(target, expected)


def test_runs(kernel: Any, module: Any) -> None:
    """Lengths around every boundary: a word, a step, a piece of a program."""
    step, piece = module.LANES * 8, module.LANES * module.STEPS * 8
    lengths = (16, step - 16, step, step + 16, piece - 16, piece + 16)
    ends = np.cumsum([n + 48 for n in lengths])
    wide = [
        (i * 512, int(end) - n, n) for i, (n, end) in enumerate(zip(lengths, ends, strict=True))
    ]
    copied(kernel, wide)


def test_limits(kernel: Any, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing at all, as many runs as the table holds, runs longer than a row, and warming up."""
    kernel.warm()
    none = np.empty(0, np.uint64)
    kernel.launch(none, none, none)
    copied(kernel, [(i * 64, i * 64, 32) for i in range(32)])
    monkeypatch.setattr(module, "SPAN", 4096)
    copied(kernel, [(16, 32, 4096), (8192, 8192, 9008), (20_000, 20_000, 8192)])
    assert (kernel._rows[:6, 2] <= 4096 // 8).all(), "a long run stands in several rows"
