"""The KV memory of every rank of a worker, as its main process sees it.

With tensor or pipeline parallelism each rank is a process of its own (vLLM's). It only computes;
the main process makes all copies. So each rank says where its memory is (`RankRegion`, sent over
vLLM's handshake between its processes), and the main process maps it (`attach`).

Life: `attach` once the engine has registered its KV caches; `MappedRank.close` after the last copy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pullfill.errors import IncompatibleError
from pullfill.transfer.contract import KvLayout, LocalMemory
from pullfill.transfer.cuda_ipc.owner import CudaIpcOwner, Exported
from pullfill.transfer.shm import files
from pullfill.transfer.shm.owner import FenceOwner, ShmOwner
from pullfill.transfer.topology import head_range

if TYPE_CHECKING:
    from pullfill.transfer.gpu.region import GpuMapping


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
    info = os.stat(path) if path else None
    return RankRegion(
        pid=os.getpid(),
        device="cpu" if memory.device is None else "cuda",
        num_layers=memory.layout.num_layers,
        page_bytes=memory.layout.page_bytes,
        memory=memory,
        path=path,
        inode=(info.st_dev, info.st_ino) if info is not None else (0, 0),
        exported=exported,
        why_not=why_not,
    )


@dataclass(slots=True)
class MappedRank:
    """One rank's memory, mapped in this process.

    memory: with its address here, and with its place in the whole model.
    mapping: ours. None: the engine has mapped it."""

    memory: LocalMemory
    path: str
    mapping: files.Mapping | GpuMapping | None
    exported: Exported | None = None

    def close(self) -> None:
        """Give our mapping back. The engine's stays. Idempotent."""
        if self.mapping is not None:
            self.mapping.close()


def attach(regions: Mapping[tuple[int, int], RankRegion], kv_heads: int) -> list[MappedRank]:
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


def total_layers(regions: Mapping[tuple[int, int], RankRegion]) -> int:
    """Layers of the whole model: the sum over the pipeline stages."""
    return sum(region.num_layers for (_, tp), region in regions.items() if tp == 0)


def base_owner(
    region_files: files.RegionFiles, ranks: Sequence[MappedRank], incarnation: str
) -> FenceOwner:
    """The fence over the memory of all ranks, and what peers of this host can map of it. Owns
    `region_files`. Raises ConfigError."""
    memories = [rank.memory for rank in ranks]
    if memories[0].device is not None:
        return CudaIpcOwner(region_files, memories, [rank.exported for rank in ranks], incarnation)
    return ShmOwner(region_files, memories, [rank.path for rank in ranks], incarnation)


def _attach(region: RankRegion, memory: LocalMemory) -> MappedRank:
    if region.pid == os.getpid():  # mapped here already, by the engine
        return MappedRank(memory, region.path, None, region.exported)
    if memory.device is not None:
        from pullfill.transfer.gpu.region import GpuMapping

        assert region.exported is not None
        there = GpuMapping(region.exported, memory)
        return MappedRank(there.memory, "", there, region.exported)
    mapping = files.Mapping(region.path, region.inode, memory.nbytes)
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
