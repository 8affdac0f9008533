"""The files of a worker's shared KV memory, their life and their names. All have mode 0600.

The worker's main process makes `pullfill-<instance>.fence` first. It holds an exclusive lock on the
first byte until it dies. Then the process of each rank makes `pullfill-<instance>-<rank>.kv`, which
holds the KV bytes. The files are removed in the opposite order.

A process that still maps a file that was removed keeps its pages, which nobody else uses.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Self

import msgspec

from pullfill.errors import BadMessage, NotNow, PeerUnavailable
from pullfill.net.this_host import SHM_DIR_ENV as DIR_ENV
from pullfill.net.this_host import host_id
from pullfill.net.this_host import shm_dir as shm_dir
from pullfill.runtime.lifecycle import at_leave
from pullfill.transfer.shm import lock
from pullfill.wire import RegionDescriptor

PREFIX = "pullfill-"
_REGION = re.compile(r"/(?:[^/\0]+/)*pullfill-[a-z0-9_-]+\.(?:kv|fence)\Z")
_KV = re.compile(r"(?P<instance>pullfill-.+)-[0-9]+\.kv")
_OPEN = os.O_NONBLOCK | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What an owner publishes for peers that map its memory: `RegionDescriptor.endpoints[NAME]`, as
    JSON. It names the fence file by its path and by the inode that must be there."""

    transport: ClassVar[str]
    v: int = 1
    fence: str
    fence_inode: tuple[int, int]

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def of(cls, descriptor: RegionDescriptor) -> Self:
        """Raises BadMessage, and PeerUnavailable if the region is on another host."""
        if descriptor.host_id != host_id():
            raise PeerUnavailable(
                f"{descriptor.instance_id} is on another host, or does not share /dev/shm with us"
            )
        return cls.decode(descriptor.endpoints.get(cls.transport, ""))

    @classmethod
    def decode(cls, text: str) -> Self:
        """Raises BadMessage."""
        try:
            endpoint = msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            raise BadMessage(f"not a {cls.transport} endpoint: {exc}") from exc
        if endpoint.v != 1:
            raise BadMessage(f"{cls.transport} endpoint of version {endpoint.v}, this is version 1")
        return endpoint


class ShmEndpoint(Endpoint, frozen=True, kw_only=True):
    """The KV file of one rank."""

    transport = "shm"
    kv: str
    kv_inode: tuple[int, int]
    nbytes: int


def inode(file: str | int) -> tuple[int, int]:
    """(device, inode) of a file. file: its path, or a descriptor. Raises OSError."""
    info = os.stat(file)
    return info.st_dev, info.st_ino


def open_same(path: str, expected: tuple[int, int] | None = None) -> int:
    """Open a region file that a peer published. Returns a descriptor. Raises FileNotFoundError (it
    is gone or replaced) and PermissionError.

    expected: (device, inode) that the file must have.

    The path comes from the network, and we are going to write there. So it must be a regular file
    of our own user, `pullfill-….kv` or `.fence`, that is no link."""
    if not _REGION.match(path):
        raise PermissionError(f"{path[:200]!r} is not the path of a region")
    try:
        fd = os.open(path, _OPEN)
    except ValueError as exc:  # a null byte
        raise PermissionError(f"{path[:200]!r} is no path") from exc
    info = os.fstat(fd)
    if expected is not None and (info.st_dev, info.st_ino) != tuple(expected):
        os.close(fd)
        raise FileNotFoundError(f"{path} is another file now: its owner restarted")
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(f"{path} is not a regular file of this user")
    return fd


def kv_path(directory: Path, instance_id: str, rank: int) -> Path:
    """The KV file of one rank."""
    return directory / f"{PREFIX}{instance_id}-{rank}.kv"


def create_kv(directory: Path, instance_id: str, rank: int, nbytes: int) -> Path:
    """Make a rank's KV file: `nbytes` of zeros, without pages behind them yet. The instance's
    RegionFiles remove it. Raises ConfigError when the file system could not hold it."""
    # To run out of space later would kill this process with SIGBUS.
    free = _unclaimed(directory)
    if nbytes > free:
        raise NotNow(
            f"{directory} has {free >> 20} MiB left but the KV cache needs "
            f"{nbytes >> 20} MiB: make it larger (docker: --shm-size), make the cache "
            f"smaller (kv_cache_memory_bytes), or set {DIR_ENV}"
        )
    path = kv_path(directory, instance_id, rank)
    # This process keeps the descriptor, and so the lock, until it ends. In stock vLLM the ranks
    # make their files before the fence file is there, and a sweeper must not take them.
    fd = _create_locked(path)
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return path


