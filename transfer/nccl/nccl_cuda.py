"""The real GPUs and the real NCCL: libnccl and the CUDA driver through ctypes, `transfer/gpu` for
the copies. Nothing is loaded before it is first needed, and nothing without a CUDA device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache

from pullfill.errors import TransferFailed
from pullfill.runtime import log
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.gpu.copies import lane_of
from pullfill.transfer.gpu.cuda import load, why_no_cuda
from pullfill.transfer.gpu.interconnect import BATCH_RUNS, SAME
from pullfill.transfer.nccl import library
from pullfill.transfer.nccl.backend import NcclKind
from pullfill.transfer.nccl.device import Device
from pullfill.transfer.nccl.nccl_contract import Addresses, Copier, Library, Stream
from pullfill.transfer.nccl.nccl_settings import setting

logger = log.get("transfer.nccl")

_SHARING_FROM = 23000
_ASK_S = 0.05


@cache
def _nccl() -> Library:
    return library.load()


def make_kind() -> NcclKind:
    """The transport on this process's GPUs; its `why_not` says what is missing."""
    return NcclKind(_gpus())


class CudaGpus:
    """device.Gpus. One for the process: a GPU has one `Device`. Thread-safe."""

    def __init__(self) -> None:
        self._devices: dict[int, Device] = {}
        self._mutex = threading.Lock()

    def why_not(self) -> str | None:
        """See Gpus."""
        if (reason := why_no_cuda() or library.blocking_forced()) is not None:
            return reason
        try:
            _nccl()
        except TransferFailed as exc:
            return str(exc)
        return None

    def version(self) -> int:
        """See Gpus."""
        return library.Nccl(_nccl()).version()

    def shared(self) -> bool:
        """See Gpus."""
        value, _ = setting("NCCL_MULTI_RANK_GPU_ENABLE") or ("", "")
        return value == "1" and self.version() >= _SHARING_FROM

    def uuids(self) -> list[str]:
        """See Gpus."""
        driver = load()
        return [driver.uuid(device) for device in range(driver.count())]

    def of(self, memory: LocalMemory) -> Device | None:
        """See Gpus."""
        number = memory.device
        if number is None:
            return None
        with self._mutex:
            if number not in self._devices:
                self._devices[number] = Device(CudaGpu(number))
            return self._devices[number]


_gpus = cache(CudaGpus)


class CudaGpu:
    """contract.Gpu."""

    def __init__(self, device: int) -> None:
        self._device = device
        self.uuid = load().uuid(device)

    def library(self) -> Library:
        """See Gpu."""
        return _nccl()

    def activate(self) -> None:
        """See Gpu. NCCL's CUDA runtime takes the driver's current context."""
        load().enter(self._device)

    def stream(self) -> Stream:
        """See Gpu."""
        return load().stream(self._device)

    def copier(self) -> Copier:
        """See Gpu."""
        return _CudaCopier(self._device)

    def allocate(self, nbytes: int) -> int:
        """See Gpu. Not from torch's pool, which orders memory by its own streams."""
        return load().allocate(self._device, nbytes)


class _CudaCopier:
    """Gathers and scatters on the GPU's lane, which all copies of this process share."""

    def __init__(self, device: int) -> None:
        self._lane = lane_of(device)

    def copy(self, target: Addresses, source: Addresses, nbytes: Addresses) -> None:
        """See Copier."""
        for first in range(0, len(nbytes), BATCH_RUNS):
            part = slice(first, first + BATCH_RUNS)
            with self._lane.lock:
                self._copy(target[part], source[part], nbytes[part])

    def _copy(self, target: Addresses, source: Addresses, nbytes: Addresses) -> None:
        self._lane.check()
        try:
            try:
                self._lane.queue(target, source, nbytes, SAME)
            finally:  # also when it could queue a part only
                self._lane.wait()
        except Exception as exc:
            settle(self._lane.wait)
            raise TransferFailed(f"copying within the GPU failed: {exc}") from exc


def settle(synchronize: Callable[[], None]) -> None:
    """Wait, for as long as it takes, until nothing runs on a stream. Never raises: who cannot know
    that the GPU is quiet must not let go of a fence."""
    said = False
    while True:
        try:
            return synchronize()
        except Exception as exc:
            if not said:
                logger.error("a GPU does not say whether it still writes; waiting: %s", exc)
            said = True
            time.sleep(_ASK_S)
