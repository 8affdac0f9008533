"""Same host, GPU memory: both sides of cuda_ipc, and what lets another process map GPU memory.

The owner publishes its fence file and a handle on each rank's GPU memory (`IpcEndpoint`). A peer's
session owns one opening of the handle and one open file description of the fence file. It copies on
the stream that all sessions of the process share (gpu/copies.py), and waits for its batch before it
lets go of the fence.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import Meta

from pullfill.errors import (
    BadMessage,
    ConfigError,
    PeerUnavailable,
    TransferFailed,
)
from pullfill.net.this_host import pid_namespace
from pullfill.runtime import log
from pullfill.transfer.contract import LocalMemory, PeerSession, Rect
from pullfill.transfer.cuda_ipc.writers import (
    WriterRecord,
    readable,
    why_no_proof,
)
from pullfill.transfer.gpu.copies import GpuCopier, Lane, lane_of, link_to, visible
from pullfill.transfer.gpu.cuda import HANDLE_BYTES, CudaDriver, load
from pullfill.transfer.layout import both_sides
from pullfill.transfer.session import MappedSession
from pullfill.transfer.shm.fence import ShmHold
from pullfill.transfer.shm.files import Endpoint, open_same
from pullfill.wire import FenceToken, RegionDescriptor

logger = log.get("transfer.cuda_ipc")

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


def export(memory: LocalMemory, driver: CudaDriver | None = None) -> Exported:
    """What lets other processes of this host map `memory`, which is this process's own, on a GPU.

    Raises ConfigError, which says what to change, when the memory cannot be exported. Raises
    TransferFailed when CUDA fails.
    """
    driver = driver or load()
    assert memory.device is not None
    base, size, exportable = driver.allocation(memory.device, memory.address)
    if not exportable:
        raise ConfigError(
            "CUDA IPC cannot share the KV cache: it is made of mapped physical pages (VMM) or is "
            "from a memory pool. Remove expandable_segments and cudaMallocAsync from "
            "PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF, and do not use --enable-sleep-mode"
        )
    offset = memory.address - base
    if offset + memory.nbytes > size:
        raise ConfigError("the KV cache is not one allocation of CUDA")
    return Exported(
        handle=driver.export(memory.device, base),
        offset=offset,
        nbytes=memory.nbytes,
        device=driver.uuid(memory.device),
        pid=os.getpid(),
        pid_space=pid_namespace(),
    )


class GpuMapping:
    """Another process's exported memory, mapped here until `close`. For the main process of a
    worker and its own ranks. Peers map through `CudaIpcTransport`."""

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


class IpcEndpoint(Endpoint, frozen=True, kw_only=True):
    """The GPU memory of one rank."""

    transport = "cuda_ipc"
    memory: Exported


class IpcHold(ShmHold):
    """The fence hold of a writer whose copies may outlive its locks. See writers.py."""

    def __init__(self, fd: int, incarnation: str, settled: Callable[[], bool], pid: int) -> None:
        """Owns `fd`. Raises PeerUnavailable.

        settled: whether no copy can be in flight.
        pid: the process that owns the GPU memory.
        """
        super().__init__(fd, incarnation)
        self._settled = settled
        with ExitStack() as undo:
            undo.callback(super().close)
            try:
                self._owner = os.pidfd_open(pid)
            except OSError as exc:
                raise PeerUnavailable(f"process {pid}, which owns the GPU memory: {exc}") from exc
            undo.callback(os.close, self._owner)
            self._record = WriterRecord(fd)
            undo.pop_all()

    def enter(self, token: FenceToken) -> None:
        """Raises TransferFailed, too, when the owner has ended, or when an earlier copy may still
        be in flight: the record names one slot, and must go on naming that one."""
        if not self._settled():
            raise TransferFailed("an earlier copy failed on the GPU; restart this worker")
        # The end of the owner frees its GPU memory. To use it after that through a mapping is
        # undefined (CUDA Driver API, cuIpcOpenMemHandle), and may be a GPU error, which ends our
        # engine too. A batch under way when the owner dies is not covered.
        if readable(self._owner):
            raise TransferFailed("the process that owned the GPU memory has ended")
        super().enter(token)
        self._record.begin(token.slot)

    def leave(self, token: FenceToken) -> None:
        # After a GPU error nobody knows what is in flight. Then the fence is never left, and only
        # the end of this process is a proof (writers.py).
        if self._settled():
            self._record.end()
            super().leave(token)

    def close(self) -> None:
        os.close(self._owner)
        if self._settled():  # else the descriptor, and so the lock, stays until the process ends
            self._record.close()
            super().close()


class CudaIpcTransport:
    """PeerTransport for GPU memory of this host and this user."""

    name = "cuda_ipc"

    def __init__(
        self,
        devices: Iterable[int],
        driver: Callable[[], CudaDriver] = load,
        lane: Callable[[int], Lane] = lane_of,
    ) -> None:
        """devices: the GPUs that hold the KV memory of our ranks (`LocalMemory.device`). Memory
        that one of them cannot reach counts as out of reach."""
        self._devices = tuple(dict.fromkeys(devices))
        self._driver = driver
        self._lane = lane

    def can_reach(self, descriptor: RegionDescriptor) -> str | None:
        """See PeerTransport. Maps the memory only if its device is not visible here."""
        try:
            endpoint, driver = IpcEndpoint.of(descriptor), self._driver()
            _check_here(endpoint, driver, self._devices[0])
            os.close(open_same(endpoint.fence, endpoint.fence_inode))
            for device in self._devices:
                if (reason := self._why_no_path(driver, device, endpoint)) is not None:
                    return reason
            return None
        except (BadMessage, PeerUnavailable, TransferFailed) as exc:
            return str(exc)
        except OSError as exc:
            return f"its fence cannot be opened: {exc}"

    def _why_no_path(self, driver: CudaDriver, device: int, endpoint: IpcEndpoint) -> str | None:
        other = visible(driver).get(endpoint.memory.device)
        if other is not None:
            reach = driver.can_map(device, other)
            return None if reach else f"GPU {device} cannot reach memory of GPU {other} directly"
        # Hidden by CUDA_VISIBLE_DEVICES, but its handle may open all the same.
        try:
            driver.close(device, driver.open(device, endpoint.memory.handle))
        except TransferFailed as exc:
            return (
                f"its memory, on a GPU that CUDA_VISIBLE_DEVICES hides, cannot be mapped ({exc}); "
                "with MIG, both workers must be in one GPU instance"
            )
        return None

    def connect(
        self, local: LocalMemory, descriptor: RegionDescriptor, part: Rect | None = None
    ) -> PeerSession:
        ours, theirs = both_sides(local, descriptor, part)
        endpoint, driver, device = IpcEndpoint.of(descriptor), self._driver(), local.device
        assert device is not None
        _check_here(endpoint, driver, device)
        if endpoint.memory.nbytes != descriptor.nbytes:
            raise BadMessage(
                f"descriptor of {descriptor.nbytes} bytes, endpoint of {endpoint.memory.nbytes}"
            )
        link = link_to(driver, device, endpoint.memory.device)
        copier = GpuCopier(self._lane(device), link)
        with ExitStack() as undo:
            try:
                fd = open_same(endpoint.fence, endpoint.fence_inode)
                pid = endpoint.memory.pid
                hold = IpcHold(fd, descriptor.incarnation, lambda: copier.settled, pid)
                undo.callback(hold.close)
                base = driver.open(device, endpoint.memory.handle)
            except (OSError, TransferFailed) as exc:
                raise PeerUnavailable(
                    f"the GPU memory of {descriptor.instance_id} cannot be mapped: {exc}"
                ) from exc

            def give_back() -> None:
                if copier.settled:
                    try:
                        driver.close(device, base)
                    except TransferFailed as exc:  # CUDA does not say what a dead owner changes
                        logger.warning("GPU memory of another worker stays mapped: %s", exc)

            undo.callback(driver.close, device, base)
            _, size = driver.extent(device, base)  # whichever GPU holds it
            if endpoint.memory.offset + endpoint.memory.nbytes > size:
                raise BadMessage(f"the endpoint reaches beyond its allocation of {size} bytes")
            session = MappedSession(
                self.name,
                ours,
                theirs,
                base + endpoint.memory.offset,
                hold,
                copier=copier,
                limits=link.limits,
                on_close=give_back,
            )
            undo.pop_all()
            return session


def _check_here(endpoint: IpcEndpoint, driver: CudaDriver, device: int) -> None:
    """Raise PeerUnavailable where a copy or its end cannot be proved."""
    if not endpoint.memory.pid_space or endpoint.memory.pid_space != pid_namespace():
        raise PeerUnavailable(
            "it does not share our process ids, so the end of a process could not be proved; run "
            "both containers in one PID namespace (docker: --pid)"
        )
    if endpoint.memory.pid == os.getpid():
        raise PeerUnavailable("a process cannot map its own GPU memory again")
    if (reason := why_no_proof(driver, device)) is not None:
        raise PeerUnavailable(reason)
