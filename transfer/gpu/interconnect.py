"""The link between the GPU that copies and the memory that it copies from or to.

A revoke waits for one batch, so a batch should take about 2 ms. Within an H100 and an H200
it took 1.2 to 2.5 ms (docs/gpu-results.md). Nobody has measured the links between GPUs yet: their
sizes follow from the speeds that they are sold with. `make bench-gpu ARGS=--peer` prints how long a
batch takes, and the run length from which copy engines are faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from pullfill.transfer.gpu import nvml
from pullfill.transfer.gpu.cuda import CudaDriver

BATCH_RUNS = 32768
"""Runs of a batch at most: 2 GiB of 64 KiB runs."""


@dataclass(frozen=True, slots=True)
class Interconnect:
    """See the module.

    small_run: if a batch's runs have fewer bytes than this on average, the kernel moves them.
        Otherwise the copy engines do.
    batch_bytes: of one batch at most.
    """

    name: str
    small_run: int
    batch_bytes: int

    @property
    def limits(self) -> tuple[int, int, int]:
        """For `CopyPlan.batches`."""
        # No run is cut to make batches even.
        return self.batch_bytes, BATCH_RUNS, self.batch_bytes


# Within one GPU, the engines take the copies of a batch one after the other. So the kernel was
# faster on an H100 whatever the runs (up to 1 MiB; see results/gpu-h100-80gb-hbm3.md).
SAME = Interconnect("one GPU", small_run=1 << 62, batch_bytes=2 << 30)
# Between GPUs, engines reach the link's speed (354 GiB/s over NVLink, same place) and leave the
# multiprocessors to the model. They cost about 1 us for each copy.
NVLINK = Interconnect("NVLink", small_run=256 << 10, batch_bytes=512 << 20)
PCIE = Interconnect("PCIe", small_run=32 << 10, batch_bytes=64 << 20)


def visible(driver: CudaDriver) -> dict[str, int]:
    """This process's numbers of the GPUs that it sees, by UUID."""
    return {driver.uuid(number): number for number in range(driver.count())}


def link_to(driver: CudaDriver, device: int, uuid: str) -> Interconnect:
    """The link from `device` to the GPU with this UUID. CUDA_VISIBLE_DEVICES may hide that GPU."""
    other = visible(driver).get(uuid)
    if other == device:
        return SAME
    if other is None:
        fast = nvml.nvlink(driver.uuid(device), uuid)
    else:
        fast = driver.fast_link(device, other)
    return NVLINK if fast else PCIE