def _create_locked(path: Path) -> int:
    """Make an empty file whose first byte this process has locked. Returns its descriptor, which
    holds the lock. Raises FileExistsError and other OSErrors."""
    # It is locked before it has its name, or a sweeper could take it for an orphan.
    fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        lock.try_exclusive(fd, 0, 1)
        # With a folder's descriptor, which is not used, Python makes the call that follows it.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
    except BaseException:
        os.close(fd)
        raise
    return fd


class RegionFiles:
    """Makes and owns the fence file, and removes the KV files that the ranks made. It lives in the
    worker's main process, as long as the worker's memory. A process that fails while it starts
    removes the files too."""

    def __init__(self, instance_id: str, directory: Path | None = None) -> None:
        """Sweep orphans, then make and lock the fence file (empty). Raises ConfigError when the
        directory cannot be used or a live process has the name."""
        self.instance_id = instance_id
        self.directory = directory or shm_dir()
        self.fence_path = self.directory / f"{PREFIX}{instance_id}.fence"
        try:
            sweep(self.directory)
            self.fence_fd = _create_locked(self.fence_path)
        except FileExistsError:
            raise NotNow(
                f"{self.fence_path} belongs to a running worker: give this one another instance id"
            ) from None
        except OSError as exc:
            raise NotNow(
                f"cannot use {self.directory} for shared KV memory ({exc}); set {DIR_ENV} to a "
                "writable directory on a tmpfs"
            ) from exc
        self._forget = at_leave(self.close)

    def close(self) -> None:
        """Delete all files of this worker, and release the lock that says that it lives.

        May be called again."""
        if self.fence_fd < 0:
            return
        _unlink(self.directory, *_kv_names(self.directory, self.fence_path.stem))
        _unlink(self.directory, self.fence_path.name)
        os.close(self.fence_fd)
        self.fence_fd = -1
        self._forget()


class Mapping:
    """The whole KV file of another process, mapped for reading and writing.

    No thread may copy to or from it after `close`."""

    def __init__(self, path: str, expected: tuple[int, int], nbytes: int) -> None:
        """Raises PeerUnavailable when the file is too short, and what `open_same` raises."""
        fd = open_same(path, expected)
        try:
            if os.fstat(fd).st_size < nbytes:
                raise PeerUnavailable(f"{path} is shorter than its {nbytes} bytes")
            self._map = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)

    def close(self) -> None:
        """Idempotent."""
        self._anchor = None
        self._map.close()


def sweep(directory: Path) -> list[str]:
    """Delete the shared memory files that dead workers of this user left. Returns their names."""
    # Two kinds of files are orphans: a .fence whose first byte can be locked, with every .kv of its
    # instance; and a .kv whose instance has no .fence, unless its rank still holds its lock.
    removed: list[str] = []
    names = sorted(n for n in os.listdir(directory) if n.startswith(PREFIX))
    for name in (n for n in names if n.endswith(".fence")):
        removed += _unlink_dead(directory, name, *_kv_names(directory, name.removesuffix(".fence")))
    for name in (n for n in names if n not in removed):
        kv = _KV.fullmatch(name)
        if kv is not None and not os.path.exists(directory / f"{kv['instance']}.fence"):
            removed += _unlink_dead(directory, name)
    return removed


def _unlink_dead(directory: Path, name: str, *before: str) -> list[str]:
    """Delete `before`, then `name`, if nobody has locked that one. Returns what was deleted."""
    with suppress(OSError):
        fd = open_same(str(directory / name))
        try:
            # No link: another sweeper was here, and the name may be a live worker's by now.
            if lock.try_exclusive(fd, 0, 1) and os.fstat(fd).st_nlink:
                return _unlink(directory, *before, name)
        finally:
            os.close(fd)
    return []


def _kv_names(directory: Path, stem: str) -> list[str]:
    """The KV files of all ranks of an instance. stem: its id, with the prefix."""
    kvs = (_KV.fullmatch(name) for name in sorted(os.listdir(directory)))
    return [kv[0] for kv in kvs if kv is not None and kv["instance"] == stem]


def _unlink(directory: Path, *names: str) -> list[str]:
    gone = []
    for name in names:
        with suppress(FileNotFoundError):
            os.unlink(directory / name)
            gone.append(name)
    return gone


def _unclaimed(directory: Path) -> int:
    """Free bytes, less those that sparse KV files of others may still take."""
    space = os.statvfs(directory)
    claimed = 0
    for path in directory.glob(f"{PREFIX}*.kv"):
        with suppress(OSError):
            info = path.stat()
            claimed += max(0, info.st_size - info.st_blocks * 512)
    return space.f_bavail * space.f_frsize - claimed
