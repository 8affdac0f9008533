"""The decode worker's side of cuda_ipc: the fence file, and a handle on each rank's GPU memory."""

from __future__ import annotations

from collections.abc import Sequence

from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.cuda_ipc.endpoint import Exported, IpcEndpoint
from pullfill.transfer.cuda_ipc.writers import WriterTable
from pullfill.transfer.layout import check_bounds
from pullfill.transfer.shm.fence import SLOTS
from pullfill.transfer.shm.files import RegionFiles, inode
from pullfill.transfer.shm.owner import FenceOwner


class CudaIpcOwner(FenceOwner):
    """Offers the GPU memory of each rank to peers that map it."""

    # The memory belongs to vLLM. To free it while another process maps it is undefined (CUDA). So
    # a worker frees its KV cache only by ending.

    def __init__(
        self,
        files: RegionFiles,
        memories: Sequence[LocalMemory],
        exported: Sequence[Exported | None],
        incarnation: str,
        slots: int = SLOTS,
    ) -> None:
        """
        files: only its fence file is used.
        memories: by rank.
        exported: by rank. None: the rank has no handle, so only transports through a port reach it.

        Raises BadMessage.
        """
        fence = str(files.fence_path), inode(files.fence_fd)
        self._endpoints: list[dict[str, str]] = []
        for memory, handle in zip(memories, exported, strict=True):
            check_bounds(memory.layout, memory.nbytes)
            offers = {}
            if handle is not None:
                endpoint = IpcEndpoint(memory=handle, fence=fence[0], fence_inode=fence[1])
                offers["cuda_ipc"] = endpoint.encode()
            self._endpoints.append(offers)
        super().__init__(files, memories[0].layout.num_blocks, incarnation, slots=slots)
        self._writers = WriterTable(files.fence_fd)
        self.fences.quiet = self._writers.quiet

    def endpoints(self, rank: int = 0) -> dict[str, str]:
        return self._endpoints[rank]

    def close(self) -> None:
        """See Owner. Idempotent."""
        super().close()
        self._writers.close()
