"""The fence over a worker's memory, and what the worker offers to peers of its own host.

`FenceOwner` has the fence alone. Whatever moves the bytes, its one file says who still may. It owns
the RegionFiles from construction on. `ShmOwner` adds the KV files of the ranks, for peers that map
them. The KV memory belongs to the engine, which mapped it. After `close` it stays mapped there, but
nobody new can open it.
"""

from __future__ import annotations

import os

from pullfill.errors import ConfigError
from pullfill.runtime import failpoints
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.copying import corrupt
from pullfill.transfer.layout import check_bounds
from pullfill.transfer.shm.fence import SLOTS, ShmFences, ShmHold
from pullfill.transfer.shm.files import RegionFiles, ShmEndpoint, inode


class ReceiverHold(ShmHold):
    """The fence hold of a thread of ours that moves bytes for a peer, with its own failpoints."""

    def before_batch(self, verb: str) -> None:
        failpoints.hit(f"kv.{verb}.before_batch")

    def inside_batch(self, verb: str) -> None:
        failpoints.hit(f"kv.{verb}.batch")

    def copied(self, verb: str, address: int) -> None:
        if failpoints.hit(f"kv.{verb}.corrupt"):
            corrupt(address)


class FenceOwner:
    """An Owner that offers nothing by itself: `CombinedOwner` adds offers. Thread-safe."""

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

    def open_hold(self, incarnation: str) -> ReceiverHold:
        """For a thread of this process that receives or sends for a peer. The caller owns it.
        Raises PeerUnavailable when the peer knows another incarnation, and OSError."""
        # Opened anew, so that its locks are its own.
        fd = os.open(f"/proc/self/fd/{self._files.fence_fd}", os.O_RDWR | os.O_CLOEXEC)
        return ReceiverHold(fd, incarnation)

    def renew(self, incarnation: str) -> None:
        """See Owner."""
        self._fences.renew(incarnation)

    def close(self) -> None:
        """See Owner. Idempotent."""
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
        """
        memory: of rank 0. Its address is the first byte of the KV file.
        kv_path: rank 0's KV file. By default the one that `files` made.

        Raises ConfigError when the file is smaller than the memory.
        """
        self._endpoints: list[str] = []
        self._fence = str(files.fence_path), inode(files.fence_fd)
        self.add_rank(memory, kv_path or str(files.kv_path))
        super().__init__(files, memory.layout.num_blocks, incarnation, slots=slots)

    def add_rank(self, memory: LocalMemory, kv_path: str) -> None:
        """Add the next rank's region, before anything is published. Raises ConfigError."""
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
        self._endpoints.append(endpoint.encode())

    def endpoints(self, rank: int = 0) -> dict[str, str]:
        """See Owner."""
        return {"shm": self._endpoints[rank]}
