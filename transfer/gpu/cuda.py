"""The CUDA driver API through ctypes: no package is needed but the driver itself (libcuda.so.1).

Only entry points whose binary interface is frozen are used (the `_v2` names where they exist). Two
handles on the library: calls that return at once keep the GIL, because giving it up costs up to a
switch interval beside a busy engine thread; calls that wait give it up.

Contexts: the primary context of each device is retained on first use and kept until the process
ends, and made current on the calling thread before each call. torch uses the same one.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pullfill.errors import TransferFailed
from pullfill.transfer.gpu.gpu_contract import HANDLE_BYTES, Addresses, Allocation, GpuDriver

_LIBRARY = "libcuda.so.1"
_SETTINGS = Path("/proc/driver/nvidia/params")
_MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"
"""Where MPS's control daemon listens, in `control`: the variable that names it, the default."""
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the legacy default stream
_BLOCKING_EVENT = 1 | 2  # CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_BESIDE_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: copy engines, from 13.1 on
_MPS_ENABLED = 133  # CU_DEVICE_ATTRIBUTE_MPS_ENABLED
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: NVLink has them
_MEMORY_TYPE, _DEVICE_ORDINAL, _IPC_CAPABLE = 2, 9, 10  # CUpointer_attribute
_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
_INVALID_VALUE, _NOT_READY, _NOT_SUPPORTED = 1, 600, 801


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
    """Why this process has no CUDA device, for people; None if it has. Makes no context."""
    try:
        count = load().count()
    except TransferFailed as exc:
        return str(exc)
    return None if count else "CUDA sees no device"


@cache
def load() -> CudaDriver:
    """The driver of this process. Raises TransferFailed when there is none."""
    return CudaDriver()


class CudaDriver(GpuDriver):
    """See GpuDriver. One per process is enough; use `load`."""

    def __init__(self) -> None:
        try:
            self._quick: Any = ctypes.PyDLL(_LIBRARY)
            self._slow: Any = ctypes.CDLL(_LIBRARY)
        except OSError as exc:
            raise TransferFailed(f"no CUDA driver on this machine ({exc})") from exc
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()
        self.check("cuInit", self._slow.cuInit(0))

    def check(self, what: str, code: int) -> None:
        """Raises TransferFailed unless `code` is CUDA_SUCCESS."""
        if code:
            name = ctypes.c_char_p()
            self._quick.cuGetErrorName(code, ctypes.byref(name))
            text = name.value.decode() if name.value else f"error {code}"
            raise TransferFailed(f"{what}: {text}")

    def enter(self, device: int) -> None:
        """Make the device's primary context current on this thread."""
        context = self._contexts.get(device) or self._retain(device)
        self.check("cuCtxSetCurrent", self._quick.cuCtxSetCurrent(context))

    def _retain(self, device: int) -> ctypes.c_void_p:
        with self._lock:
            if device not in self._contexts:
                context = ctypes.c_void_p()
                code = self._slow.cuDevicePrimaryCtxRetain(ctypes.byref(context), self._cu(device))
                self.check("cuDevicePrimaryCtxRetain", code)
                self._contexts[device] = context
            return self._contexts[device]

    def _cu(self, device: int) -> ctypes.c_int:
        number = ctypes.c_int()
        self.check("cuDeviceGet", self._quick.cuDeviceGet(ctypes.byref(number), device))
        return number

    def count(self) -> int:
        number = ctypes.c_int()
        self.check("cuDeviceGetCount", self._quick.cuDeviceGetCount(ctypes.byref(number)))
        return number.value

    def uuid(self, device: int) -> str:
        raw = (ctypes.c_ubyte * 16)()
        code = self._quick.cuDeviceGetUuid_v2(ctypes.byref(raw), self._cu(device))
        self.check("cuDeviceGetUuid", code)
        return bytes(raw).hex()

    def can_map(self, device: int, other: int) -> bool:
        if device == other:
            return True
        yes = ctypes.c_int()
        code = self._quick.cuDeviceCanAccessPeer(
            ctypes.byref(yes), self._cu(device), self._cu(other)
        )
        self.check("cuDeviceCanAccessPeer", code)
        return bool(yes.value)

    def fast_link(self, device: int, other: int) -> bool:
        yes = ctypes.c_int()
        code = self._quick.cuDeviceGetP2PAttribute(
            ctypes.byref(yes), _NATIVE_ATOMICS, self._cu(device), self._cu(other)
        )
        self.check("cuDeviceGetP2PAttribute", code)
        return bool(yes.value)

    def shares_contexts(self, device: int) -> bool:
        yes = ctypes.c_int()
        code = self._quick.cuDeviceGetAttribute(ctypes.byref(yes), _MPS_ENABLED, self._cu(device))
        if code != _INVALID_VALUE:
            self.check("cuDeviceGetAttribute", code)
            return bool(yes.value)
        # A driver older than the attribute. CUDA uses MPS if its daemon answers.
        variable, default = _MPS_PIPES
        try:
            os.stat(Path(os.environ.get(variable) or default, "control"))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            pass  # it may be there
        return True

    def settings(self) -> str:
        try:
            return _SETTINGS.read_text()
        except OSError as exc:
            raise TransferFailed(f"the NVIDIA driver's settings cannot be read: {exc}") from exc

    def allocation(self, device: int, address: int) -> Allocation:
        self.enter(device)
        pointer = ctypes.c_uint64(address)
        kind, where, capable = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int()
        for attribute, into in (
            (_MEMORY_TYPE, kind), (_DEVICE_ORDINAL, where), (_IPC_CAPABLE, capable)
        ):  # fmt: skip
            code = self._quick.cuPointerGetAttribute(ctypes.byref(into), attribute, pointer)
            self.check("cuPointerGetAttribute", code)
        if kind.value != _DEVICE_MEMORY or where.value != device:
            raise TransferFailed(f"the address is not memory of device {device}")
        base, size = self.extent(device, address)
        return Allocation(base, size, bool(capable.value))

    def extent(self, device: int, address: int) -> tuple[int, int]:
        self.enter(device)
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        code = self._quick.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
        )
        self.check("cuMemGetAddressRange", code)
        return base.value, size.value

    def allocate(self, device: int, nbytes: int) -> int:
        """The address of so much new memory of `device`. It stays until the process ends."""
        self.enter(device)
        address = ctypes.c_uint64()
        code = self._slow.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes))
        self.check("cuMemAlloc", code)
        return address.value

    def stage(self, device: int, nbytes: int) -> tuple[int, int]:
        there, here = self.allocate(device, nbytes), ctypes.c_void_p()
        code = self._slow.cuMemAllocHost_v2(ctypes.byref(here), ctypes.c_size_t(nbytes))
        self.check("cuMemAllocHost", code)
        return there, here.value or 0

    def export(self, device: int, base: int) -> bytes:
        self.enter(device)
        handle = _Handle()
        code = self._quick.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(base))
        self.check("cuIpcGetMemHandle", code)
        return bytes(handle)

    def open(self, device: int, handle: bytes) -> int:
        self.enter(device)
        base = ctypes.c_uint64()
        code = self._slow.cuIpcOpenMemHandle_v2(
            ctypes.byref(base), _Handle.from_buffer_copy(handle), ctypes.c_uint(_PEER_ACCESS)
        )
        self.check("cuIpcOpenMemHandle", code)
        return base.value

    def close(self, device: int, base: int) -> None:
        self.enter(device)
        self.check("cuIpcCloseMemHandle", self._slow.cuIpcCloseMemHandle(ctypes.c_uint64(base)))

    def stream(self, device: int) -> CudaStream:
        return CudaStream(self, self._quick, self._slow, device)

    def synchronize(self, device: int) -> None:
        self.enter(device)
        self.check("cuCtxSynchronize", self._slow.cuCtxSynchronize())


