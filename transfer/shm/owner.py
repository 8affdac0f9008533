"""The fence over a worker's memory, and what the worker offers to peers of its own host.

`FenceOwner` has the fence alone. Whatever moves the bytes, its one file says who still may.
`ShmOwner` adds the KV files of the ranks, for peers that map them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from pullfill.errors import ConfigError
from pullfill.runtime import failpoints
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.layout import check_bounds
from pullfill.transfer.shm.fence import SLOTS, ShmFences, ShmHold
from pullfill.transfer.shm.files import RegionFiles, ShmEndpoint, inode


class ReceiverHold(ShmHold):
    """The fence hold of a thread of ours that moves bytes for a peer, with its own failpoints."""

    def before_batch(self, verb: str) -> None:
        failpoints.hit(f"kv.{verb}.before_batch")

    def inside_batch(self, verb: str) -> None:
        failpoints.hit(f"kv.{verb}.batch")


class FenceOwner:
    """An Owner that offers nothing by itself: `CombinedOwner` adds offers. Thread-safe.

    It owns `files`. The KV memory belongs to the engine. After `close` the memory stays mapped
    there, but nobody new can open it."""

    def __init__(self, files: RegionFiles, incarnation: str, *, slots: int = SLOTS) -> None:
        self._files = files
        self._fences = ShmFences(files.fence_fd, incarnation, slots=slots)

    def endpoints(self, rank: int = 0) -> dict[str, str]:
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
        self._fences.renew(incarnation)

    def close(self) -> None:
        """See Owner. Idempotent."""
        self._fences.close()
        self._files.close()


class ShmOwner(FenceOwner):
    """Offers the KV file of each rank to peers that map it."""

    def __init__(
        self,
        files: RegionFiles,
        memories: Sequence[LocalMemory],
        paths: Sequence[str],
        incarnation: str,
        *,
        slots: int = SLOTS,
    ) -> None:
        """
        memories: by rank. Each address is the first byte of the rank's KV file.
        paths: the KV files, by rank.

        Raises ConfigError when a file is smaller than its memory.
        """
        fence = str(files.fence_path), inode(files.fence_fd)
        self._endpoints = [
            _endpoint(memory, path, *fence).encode()
            for memory, path in zip(memories, paths, strict=True)
        ]
        super().__init__(files, incarnation, slots=slots)

    def endpoints(self, rank: int = 0) -> dict[str, str]:
        return {"shm": self._endpoints[rank]}


def _endpoint(
    memory: LocalMemory, path: str, fence: str, fence_inode: tuple[int, int]
) -> ShmEndpoint:
    check_bounds(memory.layout, memory.nbytes)
    info = os.stat(path)
    if info.st_size < memory.nbytes:
        raise ConfigError(f"{path} has {info.st_size} bytes, the KV memory {memory.nbytes}")
    return ShmEndpoint(
        kv=path,
        kv_inode=(info.st_dev, info.st_ino),
        fence=fence,
        fence_inode=fence_inode,
        nbytes=memory.nbytes,
    )
