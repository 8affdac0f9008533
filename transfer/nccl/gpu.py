"""What the nccl backends need of one GPU of this process: streams, memory, and copies within it."""

from __future__ import annotations

from functools import cache

from pullfill.errors import TransferFailed
from pullfill.transfer.gpu.copies import lane_of
from pullfill.transfer.gpu.cuda import Addresses, CudaStream, load, settle
from pullfill.transfer.gpu.interconnect import BATCH_RUNS, SAME
from pullfill.transfer.nccl import library

nccl = cache(library.load)
"""This process's libnccl. Raises TransferFailed."""


class CudaGpu:
    """One GPU. Makes no CUDA context before it is used."""

    def __init__(self, device: int) -> None:
        self._device = device
        self.uuid = load().uuid(device)

    def library(self) -> object:
        """See `library.load`."""
        return nccl()

    def activate(self) -> None:
        """Make it the calling thread's device: NCCL takes the driver's current context."""
        load().enter(self._device)

    def stream(self) -> CudaStream:
        return load().stream(self._device)

    def copier(self) -> Copier:
        """The first call takes seconds: see `lane_of`."""
        return Copier(self._device)

    def allocate(self, nbytes: int) -> int:
        """The address of new memory, for as long as the process lives."""
        # To give memory back waits for everything that runs on the GPU, also for a kernel that
        # waits for another worker. Not from torch's pool, which orders memory by its own streams.
        return load().allocate(self._device, nbytes)


class Copier:
    """Gathers and scatters on the GPU's lane, which all copies of this process share."""

    def __init__(self, device: int) -> None:
        self._lane = lane_of(device)

    def copy(self, target: Addresses, source: Addresses, nbytes: Addresses) -> None:
        """Copy runs within the GPU. Returns when all of it is done. Raises TransferFailed when
        nothing of it goes on. Any thread."""
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
            settle(self._lane.wait, "a GPU does not say whether it still writes; waiting")
            raise TransferFailed(f"copying within the GPU failed: {exc}") from exc
