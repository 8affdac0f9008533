"""The decode worker's side of cuda_ipc: the fence file, and a handle on each rank's GPU memory.

Peers find both in the endpoint that it publishes (`IpcEndpoint`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.cuda_ipc.writers import WriterTable
from pullfill.transfer.gpu.cuda import HANDLE_BYTES
from pullfill.transfer.layout import check_bounds
from pullfill.transfer.shm.fence import SLOTS
from pullfill.transfer.shm.files import Endpoint, RegionFiles, inode
from pullfill.transfer.shm.owner import FenceOwner

_Size = Annotated[int, Meta(ge=0, le=1 << 62)]


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """GPU memory of one process, as any other process of this host can map it.

    handle: the IPC handle of the whole allocation.
    offset, nbytes: the part of the allocation that is meant.
    device: the UUID.
    pid, pid_space: the process that exported it.
    """

    handle: Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    offset: _Size
    nbytes: _Size
    device: Annotated[str, Meta(max_length=64)]
    pid: Annotated[int, Meta(ge=1)]
    pid_space: Annotated[str, Meta(max_length=64)]


class IpcEndpoint(Endpoint, frozen=True, kw_only=True):
    """The GPU memory of one rank."""

    transport = "cuda_ipc"
    memory: Exported


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
        super().__init__(files, incarnation, slots=slots)
        self._writers = WriterTable(files.fence_fd)
        self.fences.quiet = self._writers.quiet

    def endpoints(self, rank: int = 0) -> dict[str, str]:
        return self._endpoints[rank]

    def close(self) -> None:
        """See Owner. Idempotent."""
        super().close()
        self._writers.close()
