"""The decode worker's side of cuda_ipc: the fence file, and a handle on each rank's GPU memory.

The memory belongs to vLLM. CUDA says that freeing an exported allocation while another process maps
it is undefined; a worker therefore frees its KV cache only by ending, after its streams ended.
"""

from __future__ import annotations

from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.cuda_ipc.endpoint import Exported, IpcEndpoint
from pullfill.transfer.cuda_ipc.writers import WriterTable
from pullfill.transfer.layout import check_bounds
from pullfill.transfer.shm.fence import SLOTS
from pullfill.transfer.shm.files import RegionFiles, inode
from pullfill.transfer.shm.owner import FenceOwner


class CudaIpcOwner(FenceOwner):
    """Owner over GPU memory, one region for each rank. Thread-safe."""

    def __init__(
        self,
        files: RegionFiles,
        memory: LocalMemory,
        exported: Exported | None,
        incarnation: str,
        *,
        slots: int = SLOTS,
    ) -> None:
        """`files`: only its fence file is used; owned from here on. `exported`: None = rank 0 has
        no handle, only transports through a port reach it. Raises BadMessage."""
        self._endpoints: list[str | None] = []
        self._fence = str(files.fence_path), inode(files.fence_fd)
        self.add_rank(memory, exported)
        super().__init__(files, memory.layout.num_blocks, incarnation, slots=slots)
        self._writers = WriterTable(files.fence_fd)
        self.fences.quiet = self._writers.quiet

    def add_rank(self, memory: LocalMemory, exported: Exported | None) -> None:
        """The next rank's region, before anything is published."""
        check_bounds(memory.layout, memory.nbytes)
        if exported is None:
            self._endpoints.append(None)
            return
        endpoint = IpcEndpoint(memory=exported, fence=self._fence[0], fence_inode=self._fence[1])
        self._endpoints.append(endpoint.encode())

    def endpoints(self, rank: int = 0) -> dict[str, str]:
        """See Owner."""
        endpoint = self._endpoints[rank]
        return {} if endpoint is None else {"cuda_ipc": endpoint}

    def close(self) -> None:
        """See Owner. Idempotent."""
        super().close()
        self._writers.close()
