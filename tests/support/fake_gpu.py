"""GPUs made of plain memory, with the driver's signatures: what the real one promises and no more.

Device memory is a memfd, so that other processes can map it; a handle is a pid, a descriptor and
the GPU. Each rule names the section of NVIDIA's CUDA Driver API manual that states it:

- *Stream Management*: work of a stream is done in the order in which it was queued. Here it is done
  when somebody waits for it, so that nobody gets away with leaving a fence earlier.
- *Context Management*, cuCtxSynchronize: waits for the work of every stream.
- *Data types used by CUDA driver*, CUresult: an error of the device (`fail_sync`) leaves the
  process in an inconsistent state, and any further CUDA work returns the same error.
- *Memory Management*, cuMemcpyBatchAsync: copies of a batch are in no order, so none may read what
  another writes. Addresses are those of device memory.
- *Memory Management*, cuMemGetAddressRange: base and size around an address of whichever GPU.
- *Unified Addressing*, cuPointerGetAttribute: the ordinal is that of the GPU that holds the memory,
  also where another GPU has mapped it.
- *Memory Management*, cuIpcOpenMemHandle: a handle opened again gives the same address and counts;
  each opening needs its cuIpcCloseMemHandle; to free memory before that is undefined.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pullfill.errors import TransferFailed
from pullfill.transfer.gpu.copies import Lane
from pullfill.transfer.gpu.cuda import HANDLE_BYTES, Addresses

SETTINGS = 'EnableMSI: 1\nRegistryDwords: ""\n'
_handles = itertools.count(1)


@dataclass
class DeviceMemory:
    """What `FakeDriver.allocate` gives: `data` is the bytes on the device."""

    driver: FakeDriver
    fd: int
    base: int
    data: NDArray[np.uint8]
    device: int
    exportable: bool = True

    @property
    def handle(self) -> bytes:
        name = self.driver.devices[self.device]
        return f"{os.getpid()} {self.fd} {name}".encode().ljust(HANDLE_BYTES)

    def free(self) -> None:
        if self.fd >= 0:
            assert not self.driver.maps(self.handle), "freed while it is mapped: undefined"
            os.close(self.fd)
            self.fd = -1


@dataclass
class _Opened:
    map: mmap.mmap
    data: NDArray[np.uint8]
    device: int
    handle: bytes


@dataclass
class FakeDriver:
    """CudaDriver, for calls from any thread. Sees the devices named in `devices`.

    apart: pairs of devices that cannot reach each other.
    mps: whether processes share contexts.
    module: the kernel module's settings. None: they cannot be read.
    """

    devices: tuple[str, ...] = ("gpu-a", "gpu-b")
    apart: frozenset[tuple[int, int]] = frozenset()
    mps: bool = False
    module: str | None = SETTINGS
    fail_sync: bool = False
    before_sync: Callable[[], object] = lambda: None
    """Called by whoever begins to wait for a stream."""
    error: str = ""
    launch_error: Exception | None = None
    """What a launch of a kernel raises after it queued half of its runs."""
    copies: list[int] = field(default_factory=list)
    """Runs of each batch that was waited for."""
    engines: list[bool] = field(default_factory=list)
    """Of each batch, whether it was for the copy engines."""
    launched: list[int] = field(default_factory=list)
    """Runs of each kernel."""
    openings: Counter[int] = field(default_factory=Counter)
    streams: dict[int, FakeStream] = field(default_factory=dict)
    _tables: threading.RLock = field(default_factory=threading.RLock)
    """Guards the tables below, and `openings`."""
    _mine: dict[int, DeviceMemory] = field(default_factory=dict)
    _opened: dict[int, _Opened] = field(default_factory=dict)
    _lanes: dict[int, Lane] = field(default_factory=dict)

    def allocate(self, nbytes: int, device: int = 0, *, exportable: bool = True) -> DeviceMemory:
        fd = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        data = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        memory = DeviceMemory(self, fd, data.ctypes.data, data, device, exportable)
        with self._tables:
            self._mine[memory.base] = memory
        return memory

    def lane(self, device: int) -> Lane:
        """As `copies.lane_of`."""
        if device not in self._lanes:
            fake: Any = FakeKernel
            driver: Any = self
            self._lanes[device] = Lane(driver, device, lambda _, handle: fake(self, handle))
        return self._lanes[device]

    def maps(self, handle: bytes) -> bool:
        with self._tables:
            return any(opened.handle == handle for opened in self._opened.values())

    def _on_devices(self) -> dict[int, int]:
        """Bytes by the base of each allocation that is on a device, ours and mapped."""
        with self._tables:
            known = {base: len(mine.data) for base, mine in self._mine.items()}
            return known | {base: len(opened.data) for base, opened in self._opened.items()}

    def check(self) -> None:
        """Raises what an error of the device makes every later call return."""
        if self.error:
            raise TransferFailed(self.error)

    def check_addresses(self, addresses: Addresses, nbytes: Addresses) -> None:
        """All on a device."""
        regions = self._on_devices()
        for address, size in zip(addresses.tolist(), nbytes.tolist(), strict=True):
            inside = (base <= address and address + size <= base + n for base, n in regions.items())
            assert any(inside), f"{address:#x} + {size} is no memory of a GPU"

    def count(self) -> int:
        return len(self.devices)

    def uuid(self, device: int) -> str:
        return self.devices[device]

    def can_map(self, device: int, other: int) -> bool:
        return (device, other) not in self.apart

    def shares_contexts(self, device: int) -> bool:
        return self.mps

    def settings(self) -> str:
        if self.module is None:
            raise TransferFailed("the NVIDIA driver's settings cannot be read: no such file")
        return self.module

    def allocation(self, device: int, address: int) -> tuple[int, int, bool]:
        base, nbytes = self.extent(device, address)
        if base in self._mine:
            mine = self._mine[base]
            if mine.device == device:
                return base, nbytes, mine.exportable
        elif self._opened[base].handle.split()[2].decode() == self.devices[device]:
            return base, nbytes, False
        raise TransferFailed(f"the address is not memory of device {device}")

    def extent(self, device: int, address: int) -> tuple[int, int]:
        self.check()
        for base, nbytes in self._on_devices().items():
            if base <= address < base + nbytes:
                return base, nbytes
        raise TransferFailed("cuMemGetAddressRange: CUDA_ERROR_NOT_FOUND")

    def read(self, device: int, target: int, source: int, nbytes: int) -> None:
        self.check_addresses(np.array([source]), np.array([nbytes]))
        ctypes.memmove(target, source, nbytes)

    def export(self, device: int, base: int) -> bytes:
        mine = self._mine[base]
        assert mine.exportable
        assert mine.device == device
        return mine.handle

    def open(self, device: int, handle: bytes) -> int:
        self.check()
        with self._tables:
            for base, opened in self._opened.items():
                if (opened.handle, opened.device) == (handle, device):
                    self.openings[base] += 1
                    return base
            try:
                pid, fd, _ = handle.split()
                with open(f"/proc/{int(pid)}/fd/{int(fd)}", "r+b", buffering=0) as file:
                    mapped = mmap.mmap(file.fileno(), 0)
            except (OSError, ValueError) as exc:
                raise TransferFailed("cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE") from exc
            data = np.frombuffer(mapped, np.uint8)
            base = data.ctypes.data
            self._opened[base] = _Opened(mapped, data, device, handle)
            self.openings[base] += 1
            return base

    def close(self, device: int, base: int) -> None:
        with self._tables:
            assert self.openings[base] > 0, "closed more often than opened"
            self.openings[base] -= 1
            if not self.openings[base]:
                opened = self._opened.pop(base)
                assert opened.device == device
                opened.data = np.empty(0, np.uint8)
                opened.map.close()
        self.check()

    def stream(self, device: int) -> FakeStream:
        self.check()
        return FakeStream(self, device)

    def enter(self, device: int) -> None:
        """CudaDriver's."""

    def synchronize(self, device: int) -> None:
        self.check()
        for stream in [s for s in self.streams.values() if s.device == device]:
            stream.synchronize()


