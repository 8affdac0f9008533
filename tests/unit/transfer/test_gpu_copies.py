"""The GPU copier: which way it takes, and when its copies are over."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pullfill.errors import TransferFailed
from pullfill.transfer.gpu import copies
from pullfill.transfer.gpu.copies import SAME, GpuCopier, Interconnect, Lane
from pullfill.transfer.nccl import gpu_turns
from pullfill.transfer.runs import Copies
from tests.support.fake_gpu import FakeDriver

NEAR = Interconnect("near", small_run=1024, batch_bytes=1 << 20)


def rig(link: Interconnect = NEAR) -> tuple[FakeDriver, GpuCopier]:
    driver = FakeDriver()
    return driver, GpuCopier(driver.lane(0), link)


def batch(*triples: tuple[int, int, int]) -> Copies:
    return Copies(*([*column] for column in zip(*triples, strict=True)))


def move(driver: FakeDriver, copier: GpuCopier, todo: Copies, nbytes: int = 1 << 16) -> None:
    """What `todo` makes of zeros, from bytes that all differ from zero."""
    source, target = (driver.allocate(nbytes).data for _ in range(2))
    source[:] = np.arange(nbytes) % 255 + 1
    copier(source.ctypes.data, target.ctypes.data, todo)
    expected = np.zeros(nbytes, np.uint8)
    for s, t, n in zip(*todo.flat(), strict=True):
        expected[t : t + n] = source[s : s + n]
    np.testing.assert_array_equal(target, expected)


def test_engines_where_there_is_no_kernel() -> None:
    driver = FakeDriver()
    copier = GpuCopier(Lane(driver, 0, lambda *_: None), SAME)
    move(driver, copier, batch((0, 4992, 48)))
    assert (driver.launched, driver.copies) == ([], [1])
    assert driver.engines == [False], "as the driver likes: the engines are slow within one GPU"


def test_a_worker_that_can_copy_no_more_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take job after job, compute it, and fail to write it. With several ranks nothing
    else ends it: the error is in the main process, and the engine is in others."""
    told: list[str] = []
    monkeypatch.setattr(copies, "_watchers", [])
    copies.when_broken(told.append)
    driver, copier = rig()
    driver.fail_sync = True
    for sessions in (copier, GpuCopier(driver.lane(0))):
        with pytest.raises(TransferFailed):
            move(driver, sessions, batch((0, 0, 16)))
    assert told == ["copies on a GPU have failed"]
    assert not copier.settled
    with pytest.raises(TransferFailed, match="restart"):
        driver.lane(0).check()


def test_a_launch_that_failed_half_way_is_waited_for() -> None:
    driver, copier = rig()
    driver.launch_error = RuntimeError("no kernel image")
    with pytest.raises(RuntimeError, match="no kernel image"):
        move(driver, copier, batch((0, 0, 16), (32, 32, 16)))
    assert copier.settled
    assert driver.copies == [1], "what was queued is over"
    driver.launch_error = None
    move(driver, copier, batch((0, 0, 16), (32, 32, 16)))


def test_nccl_lets_go_of_its_blocks_only_when_the_gpu_is_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It copies between KV blocks and the memory that it stages them in."""
    driver = FakeDriver()
    monkeypatch.setattr(gpu_turns, "load", lambda: driver)
    monkeypatch.setattr(gpu_turns, "lane_of", driver.lane)
    gpu = gpu_turns.CudaGpu(0)
    source, target = (driver.allocate(4096).data for _ in range(2))
    source[:] = 7
    runs = [np.array([n], np.uint64) for n in (target.ctypes.data, source.ctypes.data, 4096)]
    driver.fail_sync = True
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(gpu.copy, *runs)
        time.sleep(0.1)
        assert not copying.done(), "nobody knows whether the GPU still writes"
        driver.fail_sync, driver.error = False, ""
        with pytest.raises(TransferFailed, match="copying within the GPU failed"):
            copying.result(20)
    with pytest.raises(TransferFailed, match="restart"):
        gpu.copy(*runs)


def test_sessions_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the stream and the kernel's table."""
    driver = FakeDriver()
    inside, most = [], []

    def queued(_: str) -> None:
        inside.append(1)
        time.sleep(0.01)
        most.append(len(inside))
        inside.pop()

    monkeypatch.setattr(copies.failpoints, "hit", queued)
    copiers = [GpuCopier(driver.lane(0)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(move, driver, c, batch((0, 96, 48))) for c in copiers]:
            done.result()
    assert most == [1] * 4
    assert len(driver.streams) == 1


def test_no_kernel_where_triton_does_not_work(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pullfill.transfer.gpu.kernel", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert copies.kernel_for(0, 0) is None
    assert "Triton does not work here" in caplog.text
