"""The owner's side of a worker: the KV memory of its ranks, and all that it offers to peers.

Each rank says where its memory is (`RankRegion`, sent over vLLM's handshake between its processes),
and the main process, which makes all copies, maps it (`attach_ranks`).

`Owner` has one fence file for all: a peer that maps the memory (shm, cuda_ipc) holds the fence
itself; for what comes through the port (stream/), our receiving thread holds it.

Life: the engine registers its memory -> `attach_ranks` -> `Owner` -> `listen` -> the endpoints are
published -> `close` -> `MappedRank.close`.
"""

from __future__ import annotations

import os
from collections import abc
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

from pullfill.errors import ConfigError, IncompatibleError, TransferFailed
from pullfill.net.security import ClusterKey
from pullfill.net.this_host import host_id
from pullfill.runtime import log
from pullfill.transfer.contract import KvLayout, LocalMemory
from pullfill.transfer.cuda_ipc.ipc_transport import Exported, GpuMapping, IpcEndpoint, export
from pullfill.transfer.gpu.cuda import CudaDriver
from pullfill.transfer.layout import check_bounds, head_range
from pullfill.transfer.shm.fence import SLOTS, ShmFences
from pullfill.transfer.shm.files import Mapping, RegionFiles, ShmEndpoint, inode
from pullfill.transfer.stream.backends import BackendKind
from pullfill.transfer.stream.kv_protocol import STALL_S
from pullfill.transfer.stream.stream_server import StreamServer
from pullfill.wire import RegionDescriptor

logger = log.get("transfer.gpu")


@dataclass(frozen=True, slots=True)
class RankRegion:
    """One rank's KV memory as its process describes it. It is sent between processes.

    device: torch's device type, e.g. `cpu`.
    memory: in the address space of process `pid`. None: no transport reaches it.
    path, inode: the file behind it, if there is one.
    exported: how others map GPU memory.
    why_not: what is missing, for people.
    """

    pid: int
    device: str
    num_layers: int
    page_bytes: int
    memory: LocalMemory | None = None
    path: str = ""
    inode: tuple[int, int] = (0, 0)
    exported: Exported | None = None
    why_not: str = ""

    @property
    def within_reach(self) -> bool:
        """Whether this process can copy from and to it."""
        if self.memory is None or self.memory.device is None:
            return self.memory is not None
        return self.exported is not None or self.pid == os.getpid()


def region_of(
    memory: LocalMemory, path: str = "", exported: Exported | None = None, why_not: str = ""
) -> RankRegion:
    """This process's `memory`. For the parameters see RankRegion. Raises OSError."""
    return RankRegion(
        pid=os.getpid(),
        device="cpu" if memory.device is None else "cuda",
        num_layers=memory.layout.num_layers,
        page_bytes=memory.layout.page_bytes,
        memory=memory,
        path=path,
        inode=inode(path) if path else (0, 0),
        exported=exported,
        why_not=why_not,
    )


def tell_gpu(memory: LocalMemory, driver: CudaDriver | None = None) -> RankRegion:
    """Describe a rank's GPU memory for the main process. If it cannot be exported, only transports
    that copy in the rank's own process reach it. `kv_pool.tell` keeps it allocated."""
    exported, why_not = None, ""
    try:
        exported = export(memory, driver)
    except (ConfigError, TransferFailed) as exc:
        why_not = str(exc)
        logger.warning("other processes cannot map this KV cache: %s", why_not)
    return region_of(memory, exported=exported, why_not=why_not)


@dataclass(slots=True)
class MappedRank:
    """One rank's memory, mapped in this process.

    memory: with its address here, and with its place in the whole model.
    mapping: ours. None: the engine has mapped it."""

    memory: LocalMemory
    path: str = ""
    mapping: Mapping | GpuMapping | None = None
    exported: Exported | None = None

    def close(self) -> None:
        """Give our mapping back. The engine's stays. Idempotent."""
        if self.mapping is not None:
            self.mapping.close()


def attach_ranks(
    regions: abc.Mapping[tuple[int, int], RankRegion], kv_heads: int
) -> list[MappedRank]:
    """Map every rank. Returns them in order of the keys, or nothing when one is out of reach.

    regions: by (pipeline rank, tensor-parallel rank).
    kv_heads: of the whole model.

    Raises IncompatibleError when the ranks do not split the model as vLLM splits it, OSError or
    PeerUnavailable when a file cannot be mapped.
    """
    if not all(region.within_reach for region in regions.values()):
        return []
    tp_size = 1 + max(tp for _, tp in regions)
    ranks: list[MappedRank] = []
    first_layer = 0
    with ExitStack() as undo:
        for (pp, tp), region in sorted(regions.items()):
            assert region.memory is not None
            if pp and tp == 0:
                first_layer += ranks[-1].memory.layout.num_layers
            # A single rank holds all heads that there are, whatever the model calls its KV heads.
            alone = (0, region.memory.layout.num_kv_heads)
            first_head, heads = head_range(kv_heads, tp_size, tp) if tp_size > 1 else alone
            place = replace(region.memory, first_head=first_head, first_layer=first_layer)
            _check(place.layout, heads, ranks)
            ranks.append(_attach(region, place))
            undo.callback(ranks[-1].close)
        undo.pop_all()
    return ranks


