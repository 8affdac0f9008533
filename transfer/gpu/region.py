"""A rank's KV cache on a GPU: where it is, and whether other processes can map it.

A rank's process exports its memory and describes it to the worker's main process (`tell_gpu`). The
main process makes all copies. It uses the memory of a rank that lives in it as it is. It maps what
other ranks exported (`GpuMapping`). `CudaIpcOwner` offers all of it to peers.
"""

from __future__ import annotations

import os
from dataclasses import replace

from pullfill.errors import ConfigError, PeerUnavailable, TransferFailed
from pullfill.runtime import log
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.cuda_ipc.owner import Exported
from pullfill.transfer.cuda_ipc.processes import pid_namespace
from pullfill.transfer.gpu.cuda import CudaDriver, load
from pullfill.transfer.gpu.interconnect import visible
from pullfill.transfer.shm.ranks import RankRegion, region_of

logger = log.get("transfer.gpu")


def tell_gpu(memory: LocalMemory, driver: CudaDriver | None = None) -> RankRegion:
    """Describe a rank's GPU memory for the main process. If it cannot be exported, only transports
    that copy in the rank's own process reach it. `kv_pool.tell` keeps it allocated."""
    exported, why_not = None, ""
    try:
        exported = export(memory, driver)
    except (ConfigError, TransferFailed) as exc:
        why_not = str(exc)
        logger.warning("other processes cannot map this KV cache: %s", why_not)
    return region_of(memory, exported=exported, why_not=why_not)


def export(memory: LocalMemory, driver: CudaDriver | None = None) -> Exported:
    """What lets other processes of this host map `memory`, which is this process's own.

    Raises ConfigError, which says what to change, when the memory cannot be exported. Raises
    TransferFailed when CUDA fails.
    """
    driver = driver or load()
    if memory.device is None:
        raise ConfigError("memory of the CPU has no CUDA handle")
    whole = driver.allocation(memory.device, memory.address)
    if not whole.exportable:
        raise ConfigError(
            "CUDA IPC cannot share the KV cache: it is made of mapped physical pages (VMM) or is "
            "from a memory pool. Remove expandable_segments and cudaMallocAsync from "
            "PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF, and do not use --enable-sleep-mode"
        )
    offset = memory.address - whole.base
    if offset + memory.nbytes > whole.nbytes:
        raise ConfigError("the KV cache is not one allocation of CUDA")
    return Exported(
        handle=driver.export(memory.device, whole.base),
        offset=offset,
        nbytes=memory.nbytes,
        device=driver.uuid(memory.device),
        pid=os.getpid(),
        pid_space=pid_namespace(),
    )


class GpuMapping:
    """Another process's exported memory, mapped here until `close`. For the main process of a
    worker and its own ranks. Peers map through cuda_ipc/peer.py."""

    # To map takes a CUDA context on the rank's device.

    def __init__(
        self, exported: Exported, theirs: LocalMemory, driver: CudaDriver | None = None
    ) -> None:
        """
        theirs: the memory as its process sees it.

        Raises PeerUnavailable when this process does not see the device, or cannot map the memory.
        """
        self._driver = driver or load()
        device = visible(self._driver).get(exported.device)
        if device is None:
            raise PeerUnavailable("a rank's GPU is not visible to the worker's main process")
        try:
            self._base: int | None = self._driver.open(device, exported.handle)
        except TransferFailed as exc:
            raise PeerUnavailable(f"a rank's GPU memory cannot be mapped: {exc}") from exc
        self._device = device
        self.memory = replace(theirs, address=self._base + exported.offset, device=device)

    def close(self) -> None:
        """Nothing may copy there any more. Idempotent."""
        if self._base is not None:
            self._driver.close(self._device, self._base)
            self._base = None
