"""The GPU copier: which way it takes, and when its copies are over."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from pullfill.errors import TransferFailed
from pullfill.transfer.gpu import copies
from pullfill.transfer.gpu.contract import Addresses
from pullfill.transfer.gpu.copies import GpuCopier
from pullfill.transfer.runs import Batch, Rows
from tests.support.fake_gpu import FakeDriver, FakeStream


class FakeKernel:
    """Launches on the copier's stream, as the real one does."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.launched: list[int] = []
        self.error: Exception | None = None

    def launch(self, target: Addresses, source: Addresses, nbytes: Addresses) -> None:
        half = len(nbytes) // 2 if self.error else len(nbytes)
        self.launched.append(half)
        self.stream.copy_batch(target[:half], source[:half], nbytes[:half])
        if self.error:
            raise self.error


def rig(small_run: int = 1024) -> tuple[FakeDriver, GpuCopier, FakeKernel]:
    driver = FakeDriver()
    copier = GpuCopier(driver, 0, small_run=small_run)
    stream = copier._stream
    assert isinstance(stream, FakeStream)
    kernel = FakeKernel(stream)
    copier.use_kernel(kernel)
    return driver, copier, kernel


def batch(*triples: tuple[int, int, int], rows: Rows | None = None) -> Batch:
    columns = [np.array(column, np.int64) for column in zip(*triples, strict=True)]
    rows = rows or Rows()
    return Batch(*columns, int(columns[2].sum()) * rows.count, rows)


def move(copier: GpuCopier, todo: Batch, nbytes: int = 1 << 16) -> np.ndarray:
    """What `todo` makes of zeros, from bytes that all differ from zero."""
    source = (np.arange(nbytes) % 255 + 1).astype(np.uint8)
    target = np.zeros(nbytes, np.uint8)
    copier(source.ctypes.data, target.ctypes.data, todo)
    expected = np.zeros(nbytes, np.uint8)
    flat = todo.flat()
    for s, t, n in zip(flat.source, flat.target, flat.nbytes, strict=True):
        expected[t : t + n] = source[s : s + n]
    np.testing.assert_array_equal(target, expected)
    return target


def test_short_runs_go_through_the_kernel_and_long_ones_through_the_engines() -> None:
    driver, copier, kernel = rig()
    move(copier, batch((0, 5000, 4096), (9000, 20_000, 8192)))
    assert (kernel.launched, driver.copies) == ([], [2])
    move(copier, batch((0, 5000, 40), (9000, 20_000, 80)))
    assert (kernel.launched, driver.copies) == ([2], [2, 2])
    copier.use_kernel(None)
    move(copier, batch((0, 5000, 40)))
    assert (kernel.launched, driver.copies) == ([2], [2, 2, 1])
    copier.close()
    assert driver.streams == 0


def test_rows_are_spelled_out() -> None:
    driver, copier, _ = rig(small_run=0)
    move(copier, batch((0, 100, 50), (700, 300, 20), rows=Rows((3,), (1000,), (2000,))))
    assert driver.copies == [6]
    copier.close()


def test_settled_only_when_the_device_is_done() -> None:
    driver, copier, _ = rig()
    driver.fail_sync = True
    with pytest.raises(TransferFailed, match="ILLEGAL_ADDRESS"):
        move(copier, batch((0, 0, 16)))
    assert not copier.settled
    driver.fail_sync = False
    with pytest.raises(TransferFailed, match="restart"):
        move(copier, batch((0, 0, 16)))
    copier.close()
    assert driver.streams == 1, "a stream with copies in flight is left alone"


def test_a_launch_that_failed_half_way_is_waited_for() -> None:
    driver, copier, kernel = rig()
    kernel.error = RuntimeError("no kernel image")
    with pytest.raises(RuntimeError, match="no kernel image"):
        move(copier, batch((0, 0, 16), (32, 32, 16)))
    assert copier.settled
    assert driver.copies == [1], "what was queued is over"
    kernel.error = None
    move(copier, batch((0, 0, 16), (32, 32, 16)))
    copier.close()


def test_no_kernel_where_triton_does_not_work(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pullfill.transfer.gpu.kernel", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert copies.kernel_for(0, 0) is None
    assert "Triton does not work here" in caplog.text
