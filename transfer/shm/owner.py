"""The decode worker's fence, and what it offers to peers of its own host.

`FenceOwner` is the fence alone: whatever moves the bytes, this one file says who still may. It owns
the RegionFiles from construction on. `ShmOwner` adds the KV files of the ranks, for peers that map
them. The KV memory itself belongs to whoever mapped it (the engine): after `close` it stays mapped
there, only nobody new can open it.
"""

from __future__ import annotations

import os

from pullfill.errors import ConfigError
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.layout import check_bounds
from pullfill.transfer.shm.fence import SLOTS, ShmFences
from pullfill.transfer.shm.files import RegionFiles, ShmEndpoint, inode


class FenceOwner:
    """An Owner that offers nothing by itself: `owners.py` adds offers. Thread-safe."""

    def __init__(
        self, files: RegionFiles, num_blocks: int, incarnation: str, *, slots: int = SLOTS
    ) -> None:
        self._files = files
        self._fences = ShmFences(files.fence_fd, incarnation, num_blocks, slots=slots)

    def endpoints(self, rank: int = 0) -> dict[str, str]:
        """See Owner."""
        return {}

    @property
    def fences(self) -> ShmFences:
        return self._fences

    def open_fence(self) -> int:
        """A descriptor of the fence file with locks of its own, for a gate in this process; the
        caller owns it. Raises OSError."""
        return os.open(f"/proc/self/fd/{self._files.fence_fd}", os.O_RDWR | os.O_CLOEXEC)

    def renew(self, incarnation: str) -> None:
        """See Owner."""
        self._fences.renew(incarnation)

    def close(self) -> None:
        """Refuse all sessions, unlink the files. Idempotent."""
        self._fences.close()
        self._files.close()


class ShmOwner(FenceOwner):
    """Owner over shared regions, one for each rank."""

    def __init__(
        self,
        files: RegionFiles,
        memory: LocalMemory,
        incarnation: str,
        *,
        kv_path: str | None = None,
        slots: int = SLOTS,
    ) -> None:
        """`memory.address` is the first byte of rank 0's KV file (`kv_path`, by default the one
        that `files` made). Raises ConfigError when the file is not as large as the memory."""
        self._regions: list[str] = []
        self._fence = str(files.fence_path), inode(files.fence_fd)
        self.add_rank(memory, kv_path or str(files.kv_path))
        super().__init__(files, memory.layout.num_blocks, incarnation, slots=slots)

    def add_rank(self, memory: LocalMemory, kv_path: str) -> None:
        """The next rank's region, before anything is published. Raises like the constructor."""
        check_bounds(memory.layout, memory.nbytes)
        fd = os.open(kv_path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size, kv_inode = os.fstat(fd).st_size, inode(fd)
        finally:
            os.close(fd)
        if size < memory.nbytes:
            raise ConfigError(f"{kv_path} has {size} bytes, the KV memory {memory.nbytes}")
        endpoint = ShmEndpoint(
            kv=kv_path,
            kv_inode=kv_inode,
            fence=self._fence[0],
            fence_inode=self._fence[1],
            nbytes=memory.nbytes,
        )
        self._regions.append(endpoint.encode())

    def endpoints(self, rank: int = 0) -> dict[str, str]:
        """See Owner."""
        return {"shm": self._regions[rank]}