class CudaStream:
    """See Stream. Owns the CUstream, and the event that a waiting thread sleeps on: to wait for the
    stream itself keeps a core busy."""

    def __init__(self, driver: CudaDriver, quick: Any, slow: Any, device: int) -> None:
        self._driver, self._quick, self._slow = driver, quick, slow
        self.device = device
        driver.enter(device)
        self._stream = ctypes.c_void_p()
        code = slow.cuStreamCreate(ctypes.byref(self._stream), _NON_BLOCKING)
        driver.check("cuStreamCreate", code)
        self._done = ctypes.c_void_p()
        code = slow.cuEventCreate(ctypes.byref(self._done), _BLOCKING_EVENT)
        driver.check("cuEventCreate", code)
        self._first = ctypes.c_size_t(0)
        self._batch = getattr(slow, "cuMemcpyBatchAsync", None)

    @property
    def handle(self) -> int:
        return self._stream.value or 0

    @property
    def batches(self) -> bool:
        return self._batch is not None

    def copy_batch(
        self, target: Addresses, source: Addresses, nbytes: Addresses, *, engines: bool = False
    ) -> None:
        self._driver.enter(self.device)
        if self._batch is None or not self._in_one_call(target, source, nbytes, engines):
            self._one_by_one(target, source, nbytes)

    def _in_one_call(
        self, target: Addresses, source: Addresses, nbytes: Addresses, engines: bool
    ) -> bool:
        failed = ctypes.c_size_t()
        attributes = _CopyAttributes(
            source_access_order=_STREAM_ORDER, flags=_BESIDE_COMPUTE if engines else 0
        )
        arrays = [np.ascontiguousarray(a, np.uint64) for a in (target, source, nbytes)]
        assert self._batch is not None
        code = self._batch(
            *(ctypes.c_void_p(a.ctypes.data) for a in arrays),
            ctypes.c_size_t(len(nbytes)),
            ctypes.byref(attributes),
            ctypes.byref(self._first),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            self._stream,
        )
        if code == _NOT_SUPPORTED:  # a driver older or a device other than the library's: loop
            self._batch = None
            return False
        self._driver.check("cuMemcpyBatchAsync", code)
        return True

    def _one_by_one(self, target: Addresses, source: Addresses, nbytes: Addresses) -> None:
        copy = self._quick.cuMemcpyAsync
        u64, size, stream = ctypes.c_uint64, ctypes.c_size_t, self._stream
        for t, s, n in zip(target.tolist(), source.tolist(), nbytes.tolist(), strict=True):
            self._driver.check("cuMemcpyAsync", copy(u64(t), u64(s), size(n), stream))

    @property
    def done(self) -> bool:
        """Whether everything queued is done. Raises TransferFailed when the GPU or the driver
        failed: then nothing is known about what was queued."""
        self._driver.enter(self.device)
        code = self._quick.cuStreamQuery(self._stream)
        if code == _NOT_READY:
            return False
        self._driver.check("cuStreamQuery", code)
        return True

    def synchronize(self) -> None:
        self._driver.enter(self.device)
        self._driver.check("cuEventRecord", self._quick.cuEventRecord(self._done, self._stream))
        self._driver.check("cuEventSynchronize", self._slow.cuEventSynchronize(self._done))

    def close(self) -> None:
        if self._stream.value:
            self._driver.enter(self.device)
            self._driver.check("cuEventDestroy", self._slow.cuEventDestroy_v2(self._done))
            self._driver.check("cuStreamDestroy", self._slow.cuStreamDestroy_v2(self._stream))
            self._stream = ctypes.c_void_p()