def _attach(region: RankRegion, memory: LocalMemory) -> MappedRank:
    if region.pid == os.getpid():  # mapped here already, by the engine
        return MappedRank(memory, region.path, None, region.exported)
    if memory.device is not None:
        assert region.exported is not None
        there = GpuMapping(region.exported, memory)
        return MappedRank(there.memory, "", there, region.exported)
    mapping = Mapping(region.path, region.inode, memory.nbytes)
    return MappedRank(replace(memory, address=mapping.address), region.path, mapping)


def _check(layout: KvLayout, heads: int, before: list[MappedRank]) -> None:
    if layout.num_kv_heads != heads:
        raise IncompatibleError(
            f"a rank has {layout.num_kv_heads} KV heads where {heads} were expected",
            field="num_kv_heads",
        )
    if before and layout.num_blocks != before[0].memory.layout.num_blocks:
        raise IncompatibleError(
            f"ranks have {layout.num_blocks} and {before[0].memory.layout.num_blocks} KV blocks",
            field="num_blocks",
        )


def _mappable(rank: MappedRank, files: RegionFiles) -> dict[str, str]:
    """How peers of this host map a rank's memory: the transport's name, and its endpoint."""
    memory, fence, fence_inode = rank.memory, str(files.fence_path), inode(files.fence_fd)
    check_bounds(memory.layout, memory.nbytes)
    if rank.exported is not None:
        gpu = IpcEndpoint(memory=rank.exported, fence=fence, fence_inode=fence_inode)
        return {gpu.transport: gpu.encode()}
    if not rank.path:
        return {}
    shm = ShmEndpoint(
        kv=rank.path,
        kv_inode=inode(rank.path),
        nbytes=memory.nbytes,
        fence=fence,
        fence_inode=fence_inode,
    )
    return {shm.transport: shm.encode()}


class Owner:
    """A worker's KV memory, opened to peers: a region for each rank, and one set of fences over all
    of them. A block id means the same block in every rank.

    Owns `files`. The memory belongs to the engine. Thread-safe once it listens."""

    # To free GPU memory while another process maps it is undefined (CUDA). So a worker frees its KV
    # cache only by ending.

    def __init__(
        self,
        files: RegionFiles,
        ranks: Sequence[MappedRank],
        incarnation: str,
        *,
        instance_id: str,
        kinds: abc.Mapping[str, BackendKind] | None = None,
        key: ClusterKey | None = None,
        offered: abc.Collection[str] | None = None,
        slots: int = SLOTS,
        stall_s: float = STALL_S,
    ) -> None:
        """
        ranks: in order.
        incarnation: of the memory, new at each start of the worker.
        kinds: the backends that the port serves, by name.
        offered: the transports that are published. None: all.

        Raises BadMessage when a layout does not fit its memory.
        """
        self._files = files
        self._endpoints = [_mappable(rank, files) for rank in ranks]
        self._offered = offered
        self._incarnation = incarnation
        self.fences = ShmFences(files.fence_fd, incarnation, slots)
        memories = [rank.memory for rank in ranks]
        self._server = StreamServer(
            instance_id, memories, kinds or {}, self.fences, key=key, stall_s=stall_s
        )
        self.fences.hurry = self._server.interrupt

    def listen(self, host: str, port: int = 0, advertise: str | None = None) -> None:
        """Serve the backends, if there are any. Raises ConfigError.

        advertise: published instead of the bound address (a forwarded port)."""
        if not self._server.kinds:
            return
        self._server.start(host, port)
        address = advertise or self._server.address
        for found, memory in zip(self._endpoints, self._server.memories, strict=True):
            for name, kind in self._server.kinds.items():
                # Once, not for each peer that is told: NCCL takes GPU memory for it.
                if (detail := kind.detail(memory)) is not None:
                    found[name] = f"{address}#{detail}" if detail else address

    def endpoints(self, rank: int = 0) -> dict[str, str]:
        """Return the address of each transport of this rank, for `RegionDescriptor.endpoints`."""
        found, offered = self._endpoints[rank], self._offered
        return {n: e for n, e in found.items() if offered is None or n in offered}

    @property
    def transports(self) -> list[str]:
        """The names of those that reach every rank. One that misses a rank brings no KV."""
        found = [set(self.endpoints(rank)) for rank in range(len(self._endpoints))]
        return sorted(set.intersection(*found)) if found else []

    def describe(self) -> tuple[RegionDescriptor, ...]:
        """Describe the memory for peers, rank by rank. Empty: no transport reaches it."""
        if not self.transports:
            return ()
        return tuple(
            RegionDescriptor(
                instance_id=self._server.instance_id,
                incarnation=self._incarnation,
                rank=rank,
                world_size=len(self._endpoints),
                host_id=host_id(),
                nbytes=memory.nbytes,
                first_head=memory.first_head,
                first_layer=memory.first_layer,
                endpoints=self.endpoints(rank),
                **asdict(memory.layout),
            )
            for rank, memory in enumerate(self._server.memories)
        )

    def close(self) -> None:
        """Let nobody open the memory any more, and remove the files. Peers that mapped memory keep
        its pages, which nobody uses any more. Idempotent."""
        # The fences first, so that nothing new begins.
        self.fences.close()
        self._server.close()
        self._files.close()
