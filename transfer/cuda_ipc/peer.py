"""The peer's side of cuda_ipc: maps the owner's GPU memory and copies under its fence.

A session owns one opening of the handle and one open file description of the fence file. It copies
on the stream that all sessions of the process share (gpu/copies.py). It waits for its batch before
it lets go of the fence, so the fence covers every byte in flight.

After a GPU error nobody knows what is in flight. Then the session never lets go of the fence, and
only the end of this process is a proof (writers.py).

The end of the owner frees its GPU memory. To use it after that through a mapping is undefined (CUDA
Driver API, cuIpcOpenMemHandle), and may be a GPU error, which ends our engine too. So each batch
first checks that the owner lives. A batch under way when the owner dies is not covered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from pullfill.errors import BadMessage, IncompatibleError, PeerUnavailable, TransferFailed
from pullfill.net.this_host import host_id
from pullfill.runtime import failpoints, log
from pullfill.transfer.contract import LocalMemory, PeerSession, Rect
from pullfill.transfer.cuda_ipc.owner import IpcEndpoint
from pullfill.transfer.cuda_ipc.processes import Process, pid_namespace
from pullfill.transfer.cuda_ipc.writers import WriterRecord, why_no_proof
from pullfill.transfer.gpu.copies import GpuCopier, Lane, lane_of
from pullfill.transfer.gpu.cuda import CudaDriver, load
from pullfill.transfer.gpu.interconnect import link_to, visible
from pullfill.transfer.layout import both_sides
from pullfill.transfer.session import MappedSession
from pullfill.transfer.shm.fence import ShmHold
from pullfill.transfer.shm.files import open_same
from pullfill.wire import FenceToken, RegionDescriptor

logger = log.get("transfer.cuda_ipc")


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
            self._owner = Process(pid)
            undo.callback(self._owner.close)
            self._record = WriterRecord(fd)
            undo.pop_all()

    def enter(self, token: FenceToken, wait: bool = True) -> bool:
        """Raises TransferFailed, too, when the owner has ended, or when an earlier copy may still
        be in flight: the record names one slot, and must go on naming that one."""
        if not self._settled():
            raise TransferFailed("an earlier copy failed on the GPU; restart this worker")
        if self._owner.ended:
            raise TransferFailed("the process that owned the GPU memory has ended")
        if not super().enter(token, wait):
            return False
        self._record.begin(token.slot)
        return True

    def leave(self, token: FenceToken) -> None:
        if self._settled():
            self._record.end()
            super().leave(token)

    def before_batch(self, verb: str) -> None:
        failpoints.hit(f"cuda_ipc.{verb}.before_batch")

    def inside_batch(self, verb: str) -> None:
        failpoints.hit(f"cuda_ipc.{verb}.batch")

    def close(self) -> None:
        self._owner.close()
        if self._settled():  # else the descriptor, and so the lock, stays until the process ends
            self._record.close()
            super().close()


class CudaIpcTransport:
    """PeerTransport for GPU memory of this host and this user."""

    name = "cuda_ipc"

    def __init__(
        self,
        device: int | None,
        driver: Callable[[], CudaDriver] = load,
        lane: Callable[[int], Lane] = lane_of,
        others: Iterable[int] = (),
    ) -> None:
        """device: the GPU that holds our KV memory (`LocalMemory.device`).

        others: GPUs of our other ranks. Memory that one of them cannot reach counts as out of
        reach."""
        self._device = device
        self._others = frozenset(others) - {device}
        self._driver = driver
        self._lane = lane

    def can_reach(self, descriptor: RegionDescriptor) -> str | None:
        """See PeerTransport. Maps the memory only if its device is not visible here."""
        if self._device is None:
            return "this worker's KV memory is not on a GPU"
        if descriptor.host_id != host_id():
            return "it is on another host, or does not share /dev/shm with us"
        try:
            endpoint = IpcEndpoint.decode(descriptor.endpoints.get(self.name, ""))
            driver = self._driver()
            if (reason := _why_not_here(endpoint, driver, self._device)) is not None:
                return reason
            os.close(open_same(endpoint.fence, endpoint.fence_inode))
            for device in (self._device, *sorted(self._others)):
                if (reason := self._why_no_path(driver, device, endpoint)) is not None:
                    return reason
            return None
        except (BadMessage, TransferFailed) as exc:
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
        endpoint = IpcEndpoint.decode(descriptor.endpoints.get(self.name, ""))
        if local.device is None:
            raise IncompatibleError("this worker's KV memory is not on a GPU", field="device")
        if descriptor.host_id != host_id():
            raise PeerUnavailable(f"{descriptor.instance_id} is on another host")
        driver, device = self._driver(), local.device
        if (reason := _why_not_here(endpoint, driver, device)) is not None:
            raise PeerUnavailable(f"{descriptor.instance_id}: {reason}")
        if endpoint.memory.nbytes != descriptor.nbytes:
            raise BadMessage(
                f"descriptor of {descriptor.nbytes} bytes, endpoint of {endpoint.memory.nbytes}"
            )
        link = link_to(driver, device, endpoint.memory.device)
        copier = GpuCopier(
            self._lane(device), link, queued=lambda: failpoints.hit("cuda_ipc.queued")
        )
        with ExitStack() as undo:
            hold = _open_hold(endpoint, descriptor, copier)
            undo.callback(hold.close)
            base = _map(driver, device, endpoint, descriptor)

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


def _open_hold(endpoint: IpcEndpoint, descriptor: RegionDescriptor, copier: GpuCopier) -> IpcHold:
    try:
        fd = open_same(endpoint.fence, endpoint.fence_inode)
    except OSError as exc:
        raise PeerUnavailable(
            f"the fence of {descriptor.instance_id} cannot be opened: {exc}"
        ) from exc
    return IpcHold(fd, descriptor.incarnation, lambda: copier.settled, endpoint.memory.pid)


def _map(
    driver: CudaDriver, device: int, endpoint: IpcEndpoint, descriptor: RegionDescriptor
) -> int:
    try:
        return driver.open(device, endpoint.memory.handle)
    except TransferFailed as exc:
        raise PeerUnavailable(
            f"the GPU memory of {descriptor.instance_id} cannot be mapped: {exc}"
        ) from exc


def _why_not_here(endpoint: IpcEndpoint, driver: CudaDriver, device: int) -> str | None:
    if not endpoint.memory.pid_space or endpoint.memory.pid_space != pid_namespace():
        return (
            "it does not share our process ids, so the end of a process could not be proved; run "
            "both containers in one PID namespace (docker: --pid)"
        )
    if endpoint.memory.pid == os.getpid():
        return "a process cannot map its own GPU memory again"
    return why_no_proof(driver, device)
