"""GPUs made of plain memory, with the driver's signatures: what the real one promises and no more.

Device memory is a memfd, so that other processes can map it; a handle is a pid and a descriptor.
Copies are queued and done when the stream is synchronised, so that nobody gets away with leaving a
fence earlier. `FakeDriver.fail_sync` makes the next synchronisation fail, as a GPU error would.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pullfill.errors import TransferFailed
from pullfill.transfer.gpu.contract import HANDLE_BYTES, Addresses, Allocation


@dataclass
class DeviceMemory:
    """What `FakeDriver.allocate` gives: `data` is the bytes on the device."""

    fd: int
    base: int
    data: NDArray[np.uint8]
    device: int
    exportable: bool = True

    def free(self) -> None:
        if self.fd >= 0:
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
    """GpuDriver. Sees the devices named in `devices`; `peers`: pairs that cannot reach each
    other."""

    devices: tuple[str, ...] = ("gpu-a", "gpu-b")
    apart: frozenset[tuple[int, int]] = frozenset()
    fail_sync: bool = False
    streams: int = 0
    copies: list[int] = field(default_factory=list)
    """Runs of each batch that was synchronised."""
    openings: Counter[int] = field(default_factory=Counter)
    _mine: dict[int, DeviceMemory] = field(default_factory=dict)
    _opened: dict[int, _Opened] = field(default_factory=dict)

    def allocate(self, nbytes: int, device: int = 0, *, exportable: bool = True) -> DeviceMemory:
        fd = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        data = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        memory = DeviceMemory(fd, data.ctypes.data, data, device, exportable)
        self._mine[memory.base] = memory
        return memory

    def count(self) -> int:
        return len(self.devices)

    def uuid(self, device: int) -> str:
        return self.devices[device]

    def can_map(self, device: int, other: int) -> bool:
        return (device, other) not in self.apart

    def allocation(self, device: int, address: int) -> Allocation:
        for base, mine in self._mine.items():
            if mine.device == device and base <= address < base + len(mine.data):
                return Allocation(base, len(mine.data), mine.exportable)
        for base, opened in self._opened.items():
            if base <= address < base + len(opened.data):
                return Allocation(base, len(opened.data), False)
        raise TransferFailed(f"the address is not memory of device {device}")

    def export(self, device: int, base: int) -> bytes:
        mine = self._mine[base]
        assert mine.exportable
        assert mine.device == device
        return f"{os.getpid()} {mine.fd}".encode().ljust(HANDLE_BYTES)

    def open(self, device: int, handle: bytes) -> int:
        for base, opened in self._opened.items():
            if (opened.handle, opened.device) == (handle, device):
                self.openings[base] += 1
                return base
        pid, fd = handle.split()
        try:
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
        assert self.openings[base] > 0, "closed more often than opened"
        self.openings[base] -= 1
        if not self.openings[base]:
            opened = self._opened.pop(base)
            opened.data = np.empty(0, np.uint8)
            opened.map.close()

    def stream(self, device: int) -> FakeStream:
        return FakeStream(self, device)


class FakeStream:
    """Stream: copies happen in `synchronize`."""

    handle = 0
    batches = True

    def __init__(self, driver: FakeDriver, device: int) -> None:
        self._driver = driver
        self.device = device
        self._queue: list[tuple[int, int, int]] = []
        self._closed = False
        driver.streams += 1

    def copy_batch(self, target: Addresses, source: Addresses, nbytes: Addresses) -> None:
        assert not self._closed
        assert target.dtype == source.dtype == nbytes.dtype == np.uint64
        triples = zip(target.tolist(), source.tolist(), nbytes.tolist(), strict=True)
        self._queue += list(triples)

    launch = copy_batch  # also a kernel

    def synchronize(self) -> None:
        if self._driver.fail_sync:
            raise TransferFailed("cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS")
        for target, source, nbytes in self._queue:
            ctypes.memmove(target, source, nbytes)
        self._driver.copies.append(len(self._queue))
        self._queue.clear()

    def close(self) -> None:
        assert not self._queue, "closed with copies in flight"
        if not self._closed:
            self._closed = True
            self._driver.streams -= 1
