"""What pullfill needs of CUDA, so that everything above it can be tested without a device.

`cuda.py` is the real one (libcuda through ctypes); the tests have one over plain memory. Addresses
are device addresses as integers. Devices are numbered as this process sees them
(CUDA_VISIBLE_DEVICES), so a device is named by its UUID to other processes.

Threads: everything may be called from any thread; one `Stream` is used by one thread at a time.
Errors: TransferFailed with CUDA's name for it. Such an error can mean that the device's work of
this whole process is in an unknown state; who was waiting for copies must not believe they ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

HANDLE_BYTES = 64
Addresses = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Allocation:
    """The allocation around an address. `exportable`: whether the driver gives it an IPC handle;
    memory made of mapped physical pages (VMM: expandable segments, sleep mode) has none."""

    base: int
    nbytes: int
    exportable: bool


class Stream(Protocol):
    """An order of copies on one device. Whatever is queued runs on, also if this process does not
    wait for it."""

    @property
    def device(self) -> int: ...

    @property
    def handle(self) -> int:
        """CUstream, for kernels launched by others."""
        ...

    @property
    def batches(self) -> bool:
        """Whether `copy_batch` is one call of the driver (12.8 and newer), not a loop."""
        ...

    def copy_batch(
        self, target: Addresses, source: Addresses, nbytes: Addresses, *, engines: bool = False
    ) -> None:
        """Queue a copy for each triple, in no order among them. Device or page-locked host
        addresses. engines: by copy engines, where the driver lets us choose; else as it likes."""
        ...

    def synchronize(self) -> None:
        """Sleep, without the GIL, until everything queued is done and visible to every device and
        the CPU. If it raises, nothing is known about what was queued."""
        ...

    def close(self) -> None:
        """Nothing may be queued any more. Idempotent."""
        ...


class GpuDriver(Protocol):
    """One process's way to the GPUs. Making one starts no context; the first call that names a
    device uses that device's primary context, the one that torch uses too."""

    def count(self) -> int: ...

    def uuid(self, device: int) -> str:
        """Hexadecimal, the same in every process."""
        ...

    def can_map(self, device: int, other: int) -> bool:
        """Whether `device` can copy to memory of `other` directly."""
        ...

    def fast_link(self, device: int, other: int) -> bool:
        """Whether the two GPUs are joined by NVLink rather than by PCIe."""
        ...

    def shares_contexts(self, device: int) -> bool:
        """Whether processes share one context on `device` (MPS). Where the driver cannot say:
        whether MPS's control daemon is in reach, or may be."""
        ...

    def settings(self) -> str:
        """Of the driver's kernel module. Raises TransferFailed when they cannot be read."""
        ...

    def allocation(self, device: int, address: int) -> Allocation:
        """Raises TransferFailed when the address is not memory of `device`."""
        ...

    def extent(self, device: int, address: int) -> tuple[int, int]:
        """Base and bytes of the allocation around an address that `device` can use, whichever
        device holds it. Raises TransferFailed when there is none."""
        ...

    def stage(self, device: int, nbytes: int) -> tuple[int, int]:
        """Addresses of so much new memory of `device`, and of so much page-locked memory of the
        CPU. Both stay until the process ends."""
        ...

    def export(self, device: int, base: int) -> bytes:
        """The IPC handle of an allocation, HANDLE_BYTES long. Valid while it is allocated."""
        ...

    def open(self, device: int, handle: bytes) -> int:
        """Map another process's allocation for use on `device`; its base address here. A handle
        opened twice gives the same address; each needs its own `close`. A process cannot open
        what it exported itself."""
        ...

    def close(self, device: int, base: int) -> None:
        """Unmap what `open` gave."""
        ...

    def stream(self, device: int) -> Stream: ...

    def synchronize(self, device: int) -> None:
        """Wait for all that anybody in this process has queued on `device`."""
        ...
