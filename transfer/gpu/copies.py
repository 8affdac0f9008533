"""Copies many runs on one GPU, or between two, and returns when they are done.

Each GPU of a process has one `Lane`: a stream, a kernel and buffers. Each session has a
`GpuCopier`. It knows the link that it copies over (`Interconnect`), and so whether the kernel or
the copy engines move a batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pullfill.errors import TransferFailed
from pullfill.runtime import failpoints, log
from pullfill.transfer.gpu.cuda import Addresses, CudaDriver, load
from pullfill.transfer.runs import Copies

if TYPE_CHECKING:
    from pullfill.transfer.gpu.kernel import RunKernel


# Runs of a batch at most: 2 GiB of 64 KiB runs.
BATCH_RUNS = 32768


@dataclass(frozen=True, slots=True)
class Interconnect:
    """The link between the GPU that copies and the memory that it copies from or to.

    small_run: if a batch's runs have fewer bytes than this on average, the kernel moves them.
        Otherwise the copy engines do.
    batch_bytes: of one batch at most.
    """

    name: str
    small_run: int
    batch_bytes: int

    @property
    def limits(self) -> tuple[int, int]:
        """For `Copies.batches`."""
        return self.batch_bytes, BATCH_RUNS


# A revoke waits for one batch, so a batch should take about 2 ms. Within an H100 and an H200, 2 GiB
# took 1.2 to 2.5 ms (docs/operations.md).
# There, the engines take the copies of a batch one after the other. So the kernel was faster on an
# H100 whatever the runs (up to 1 MiB; see results/gpu-h100-80gb-hbm3.md).
SAME = Interconnect("one GPU", small_run=1 << 62, batch_bytes=2 << 30)
# Between GPUs, engines reach the link's speed and leave the multiprocessors to the model. They cost
# about 1 us for each copy. By the speeds that links are sold with, this batch takes 0.4 ms over
# NVLink and 2 to 5 ms over PCIe. Nobody has measured them: `make bench-gpu ARGS=--peer` prints how
# long a batch takes, and the run length from which copy engines are faster.
BETWEEN = Interconnect("two GPUs", small_run=32 << 10, batch_bytes=128 << 20)


def visible(driver: CudaDriver) -> dict[str, int]:
    """This process's numbers of the GPUs that it sees, by UUID."""
    return {driver.uuid(number): number for number in range(driver.count())}


def link_to(driver: CudaDriver, device: int, uuid: str) -> Interconnect:
    """The link from `device` to the GPU with this UUID, which CUDA_VISIBLE_DEVICES may hide."""
    return SAME if visible(driver).get(uuid) == device else BETWEEN


logger = log.get("transfer.gpu")

_BROKEN = "an earlier copy failed on the GPU; restart this worker"


def kernel_for(device: int, stream: int) -> RunKernel | None:
    """The compiled Triton kernel for a device and a CUstream. None, with a warning: it cannot run
    here."""
    try:
        import torch

        from pullfill.transfer.gpu.kernel import RunKernel

        kernel = RunKernel(torch.device("cuda", device), stream, BATCH_RUNS)
        kernel.warm()
        return kernel
    except Exception as exc:  # no triton, no compiler, torch without CUDA: each raises its own
        logger.warning("Triton does not work here, so KV is copied run by run, slower: %s", exc)
        return None


# All sessions take turns on it, because one batch uses the whole link anyway.
class Lane:
    """What this process copies with on one device. Its user holds `lock`.

    broken: a `wait` has failed, so nobody knows whether the device still writes."""

    def __init__(
        self,
        driver: CudaDriver,
        device: int,
        make_kernel: Callable[[int, int], RunKernel | None] = kernel_for,
    ) -> None:
        self.lock = threading.Lock()
        self._stream = driver.stream(device)
        self._kernel = make_kernel(device, self._stream.handle)
        self.broken = False

    @property
    def has_kernel(self) -> bool:
        """If False, the copy engines make every copy."""
        return self._kernel is not None

    def copy(
        self,
        target: Addresses,
        source: Addresses,
        nbytes: Addresses,
        link: Interconnect = SAME,
    ) -> None:
        """Make at most BATCH_RUNS copies over a link. Returns when they are done. Raises
        TransferFailed: nothing goes on then, unless the lane is `broken`."""
        try:
            self._queue(target, source, nbytes, link)
            failpoints.hit("gpu.queued")
        finally:  # also when it could queue a part only
            self.wait()

    def _queue(
        self, target: Addresses, source: Addresses, nbytes: Addresses, link: Interconnect
    ) -> None:
        # 16 divides all addresses and lengths of KV pages, and the kernel needs that.
        aligned = not int(np.bitwise_or.reduce(target | source | nbytes)) & 15
        # Waited for before the next one, because the kernel's table is in use until then.
        if self._kernel is not None and aligned and int(nbytes.mean()) < link.small_run:
            self._kernel.launch(target, source, nbytes)
        else:
            # Within one GPU, engines reach a small part of what the memory gives.
            self._stream.copy_batch(target, source, nbytes, engines=link is not SAME)

    def wait(self) -> None:
        """Wait until all that was queued is done. Raises TransferFailed. After that the lane takes
        no more copies."""
        try:
            self._stream.synchronize()
        except BaseException:
            first, self.broken = not self.broken, True
            for tell in _watchers if first else ():
                tell("copies on a GPU have failed")
            raise

    def check(self) -> None:
        """Raises TransferFailed when a `wait` has failed."""
        if self.broken:
            raise TransferFailed(_BROKEN)


# A prefill worker that cannot copy is of no use, so it ends.
_watchers: list[Callable[[str], None]] = []


def when_broken(tell: Callable[[str], None]) -> None:
    """Call `tell` with the reason when a lane of this process takes no more copies. Any thread may
    call it, while it holds a fence."""
    _watchers.append(tell)


_lanes: dict[int, Lane] = {}
_making = threading.Lock()


def lane_of(device: int) -> Lane:
    """This process's lane on the device. Raises TransferFailed.

    The first call compiles the kernel, which takes seconds."""
    with _making:
        if device not in _lanes:
            _lanes[device] = Lane(load(), device)
        return _lanes[device]


class GpuCopier:
    """Callable (source address, target address, batch). One thread at a time.

    settled: nothing of this session is in flight. The fence is left only then."""

    def __init__(self, lane: Lane, link: Interconnect = SAME) -> None:
        self._lane = lane
        self._link = link
        self.settled = True

    def __call__(self, source: int, target: int, batch: Copies) -> None:
        """Returns when all bytes are there. Raises TransferFailed."""
        if not self.settled:
            raise TransferFailed(_BROKEN)
        sources, targets, nbytes = (column.astype(np.uint64) for column in batch.flat())
        runs = targets + np.uint64(target), sources + np.uint64(source), nbytes
        with self._lane.lock:
            self._lane.check()
            # From here until the stream is synchronised something may be queued. If that fails it
            # stays so: nobody knows whether the device still writes.
            self.settled = False
            try:
                self._lane.copy(*runs, self._link)
            finally:
                self.settled = not self._lane.broken
