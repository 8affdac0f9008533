"""Copies of many runs on one stream, done when the call returns: a session's `Copier` for GPUs.

Two ways, by the mean length of a batch's runs. Long ones go through the copy engines in one batched
call, without taking multiprocessors from the model. For many short ones the engines' cost per copy
(about 1 us) dominates, so one kernel moves them all. `SMALL_RUN` is where the two meet; what
`python -m benchmarks.bench_gpu` prints decides.

`settled` is what a fence may stand on: False from the moment something may have been queued until
the stream was synchronised. A copier that failed in between stays unsettled for good: nobody knows
whether the device still writes.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pullfill import log
from pullfill.errors import TransferFailed
from pullfill.transfer.gpu.contract import Addresses, GpuDriver
from pullfill.transfer.runs import Batch

logger = log.get("transfer.gpu")

BATCH_BYTES = 64 << 20
"""A fence is held for this: 0.2 ms within a GPU, 1-3 ms over PCIe."""
BATCH_RUNS = 8192
SMALL_RUN = 32 << 10
"""Mean bytes of a run below which the kernel is used (a first estimate, see docs/gpu-results.md)"""


class Kernel(Protocol):
    """kernel.RunKernel, or nothing like it in tests."""

    def launch(self, target: Addresses, source: Addresses, nbytes: Addresses) -> None: ...


class GpuCopier:
    """Callable (source address, target address, batch). Owns its stream; `close` gives it back.
    One thread at a time."""

    def __init__(
        self,
        driver: GpuDriver,
        device: int,
        *,
        kernel: Kernel | None = None,
        small_run: int = SMALL_RUN,
    ) -> None:
        """`kernel`: None = copy engines only."""
        self._stream = driver.stream(device)
        self._kernel = kernel
        self._small_run = small_run
        self.settled = True

    @property
    def stream(self) -> int:
        """CUstream."""
        return self._stream.handle

    def use_kernel(self, kernel: Kernel | None) -> None:
        """From the next batch on."""
        self._kernel = kernel

    def __call__(self, source: int, target: int, batch: Batch) -> None:
        """Returns when all bytes are there. Raises TransferFailed."""
        if not self.settled:
            raise TransferFailed("an earlier copy failed on the GPU; restart this worker")
        flat = batch.flat()
        from_, to = _absolute(source, flat.source), _absolute(target, flat.target)
        nbytes = flat.nbytes.astype(np.uint64)
        kernel = self._kernel if int(nbytes.mean()) < self._small_run else None
        self.settled = False
        try:
            if kernel is None:
                self._stream.copy_batch(to, from_, nbytes)
            else:
                kernel.launch(to, from_, nbytes)
        finally:  # also when it could queue a part only
            self._stream.synchronize()
            self.settled = True

    def close(self) -> None:
        """Idempotent. An unsettled stream is left alone: destroying it proves nothing."""
        if self.settled:
            self._stream.close()


def _absolute(base: int, offsets: np.ndarray) -> Addresses:
    return offsets.astype(np.uint64) + np.uint64(base)


def kernel_for(device: int, stream: int) -> Kernel | None:
    """The Triton kernel on a real device, compiled; None, with a warning, where it cannot run."""
    try:
        import torch

        from pullfill.transfer.gpu.kernel import RunKernel

        kernel = RunKernel(torch.device("cuda", device), stream, BATCH_RUNS)
        kernel.warm()
        return kernel
    except Exception as exc:  # no triton, no compiler, torch without CUDA: each raises its own
        logger.warning("short runs are copied one by one, Triton does not work here: %s", exc)
        return None
