"""The Triton kernel under Triton's interpreter, against plain copies. The interpreter is chosen
when the kernel is defined, so the test forks a process that defines it anew."""

from __future__ import annotations

import os
import sys
import traceback
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest

from tests.support.late import Late

torch: Any = Late("torch")


def test_interpreted() -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    assert torch.float32, "imported before the fork"
    context = get_context("fork")
    told, tell = context.Pipe(duplex=False)
    child = context.Process(target=interpret, args=(tell,))
    child.start()
    tell.close()
    said = []
    try:
        while True:
            said.append(told.recv_bytes().decode())
    except EOFError:
        child.join()
    told.close()
    assert said == ["check_limits", "check_runs"]
    assert child.exitcode == 0


def interpret(tell: Any) -> None:
    """In the child: says the name of each check that passed, or why one did not."""
    os.environ["TRITON_INTERPRET"] = "1"  # asked when a kernel is defined
    sys.modules.pop("pullfill.transfer.gpu.kernel", None)
    try:
        from pullfill.transfer.gpu import kernel as module

        kernel = module.RunKernel(torch.device("cpu"), 0, 32)
        for check in (check_limits, check_runs):
            check(kernel, module)
            tell.send_bytes(check.__name__.encode())
    except BaseException:
        tell.send_bytes(traceback.format_exc().encode())
        raise


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


def check_runs(kernel, module) -> None:  # type: ignore[no-untyped-def]
    """Lengths around every boundary: a word, a step, a piece of a program."""
    step, piece = module.LANES * 8, module.LANES * module.STEPS * 8
    lengths = (16, step - 16, step, step + 16, piece - 16, piece + 16)
    ends = np.cumsum([n + 48 for n in lengths])
    wide = [
        (i * 512, int(end) - n, n) for i, (n, end) in enumerate(zip(lengths, ends, strict=True))
    ]
    copied(kernel, wide)


def check_limits(kernel, module) -> None:  # type: ignore[no-untyped-def]
    """Nothing at all, as many runs as the table holds, runs longer than a row, and warming up."""
    kernel.warm()
    none = np.empty(0, np.uint64)
    kernel.launch(none, none, none)
    copied(kernel, [(i * 64, i * 64, 32) for i in range(32)])
    module.SPAN, span = 4096, module.SPAN
    copied(kernel, [(16, 32, 4096), (8192, 8192, 9008), (20_000, 20_000, 8192)])
    assert (kernel._rows[:6, 2] <= 4096).all(), "a long run stands in several rows"
    module.SPAN = span
