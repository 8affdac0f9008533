"""The real GPUs and the real NCCL: cupy for NCCL and streams, `transfer/gpu` for the copies.

Everything is imported when it is first needed, and nothing of it without a CUDA device.

How many channels a communicator uses is NCCL's setting for the whole process, read when the first
one is made: `NCCL_MAX_NCHANNELS` if it is set, else `CHANNELS` (about 6.5 MB of GPU memory each).
"""

from __future__ import annotations

import importlib.util
import os
import threading
from functools import cache
from typing import Any

from pullfill.errors import TransferFailed
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.gpu.contract import Stream as DriverStream
from pullfill.transfer.gpu.copies import Kernel, kernel_for
from pullfill.transfer.gpu.cuda import load, why_no_cuda
from pullfill.transfer.gpu.link import BATCH_RUNS
from pullfill.transfer.nccl.communicator import settle
from pullfill.transfer.nccl.contract import Addresses, Copier, Gpu, Nccl, Stream
from pullfill.transfer.nccl.plane import NcclKind

CHANNELS = 8
_SHARING_FROM = 23000


@cache
def _nccl() -> Any:
    os.environ.setdefault("NCCL_MAX_NCHANNELS", str(CHANNELS))
    from cupy.cuda import nccl

    if not nccl.available:
        raise ImportError("cupy finds no NCCL library")
    return nccl


class CudaGpus:
    """contract.Gpus. One per process is enough. Thread-safe."""

    def __init__(self) -> None:
        self._gpus: dict[int, CudaGpu] = {}
        self._mutex = threading.Lock()

    def why_not(self) -> str | None:
        """See Gpus."""
        if (reason := why_no_cuda()) is not None:
            return reason
        if importlib.util.find_spec("cupy") is None:
            return "cupy is not installed (pip install pullfill[cuda13], or [cuda12])"
        try:
            _nccl()
        except Exception as exc:
            return f"NCCL does not load: {exc}"
        return None

    def version(self) -> int:
        """See Gpus."""
        return int(_nccl().get_version())

    def shared(self) -> bool:
        """See Gpus."""
        allowed = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        return allowed and self.version() >= _SHARING_FROM

    def uuids(self) -> list[str]:
        """See Gpus."""
        driver = load()
        return [driver.uuid(device) for device in range(driver.count())]

    def of(self, memory: LocalMemory) -> Gpu | None:
        """See Gpus."""
        if memory.device is None:
            return None
        with self._mutex:
            if memory.device not in self._gpus:
                self._gpus[memory.device] = CudaGpu(memory.device)
            return self._gpus[memory.device]


def make_kind() -> NcclKind:
    """The transport on this process's GPUs; its `why_not` says what is missing."""
    return NcclKind(CudaGpus())


class CudaGpu:
    """contract.Gpu."""

    def __init__(self, device: int) -> None:
        self._device = device
        self.uuid = load().uuid(device)

    @property
    def nccl(self) -> Nccl:
        """cupy's module."""
        module: Nccl = _nccl()
        return module

    def activate(self) -> None:
        """See Gpu."""
        import cupy

        cupy.cuda.runtime.setDevice(self._device)

    def stream(self) -> Stream:
        """See Gpu."""
        return _CupyStream(self._device)

    def copier(self) -> Copier:
        """See Gpu."""
        return _CudaCopier(self._device)

    def allocate(self, nbytes: int) -> int:
        """See Gpu. Not from a pool: NCCL's kernels and ours use it on streams of their own."""
        import cupy

        self.activate()
        return int(cupy.cuda.runtime.malloc(nbytes))

    def free(self, address: int) -> None:
        """See Gpu."""
        import cupy

        self.activate()
        cupy.cuda.runtime.free(address)


class _CupyStream:
    """contract.Stream, on the owner thread of one communicator (which is on its device)."""

    def __init__(self, device: int) -> None:
        import cupy

        with cupy.cuda.Device(device):
            self._stream: Any = cupy.cuda.Stream(non_blocking=True)

    @property
    def ptr(self) -> int:
        return int(self._stream.ptr)

    @property
    def done(self) -> bool:
        return bool(self._stream.done)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._stream = None


class _CudaCopier:
    """Gathers and scatters on a stream of its own, by the Triton kernel where there is one: within
    one GPU it is faster than the copy engines."""

    def __init__(self, device: int) -> None:
        self._stream: DriverStream = load().stream(device)
        self._kernel: Kernel | None = kernel_for(device, self._stream.handle)

    def copy(self, target: Addresses, source: Addresses, nbytes: Addresses) -> None:
        """See Copier. Returns or raises only when nothing is being copied any more."""
        for first in range(0, len(nbytes), BATCH_RUNS):
            part = slice(first, first + BATCH_RUNS)
            self._copy(target[part], source[part], nbytes[part])

    def _copy(self, target: Addresses, source: Addresses, nbytes: Addresses) -> None:
        try:
            if self._kernel is not None:
                self._kernel.launch(target, source, nbytes)
            else:
                self._stream.copy_batch(target, source, nbytes)
            self._stream.synchronize()
        except Exception as exc:
            settle(self._stream.synchronize)
            raise TransferFailed(f"copying within the GPU failed: {exc}") from exc

    def close(self) -> None:
        self._stream.close()
