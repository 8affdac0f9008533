"""What pullfill needs of CUDA: the driver API through ctypes. Needs nothing but libcuda.so.1.

Devices are numbered as this process sees them (CUDA_VISIBLE_DEVICES). To other processes a device
is named by its UUID. Addresses are device addresses, as integers.

Threads: any thread may make any call. One thread at a time uses a `CudaStream`.

Errors are TransferFailed with CUDA's name for them. After an error, the device's work of the whole
process may be in an unknown state. Who waits for copies must not believe that they ended.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pullfill.errors import TransferFailed
from pullfill.runtime import log

logger = log.get("transfer.gpu")

HANDLE_BYTES = 64
Addresses = NDArray[np.uint64]

_LIBRARY = "libcuda.so.1"
_SETTINGS = Path("/proc/driver/nvidia/params")
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the legacy default stream
_BLOCKING_EVENT = 1 | 2  # CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_BESIDE_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: copy engines, from 13.1 on
_MPS_ENABLED = 133  # CU_DEVICE_ATTRIBUTE_MPS_ENABLED
_MEMORY_TYPE, _DEVICE_ORDINAL, _IPC_CAPABLE = 2, 9, 10  # CUpointer_attribute
_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
_NOT_READY = 600


class _Handle(ctypes.Structure):
    """CUipcMemHandle: passed by value."""

    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_uint),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


@cache
def why_no_cuda() -> str | None:
    """Why this process has no CUDA device, for people. None: it has one. Makes no context."""
    try:
        count = load().count()
    except TransferFailed as exc:
        return str(exc)
    return None if count else "CUDA sees no device"


@cache
def load() -> CudaDriver:
    """The driver of this process. Raises TransferFailed when there is none."""
    return CudaDriver()


def settle(synchronize: Callable[[], None], otherwise: str, ask_s: float = 0.05) -> None:
    """Wait, for as long as it takes, until nothing runs on a stream or a device.

    otherwise: logged once if CUDA fails to say it.

    Never raises: who cannot know that the GPU is quiet must not let go of a fence."""
    said = False
    while True:
        try:
            return synchronize()
        except Exception as exc:
            if not said:
                logger.error("%s: %s", otherwise, exc)
            said = True
            time.sleep(ask_s)


class CudaDriver:
    """One process's way to the GPUs. One per process is enough: use `load`.

    The first call that needs a device's context retains the device's primary context, which torch
    uses too. It stays until the process ends.
    """

    # Only entry points whose binary interface is frozen (the `_v2` names where they exist).

    def __init__(self) -> None:
        try:
            self.quick: Any = ctypes.PyDLL(_LIBRARY)
            self.slow: Any = ctypes.CDLL(_LIBRARY)
        except OSError as exc:
            raise TransferFailed(f"no CUDA driver on this machine ({exc})") from exc
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()
        self.wait("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Make a call that returns at once. Raises TransferFailed."""
        # Keeps the GIL: to give it up costs up to a switch interval beside a busy engine thread.
        self.check(name, getattr(self.quick, name)(*arguments))

    def wait(self, name: str, *arguments: Any) -> None:
        """Make a call that may wait, without the GIL. Raises TransferFailed."""
        self.check(name, getattr(self.slow, name)(*arguments))

    def check(self, name: str, code: int) -> None:
        """Raise TransferFailed unless `code` is CUDA_SUCCESS."""
        if code:
            text = ctypes.c_char_p()
            self.quick.cuGetErrorName(code, ctypes.byref(text))
            error = text.value.decode() if text.value else f"error {code}"
            raise TransferFailed(f"{name.removesuffix('_v2')}: {error}")

    def enter(self, device: int) -> None:
        """Make the device's primary context current on this thread."""
        self.call("cuCtxSetCurrent", self._contexts.get(device) or self._retain(device))

    def _retain(self, device: int) -> ctypes.c_void_p:
        with self._lock:
            if device not in self._contexts:
                context = ctypes.c_void_p()
                self.wait("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._cu(device))
                self._contexts[device] = context
            return self._contexts[device]

    def _cu(self, device: int) -> ctypes.c_int:
        number = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(number), device)
        return number

    def count(self) -> int:
        number = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(number))
        return number.value

    def uuid(self, device: int) -> str:
        """Hexadecimal, the same in every process."""
        raw = (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGetUuid_v2", ctypes.byref(raw), self._cu(device))
        return bytes(raw).hex()

    def can_map(self, device: int, other: int) -> bool:
        """Whether `device` can copy to memory of `other` directly."""
        if device == other:
            return True
        yes = ctypes.c_int()
        self.call("cuDeviceCanAccessPeer", ctypes.byref(yes), self._cu(device), self._cu(other))
        return bool(yes.value)

    def shares_contexts(self, device: int) -> bool:
        """Whether processes share one context on `device` (MPS). Raises TransferFailed where the
        driver cannot say: before CUDA 12.2."""
        yes = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(yes), _MPS_ENABLED, self._cu(device))
        return bool(yes.value)

    def settings(self) -> str:
        """The settings of the driver's kernel module. Raises TransferFailed."""
        try:
            return _SETTINGS.read_text()
        except OSError as exc:
            raise TransferFailed(f"the NVIDIA driver's settings cannot be read: {exc}") from exc

    def allocation(self, device: int, address: int) -> tuple[int, int, bool]:
        """Base and bytes of the allocation around an address, and whether the driver gives it an
        IPC handle. Raises TransferFailed when it is not of `device`."""
        # Memory made of mapped physical pages (VMM: expandable segments, sleep mode) has none.
        self.enter(device)
        pointer = ctypes.c_uint64(address)
        kind, where, capable = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int()
        for attribute, into in (
            (_MEMORY_TYPE, kind), (_DEVICE_ORDINAL, where), (_IPC_CAPABLE, capable)
        ):  # fmt: skip
            self.call("cuPointerGetAttribute", ctypes.byref(into), attribute, pointer)
        if kind.value != _DEVICE_MEMORY or where.value != device:
            raise TransferFailed(f"the address is not memory of device {device}")
        return *self.extent(device, address), bool(capable.value)

    def extent(self, device: int, address: int) -> tuple[int, int]:
        """Base and bytes of the allocation around an address that `device` can use, whichever
        device holds it. Raises TransferFailed when there is none."""
        self.enter(device)
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        around = ctypes.c_uint64(address)
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), around)
        return base.value, size.value

    def allocate(self, device: int, nbytes: int) -> int:
        """The address of so much new memory of `device`. It stays until the process ends."""
        self.enter(device)
        address = ctypes.c_uint64()
        self.wait("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def read(self, device: int, target: int, source: int, nbytes: int) -> None:
        """Copy from memory of `device` to the CPU's. Returns when all of it is there."""
        self.enter(device)
        to, there = ctypes.c_void_p(target), ctypes.c_uint64(source)
        self.wait("cuMemcpyDtoH_v2", to, there, ctypes.c_size_t(nbytes))

    def export(self, device: int, base: int) -> bytes:
        """The IPC handle of an allocation, HANDLE_BYTES long. Valid while it is allocated."""
        self.enter(device)
        handle = _Handle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle)

    def open(self, device: int, handle: bytes) -> int:
        """Map another process's allocation for use on `device`. Returns its base address here.

        A handle opened twice gives the same address, and each opening needs its own `close`. A
        process cannot open what it exported itself."""
        self.enter(device)
        base, theirs = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        access = ctypes.c_uint(_PEER_ACCESS)
        self.wait("cuIpcOpenMemHandle_v2", ctypes.byref(base), theirs, access)
        return base.value

    def close(self, device: int, base: int) -> None:
        """Unmap what `open` gave."""
        self.enter(device)
        self.wait("cuIpcCloseMemHandle", ctypes.c_uint64(base))

    def stream(self, device: int) -> CudaStream:
        return CudaStream(self, device)

    def synchronize(self, device: int) -> None:
        """Wait for all that anybody in this process has queued on `device`."""
        self.enter(device)
        self.wait("cuCtxSynchronize")


