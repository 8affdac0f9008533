"""The decode worker's side of shm: publishes where the region is, fences it, removes it.

Owns the RegionFiles from construction on. The KV memory itself belongs to whoever mapped it (the
engine): after `close` it stays mapped there, only nobody new can open it.
"""

from __future__ import annotations

import os

from pullfill.errors import ConfigError
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.layout import check_bounds
from pullfill.transfer.shm.fence import SLOTS, ShmFences
from pullfill.transfer.shm.files import RegionFiles, ShmEndpoint, inode


class ShmOwner:
    """Owner over a shared region. Thread-safe."""

    def __init__(
        self,
        files: RegionFiles,
        memory: LocalMemory,
        incarnation: str,
        *,
        kv_path: str | None = None,
        slots: int = SLOTS,
    ) -> None:
        """`memory.address` is the first byte of the KV file (`kv_path`, by default the one that
        `files` made). Raises ConfigError when the file is not as large as the memory."""
        check_bounds(memory.layout, memory.nbytes)
        self._files = files
        path = kv_path or str(files.kv_path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size, kv_inode = os.fstat(fd).st_size, inode(fd)
        finally:
            os.close(fd)
        if size < memory.nbytes:
            raise ConfigError(f"{path} has {size} bytes, the KV memory {memory.nbytes}")
        self._fences = ShmFences(files.fence_fd, incarnation, memory.layout.num_blocks, slots=slots)
        self._region = ShmEndpoint(
            kv=path,
            kv_inode=kv_inode,
            fence=str(files.fence_path),
            fence_inode=inode(files.fence_fd),
            nbytes=memory.nbytes,
        ).encode()

    def endpoints(self, rank: int = 0) -> dict[str, str]:
        """See Owner."""
        return {"shm": self._region}

    @property
    def fences(self) -> ShmFences:
        return self._fences

    def renew(self, incarnation: str) -> None:
        """See Owner."""
        self._fences.renew(incarnation)

    def close(self) -> None:
        """Refuse all sessions, unlink both files. Idempotent."""
        self._fences.close()
        self._files.close()
