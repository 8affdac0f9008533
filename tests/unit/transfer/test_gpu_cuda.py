"""The CUDA driver's calls, against a library with the same names over plain memory: that each is
called with what it takes, that contexts are current, and that errors are named."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pullfill.errors import TransferFailed
from pullfill.transfer.gpu import cuda
from pullfill.transfer.gpu.cuda import CudaDriver, _Handle, settle

MEMORY = np.zeros(1 << 16, np.uint8)
BASE = MEMORY.ctypes.data


def put(into: Any, value: Any) -> None:
    """As a C function does with what ctypes passes by reference."""
    into._obj.value = value


class Library:
    """libcuda as ctypes shows it. Takes ctypes values only, as a C function would. Copies are done
    when their event is waited for: an event stands for what was queued when it was recorded (CUDA
    Driver API, Event Management)."""

    def __init__(self) -> None:
        self.current: int | None = None
        self.calls: list[str] = []
        self.codes: dict[str, int] = {}
        self.exportable, self.ordinal, self.mps = 1, 0, 0
        self.queued: list[tuple[int, int, int]] = []
        self.recorded = self.flags = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu") or not hasattr(type(self), f"_{name}"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if code := self.codes.get(name, 0):
                return code
            getattr(self, f"_{name}")(*arguments)
            return 0

        return call

    def _cuInit(self, flags: int) -> None:
        assert flags == 0

    def _cuGetErrorName(self, code: int, name: Any) -> None:
        put(name, f"CUDA_ERROR_{code}".encode())

    def _cuDeviceGetCount(self, count: Any) -> None:
        put(count, 2)

    def _cuDeviceGet(self, device: Any, ordinal: int) -> None:
        put(device, 100 + ordinal)

    def _cuDeviceGetUuid_v2(self, uuid: Any, device: ctypes.c_int) -> None:
        ctypes.memmove(uuid, bytes([device.value] * 16), 16)

    def _cuDeviceCanAccessPeer(self, yes: Any, device: ctypes.c_int, peer: ctypes.c_int) -> None:
        put(yes, device.value < peer.value)

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> None:
        put(context, device.value + 1000)

    def _cuCtxSetCurrent(self, context: ctypes.c_void_p) -> None:
        self.current = context.value

    def _cuPointerGetAttribute(self, data: Any, attribute: int, pointer: ctypes.c_uint64) -> None:
        assert self.current is not None
        inside = BASE <= pointer.value < BASE + len(MEMORY)
        put(data, {2: 2 if inside else 1, 9: self.ordinal, 10: self.exportable}[attribute])

    def _cuMemGetAddressRange_v2(self, base: Any, size: Any, pointer: ctypes.c_uint64) -> None:
        put(base, BASE)
        put(size, len(MEMORY))

    def _cuIpcGetMemHandle(self, handle: Any, pointer: ctypes.c_uint64) -> None:
        text = f"handle of {pointer.value}".encode().ljust(64)
        ctypes.memmove(handle, text, 64)

    def _cuIpcOpenMemHandle_v2(self, base: Any, handle: _Handle, flags: ctypes.c_uint) -> None:
        assert flags.value == 1
        put(base, int(bytes(handle).split()[2]))

    def _cuIpcCloseMemHandle(self, pointer: ctypes.c_uint64) -> None:
        assert pointer.value == BASE

    def _cuStreamCreate(self, stream: Any, flags: int) -> None:
        assert flags == 1
        assert self.current is not None
        put(stream, 77)

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, device: ctypes.c_int) -> None:
        assert attribute == 133
        put(value, self.mps)

    def _cuCtxSynchronize(self) -> None:
        self._do(len(self.queued))

    def _cuMemAlloc_v2(self, address: Any, nbytes: ctypes.c_size_t) -> None:
        put(address, BASE)

    def _cuMemAllocHost_v2(self, address: Any, nbytes: ctypes.c_size_t) -> None:
        put(address, BASE + nbytes.value)

    def _cuEventCreate(self, event: Any, flags: int) -> None:
        assert flags == 3, "whoever waits for it sleeps"
        put(event, 88)

    def _cuEventRecord(self, event: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        assert (event.value, stream.value) == (88, 77)
        self.recorded = len(self.queued)

    def _cuEventSynchronize(self, event: ctypes.c_void_p) -> None:
        assert event.value == 88
        self._do(self.recorded)

    def _cuEventDestroy_v2(self, event: ctypes.c_void_p) -> None:
        assert event.value == 88

    def _do(self, count: int) -> None:
        for target, source, nbytes in self.queued[:count]:
            ctypes.memmove(target, source, nbytes)
        del self.queued[:count]

    def _cuStreamQuery(self, stream: ctypes.c_void_p) -> None:
        assert (stream.value, self.current) == (77, 1100)

    def _cuStreamDestroy_v2(self, stream: ctypes.c_void_p) -> None:
        assert stream.value == 77

    def _cuMemcpyAsync(self, target: Any, source: Any, nbytes: Any, stream: Any) -> None:
        assert (type(nbytes), stream.value) == (ctypes.c_size_t, 77)
        self.queued.append((target.value, source.value, nbytes.value))

    def _cuMemcpyBatchAsync(
        self, targets: Any, sources: Any, sizes: Any, count: Any, attributes: Any, firsts: Any,
        attribute_count: Any, failed: Any, stream: Any,
    ) -> None:  # fmt: skip
        assert (attributes._obj.source_access_order, attributes._obj.flags) == (1, self.flags)
        assert (firsts._obj.value, attribute_count.value, stream.value) == (0, 1, 77)
        columns = [
            (ctypes.c_uint64 * count.value).from_address(array.value)
            for array in (targets, sources, sizes)
        ]
        self.queued += zip(*columns, strict=True)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(cuda.ctypes, "PyDLL", lambda name: made)
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: made)
    MEMORY[:] = np.arange(len(MEMORY)) % 251
    return made


def triples(*rows: tuple[int, int, int]) -> list[np.ndarray]:
    table = np.array(rows, np.uint64)
    return [table[:, 0] + np.uint64(BASE), table[:, 1] + np.uint64(BASE), table[:, 2]]


def test_devices_links_and_buffers(library: Library) -> None:
    driver = CudaDriver()
    assert driver.count() == 2
    assert driver.uuid(1) == "65" * 16
    assert [driver.can_map(*pair) for pair in ((0, 1), (1, 0), (1, 1))] == [True, False, True]
    assert library.current is None, "looking makes no context"
    assert driver.stage(0, 4096) == (BASE, BASE + 4096)


def test_export_and_open(library: Library) -> None:
    driver = CudaDriver()
    assert driver.allocation(0, BASE + 1000) == (BASE, len(MEMORY), True)
    handle = driver.export(0, BASE)
    assert len(handle) == 64
    assert driver.open(1, handle) == BASE
    assert library.current == 1101
    driver.close(1, BASE)
    library.exportable = 0
    assert not driver.allocation(0, BASE)[2]
    with pytest.raises(TransferFailed, match="not memory of device 0"):
        driver.allocation(0, BASE - 1)
    assert library.calls.count("cuDevicePrimaryCtxRetain") == 2, "one context for each device"


def test_copies_in_one_call(library: Library) -> None:
    stream = CudaDriver().stream(0)
    assert (stream.device, stream.handle) == (0, 77)
    before = MEMORY.copy()
    stream.copy_batch(*triples((0, 5000, 100), (200, 6000, 50)))
    stream.synchronize()
    assert (MEMORY[:100] == before[5000:5100]).all()
    assert (MEMORY[200:250] == before[6000:6050]).all()
    assert library.calls.count("cuMemcpyBatchAsync") == 1
    library.flags = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
    stream.copy_batch(*triples((0, 5000, 100)), engines=True)
    stream.close()
    stream.close()
    assert library.calls.count("cuStreamDestroy_v2") == 1


def test_copies_one_by_one_where_the_driver_has_no_batches(library: Library) -> None:
    library.codes["cuMemcpyBatchAsync"] = 801  # CUDA_ERROR_NOT_SUPPORTED
    stream = CudaDriver().stream(0)
    before = MEMORY.copy()
    for _ in range(2):
        stream.copy_batch(*triples((0, 5000, 100), (200, 6000, 50)))
    stream.synchronize()
    assert (MEMORY[200:250] == before[6000:6050]).all()
    assert library.calls.count("cuMemcpyBatchAsync") == 1, "asked once"
    assert library.calls.count("cuMemcpyAsync") == 4


@pytest.mark.parametrize(
    "name", ["cuMemcpyBatchAsync", "cuEventRecord", "cuEventSynchronize", "cuStreamCreate"]
)
def test_errors_carry_cudas_name(library: Library, name: str) -> None:
    library.codes[name] = 700

    def copy() -> None:
        stream = CudaDriver().stream(0)
        stream.copy_batch(*triples((0, 5000, 100)))
        stream.synchronize()

    with pytest.raises(TransferFailed, match=f"{name}: CUDA_ERROR_700"):
        copy()


def test_a_waiting_thread_sleeps(library: Library) -> None:
    """cuStreamSynchronize keeps a core busy unless the context was made otherwise."""
    stream = CudaDriver().stream(0)
    before = MEMORY.copy()
    stream.copy_batch(*triples((0, 5000, 100)))
    assert (MEMORY == before).all()
    stream.synchronize()
    assert (MEMORY[:100] == before[5000:5100]).all()
    assert library.calls[-2:] == ["cuEventRecord", "cuEventSynchronize"]


def test_a_stream_is_done_or_busy_or_failed(library: Library) -> None:
    """CUDA_ERROR_NOT_READY is 600; whatever else is no answer to wait on."""
    stream = CudaDriver().stream(0)
    assert stream.done
    library.codes["cuStreamQuery"] = 600
    assert not stream.done
    library.codes["cuStreamQuery"] = 700
    with pytest.raises(TransferFailed, match="cuStreamQuery: CUDA_ERROR_700"):
        assert stream.done


def test_the_whole_context_can_be_waited_for(library: Library) -> None:
    driver = CudaDriver()
    before = MEMORY.copy()
    driver.stream(0).copy_batch(*triples((0, 5000, 100)))
    driver.synchronize(0)
    assert (MEMORY[:100] == before[5000:5100]).all()
    library.codes["cuCtxSynchronize"] = 700
    with pytest.raises(TransferFailed, match="cuCtxSynchronize: CUDA_ERROR_700"):
        driver.synchronize(0)


def test_memory_of_another_gpu_has_an_extent(library: Library) -> None:
    library.ordinal = 1
    driver = CudaDriver()
    with pytest.raises(TransferFailed, match="not memory of device 0"):
        driver.allocation(0, BASE)
    assert driver.extent(0, BASE + 5) == (BASE, len(MEMORY))


def test_settings_that_cannot_be_read(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    driver = CudaDriver()
    monkeypatch.setattr(Path, "read_text", missing)
    with pytest.raises(TransferFailed, match="settings cannot be read: /proc/driver/nvidia/params"):
        driver.settings()
    monkeypatch.setattr(Path, "read_text", lambda _: "EnableMSI: 1")
    assert driver.settings() == "EnableMSI: 1"


def test_mps(library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = CudaDriver()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (tmp_path / "control").touch()
    assert not driver.shares_contexts(0), "the driver knows better"
    library.mps = 1
    assert driver.shares_contexts(0)
    library.codes["cuDeviceGetAttribute"] = 1  # CUDA_ERROR_INVALID_VALUE: older than 12.2
    assert driver.shares_contexts(0)
    (tmp_path / "control").unlink()
    assert not driver.shares_contexts(0)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
    answer: OSError = FileNotFoundError(2, "No such file or directory")
    asked = []

    def stat(path: Path) -> None:
        asked.append(str(path))
        raise answer

    monkeypatch.setattr(os, "stat", stat)
    assert not driver.shares_contexts(0)
    assert asked == ["/tmp/nvidia-mps/control"]
    answer = PermissionError(13, "Permission denied")
    assert driver.shares_contexts(0), "it may be there"
    library.codes["cuDeviceGetAttribute"] = 3
    with pytest.raises(TransferFailed, match="cuDeviceGetAttribute: CUDA_ERROR_3"):
        driver.shares_contexts(0)


def test_settle_goes_on_until_the_gpu_answers() -> None:
    answers = iter([RuntimeError("no"), RuntimeError("no"), None])
    asked = []

    def synchronize() -> None:
        answer = next(answers)
        asked.append(answer)
        if answer is not None:
            raise answer

    settle(synchronize, "waiting")
    assert len(asked) == 3
