"""The GPUs of this process, for NCCL. Nothing is loaded before it is needed."""

from __future__ import annotations

import threading
from functools import cache

from pullfill.errors import TransferFailed
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.gpu.cuda import load, why_no_cuda
from pullfill.transfer.nccl import library
from pullfill.transfer.nccl.backend import NcclKind
from pullfill.transfer.nccl.device import Device
from pullfill.transfer.nccl.gpu import CudaGpu, nccl
from pullfill.transfer.nccl.nccl_settings import setting

_SHARING_FROM = 23000


def make_kind() -> NcclKind:
    """The transport on this process's GPUs. Its `why_not` says what is missing."""
    return NcclKind(_gpus())


class CudaGpus:
    """One for the process, because a GPU has one `Device`. Thread-safe."""

    def __init__(self) -> None:
        self._devices: dict[int, Device] = {}
        self._mutex = threading.Lock()

    def why_not(self) -> str | None:
        """Why this process cannot use NCCL, for people."""
        if (reason := why_no_cuda() or library.blocking_forced()) is not None:
            return reason
        try:
            nccl()
        except TransferFailed as exc:
            return str(exc)
        return None

    def version(self) -> int:
        """NCCL's, as NCCL writes it: 22903 is 2.29.3."""
        return library.Nccl(nccl()).version()

    def shared(self) -> bool:
        """Whether two ranks may be on one GPU."""
        value, _ = setting("NCCL_MULTI_RANK_GPU_ENABLE")
        return value == "1" and self.version() >= _SHARING_FROM

    def uuids(self) -> list[str]:
        driver = load()
        return [driver.uuid(device) for device in range(driver.count())]

    def of(self, memory: LocalMemory) -> Device | None:
        """The GPU that holds `memory`, the same object each time. None: it is not on a GPU."""
        number = memory.device
        if number is None:
            return None
        with self._mutex:
            if number not in self._devices:
                self._devices[number] = Device(CudaGpu(number))
            return self._devices[number]


_gpus = cache(CudaGpus)