class FakeStream:
    """CudaStream."""

    def __init__(self, driver: FakeDriver, device: int) -> None:
        self._driver = driver
        self.device = device
        self.handle = next(_handles)
        self.queued: list[list[tuple[int, int, int]]] = []
        driver.streams[self.handle] = self

    def copy_batch(
        self, target: Addresses, source: Addresses, nbytes: Addresses, *, engines: bool = False
    ) -> None:
        driver = self._driver
        driver.engines.append(engines)
        driver.check()
        assert self.handle in driver.streams, "closed"
        assert target.dtype == source.dtype == nbytes.dtype == np.uint64
        driver.check_addresses(target, nbytes)
        driver.check_addresses(source, nbytes)
        triples = zip(target.tolist(), source.tolist(), nbytes.tolist(), strict=True)
        self.queued.append(list(triples))

    def synchronize(self) -> None:
        driver = self._driver
        driver.before_sync()
        driver.check()
        if driver.fail_sync:
            driver.error = "cuEventSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS"
        driver.check()
        for batch in self.queued:
            for target, source, nbytes in reversed(batch):
                ctypes.memmove(target, source, nbytes)
        driver.copies.append(sum(map(len, self.queued)))
        self.queued.clear()


class FakeKernel:
    """copies.Kernel on a stream. Its table is in use until the stream was waited for."""

    def __init__(self, driver: FakeDriver, stream: int) -> None:
        self._driver, self._stream = driver, driver.streams[stream]

    def launch(self, target: Addresses, source: Addresses, nbytes: Addresses) -> None:
        assert not self._stream.queued, "the table of an earlier launch is overwritten"
        assert not int(np.bitwise_or.reduce(target | source | nbytes)) & 15
        error = self._driver.launch_error
        half = len(nbytes) // 2 if error else len(nbytes)
        self._driver.launched.append(half)
        self._stream.copy_batch(target[:half], source[:half], nbytes[:half])
        if error:
            raise error
