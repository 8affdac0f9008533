"""Same host, CPU memory: both sides of shm.

`FenceOwner` is the fence alone. Whatever moves the bytes, its one file says who still may.
`ShmOwner` adds the KV files of the ranks. `ShmTransport` maps one of them and copies under the
fence. Its session owns one mapping of the KV file and one open file description of the fence file.
Neither survives a fork: connect after forking.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from pullfill.errors import BadMessage, ConfigError, PeerUnavailable
from pullfill.net.this_host import host_id
from pullfill.runtime import failpoints
from pullfill.runtime.pages import make_present
from pullfill.transfer.contract import LocalMemory, PeerSession, Rect
from pullfill.transfer.copying import copy_batch
from pullfill.transfer.layout import both_sides, check_bounds
from pullfill.transfer.session import Copier, MappedSession
from pullfill.transfer.shm.fence import SLOTS, ShmFences, ShmHold
from pullfill.transfer.shm.files import Mapping, RegionFiles, ShmEndpoint, inode, open_same
from pullfill.wire import RegionDescriptor


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

    def __init__(
        self,
        files: RegionFiles,
        incarnation: str,
        *,
        slots: int = SLOTS,
        quiet: Callable[[int], bool] = lambda slot: True,
    ) -> None:
        """quiet: see ShmFences."""
        self._files = files
        self._fences = ShmFences(files.fence_fd, incarnation, slots, quiet)

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


class ShmTransport:
    """PeerTransport for regions of this host and this user. Stateless."""

    name = "shm"

    def __init__(self, copier: Copier = copy_batch) -> None:
        """copier: copies each batch (tests make it fail)."""
        self._copier = copier

    def can_reach(self, descriptor: RegionDescriptor) -> str | None:
        """See PeerTransport. Opens the two files; maps nothing."""
        if descriptor.host_id != host_id():
            return "it is on another host, or does not share /dev/shm with us"
        try:
            endpoint = ShmEndpoint.decode(descriptor.endpoints.get(self.name, ""))
            for path, expected in (
                (endpoint.kv, endpoint.kv_inode),
                (endpoint.fence, endpoint.fence_inode),
            ):
                os.close(open_same(path, expected))
        except BadMessage as exc:
            return str(exc)
        except OSError as exc:
            return f"its memory cannot be opened: {exc}"
        return None

    def connect(
        self, local: LocalMemory, descriptor: RegionDescriptor, part: Rect | None = None
    ) -> PeerSession:
        """See PeerTransport. An old descriptor never reaches the memory of a new process: inode,
        size and incarnation must be those that it names."""
        ours, theirs = both_sides(local, descriptor, part)
        endpoint = ShmEndpoint.decode(descriptor.endpoints.get(self.name, ""))
        if descriptor.host_id != host_id():
            raise PeerUnavailable(f"{descriptor.instance_id} is on another host")
        if endpoint.nbytes != descriptor.nbytes:
            raise BadMessage(
                f"descriptor of {descriptor.nbytes} bytes, endpoint of {endpoint.nbytes}"
            )
        try:
            fence_fd = open_same(endpoint.fence, endpoint.fence_inode)
            hold = ShmHold(fence_fd, descriptor.incarnation)
            try:
                mapping = Mapping(endpoint.kv, endpoint.kv_inode, endpoint.nbytes)
            except BaseException:
                hold.close()
                raise
        except OSError as exc:
            raise PeerUnavailable(
                f"the KV memory of {descriptor.instance_id} cannot be mapped: {exc}"
            ) from exc
        # Else the first write to each page is a page fault: 20 ms for 25 MB. The first job waits
        # for this.
        make_present(mapping.address, endpoint.nbytes, parts=descriptor.num_layers, within_s=0.1)
        return MappedSession(
            self.name, ours, theirs, mapping.address, hold,
            copier=self._copier, on_close=mapping.close,
        )  # fmt: skip