class CudaStream:
    """An order of copies on one device. What is queued runs on, also if nobody waits for it."""

    # A waiting thread sleeps on an event. To wait for the stream itself is a little faster, but
    # keeps a core and the driver's lock busy (docs/decisions.md, 28).

    def __init__(self, driver: CudaDriver, device: int) -> None:
        self._driver = driver
        self.device = device
        driver.enter(device)
        self._stream = ctypes.c_void_p()
        driver.wait("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)
        self._done = ctypes.c_void_p()
        driver.wait("cuEventCreate", ctypes.byref(self._done), _BLOCKING_EVENT)
        self._first = ctypes.c_size_t(0)

    @property
    def handle(self) -> int:
        """The CUstream, for kernels that others launch."""
        return self._stream.value or 0

    def copy_batch(
        self, target: Addresses, source: Addresses, nbytes: Addresses, *, engines: bool = False
    ) -> None:
        """Queue a copy for each triple, in no order among them.

        target, source: device addresses.
        engines: use copy engines, where the driver lets us choose. If False, it does as it likes.
        """
        self._driver.enter(self.device)
        failed = ctypes.c_size_t()
        attributes = _CopyAttributes(
            source_access_order=_STREAM_ORDER, flags=_BESIDE_COMPUTE if engines else 0
        )
        arrays = [np.ascontiguousarray(a, np.uint64) for a in (target, source, nbytes)]
        self._driver.wait(
            "cuMemcpyBatchAsync",
            *(ctypes.c_void_p(a.ctypes.data) for a in arrays),
            ctypes.c_size_t(len(nbytes)),
            ctypes.byref(attributes),
            ctypes.byref(self._first),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            self._stream,
        )

    @property
    def done(self) -> bool:
        """Whether everything queued is done. If it raises, nothing is known about what was
        queued."""
        self._driver.enter(self.device)
        code = self._driver.quick.cuStreamQuery(self._stream)
        if code == _NOT_READY:
            return False
        self._driver.check("cuStreamQuery", code)
        return True

    def synchronize(self) -> None:
        """Sleep, without the GIL, until everything queued is done and visible to every device and
        the CPU. If it raises, nothing is known about what was queued."""
        self._driver.enter(self.device)
        self._driver.call("cuEventRecord", self._done, self._stream)
        self._driver.wait("cuEventSynchronize", self._done)

    def close(self) -> None:
        """Nothing may be queued any more. Idempotent."""
        if self._stream.value:
            self._driver.enter(self.device)
            self._driver.wait("cuEventDestroy_v2", self._done)
            self._driver.wait("cuStreamDestroy_v2", self._stream)
            self._stream = ctypes.c_void_p()
