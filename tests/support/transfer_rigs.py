"""One way to build (owner, peer) for every transport, for the conformance suite and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from pullfill.net.security import ClusterKey
from pullfill.transfer.contract import KvLayout, LocalMemory, PeerSession, PeerTransport
from pullfill.transfer.cuda_ipc.ipc_transport import (
    CudaIpcTransport,
    IpcEndpoint,
    export,
)
from pullfill.transfer.layout import check_bounds, dense_layout
from pullfill.transfer.nixl.nixl_backend import NixlKind
from pullfill.transfer.owners import MappedRank, Owner
from pullfill.transfer.shm.files import RegionFiles, create_kv
from pullfill.transfer.shm.shm_transport import ShmTransport
from pullfill.transfer.stream.backends import BackendKind
from pullfill.transfer.stream.stream_peer import StreamTransport
from pullfill.transfer.stream.tcp_backend import TcpKind
from pullfill.wire import Compat, RegionDescriptor
from tests.support.fake_gpu import FakeDriver
from tests.support.fake_nccl import World
from tests.support.loopback import LoopbackTransport
from tests.support.nccl_rig import PairKind

Bytes = NDArray[np.uint8]

COMPAT = Compat(
    model="m",
    model_fingerprint="f",
    vllm="v",
    dtype="float32",
    kv_cache_dtype="auto",
    block_size=16,
    layout="LBHNC",
    num_layers=1,
    num_kv_heads=1,
    page_bytes=1,
    isa="x",
    attention="a",
    kv_scales="1",
    kv_groups="FullAttention",
)

PAGE = 512
DENSE = dense_layout(3, 40, 2, PAGE)
LAYOUTS = {
    "dense": DENSE,
    "offset": dense_layout(3, 40, 2, PAGE, base_offset=4096),
    "padded-heads": replace(DENSE, head_stride=600, block_stride=1200, layer_stride=48_000),
    "padded-blocks": replace(DENSE, block_stride=1100, layer_stride=45_056),
    "block-outermost": replace(DENSE, layer_stride=2 * PAGE, block_stride=3 * 2 * PAGE),
    "head-outermost": replace(
        DENSE, block_stride=PAGE, head_stride=40 * PAGE, layer_stride=80 * PAGE
    ),
}


def scattered(seed: int, count: int, blocks: int = 40) -> list[int]:
    chosen: list[int] = np.random.default_rng(seed).permutation(blocks)[:count].tolist()
    return chosen


def extent(layout: KvLayout) -> int:
    """Bytes from 0 to the end of the last page."""
    return (
        layout.base_offset
        + (layout.num_layers - 1) * layout.layer_stride
        + (layout.num_blocks - 1) * layout.block_stride
        + (layout.num_kv_heads - 1) * layout.head_stride
        + layout.page_bytes
    )


def pages(data: Bytes, layout: KvLayout) -> Bytes:
    """[layer, block, head, byte] view of `data`."""
    return np.lib.stride_tricks.as_strided(
        data[layout.base_offset :],
        (layout.num_layers, layout.num_blocks, layout.num_kv_heads, layout.page_bytes),
        (layout.layer_stride, layout.block_stride, layout.head_stride, 1),
    )


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """numpy's own assertion looks for NaN first: 0.2 s for 24 MiB of bytes that are the same."""
    if not np.array_equal(found, expected):
        np.testing.assert_array_equal(found, expected)


def check_moved(before: np.ndarray, after: np.ndarray, new: np.ndarray, target: list[int]) -> None:
    """`target` blocks hold `new`; nothing else changed."""
    expected = before.copy()
    expected[:, target] = new
    assert_same(after, expected)


def memory_over(data: Bytes, layout: KvLayout) -> LocalMemory:
    """LocalMemory of `data`, which the caller keeps alive."""
    check_bounds(layout, data.nbytes)
    return LocalMemory(address=data.ctypes.data, nbytes=data.nbytes, layout=layout)


def random_bytes(nbytes: int, seed: int) -> Bytes:
    return np.frombuffer(bytearray(np.random.default_rng(seed).bytes(nbytes)), np.uint8)


@dataclass
class Local:
    """A peer's own memory."""

    data: Bytes
    memory: LocalMemory

    @property
    def pages(self) -> Bytes:
        return pages(self.data, self.memory.layout)


@dataclass
class Region(Local):
    """An owner with its bytes."""

    owner: Owner
    descriptor: RegionDescriptor


@dataclass
class Rig:
    """A transport under test."""

    name: str
    directory: Path
    transport: PeerTransport
    make_rank: Callable[[KvLayout, str], tuple[MappedRank, Bytes]]
    """Of a layout and an instance id."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of `Owner`."""
    regions: list[Region] = field(default_factory=list)
    sessions: list[PeerSession] = field(default_factory=list)

    def region(
        self,
        layout: KvLayout,
        *,
        incarnation: str = "i1",
        instance_id: str = "decode-1",
        slots: int = 64,
    ) -> Region:
        """A region full of random bytes."""
        files = RegionFiles(instance_id, self.directory)
        rank, data = self.make_rank(layout, instance_id)
        owner = Owner(
            files, [rank], incarnation, instance_id=instance_id, slots=slots, **self.options
        )
        owner.listen("127.0.0.1")
        data[:] = random_bytes(data.nbytes, seed=1)
        memory = memory_over(data, layout)
        (descriptor, *_) = owner.describe()
        self.regions.append(Region(data, memory, owner, descriptor))
        return self.regions[-1]

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        for region in self.regions:
            region.owner.close()

    def local(self, layout: KvLayout, seed: int = 2) -> Local:
        data = random_bytes(extent(layout), seed)
        return Local(data, memory_over(data, layout))

    def connect(self, local: Local, region: Region, **changes: object) -> PeerSession:
        """A session that is closed with the rig. `changes` replace fields of the descriptor."""
        descriptor = msgspec.structs.replace(region.descriptor, **changes)
        self.sessions.append(self.transport.connect(local.memory, descriptor))
        return self.sessions[-1]


def shm_rig(directory: Path) -> Rig:
    def make(layout: KvLayout, instance_id: str) -> tuple[MappedRank, Bytes]:
        path = create_kv(directory, instance_id, 0, extent(layout))
        data = np.asarray(np.memmap(path, np.uint8, "r+"))
        return MappedRank(memory_over(data, layout), str(path)), data

    return Rig("shm", directory, ShmTransport(), make)


def loopback_rig(directory: Path) -> Rig:
    return replace(shm_rig(directory), name="loopback", transport=LoopbackTransport())


def stream_rig(
    directory: Path, kind: BackendKind, *, stall_s: float = 20.0, key: ClusterKey | None = None
) -> Rig:
    """Over a backend that works between plain memories of one process."""

    def make(layout: KvLayout, instance_id: str) -> tuple[MappedRank, Bytes]:
        data = np.zeros(extent(layout), np.uint8)
        return MappedRank(memory_over(data, layout)), data

    transport = StreamTransport(kind, key, stall_s=stall_s)
    options = {"kinds": {kind.name: kind}, "key": key, "stall_s": stall_s}
    return Rig(kind.name, directory, transport, make, options)


def tcp_rig(directory: Path) -> Rig:
    return stream_rig(directory, TcpKind())


def nixl_rig(directory: Path) -> Rig:
    kind = NixlKind()
    if (reason := kind.why_not()) is not None:
        pytest.skip(reason)
    return stream_rig(directory, kind)


def nccl_rig(directory: Path) -> Rig:
    """Over a stand-in for NCCL. Small messages: some are contiguous and some are not."""
    kind = PairKind(World(), message_bytes=8 << 10, batch_bytes=1 << 20)
    return stream_rig(directory, kind)


def ipc_rig(directory: Path) -> Rig:
    """Over GPUs made of plain memory."""
    driver: Any = FakeDriver()

    def make(layout: KvLayout, instance_id: str) -> tuple[MappedRank, Bytes]:
        block = driver.allocate(4096 + extent(layout))
        data = block.data[4096:]  # as in a caching allocator, not at the start
        memory = replace(memory_over(data, layout), device=0)
        # Only the pid of another process lets ours map the memory once more.
        exported = msgspec.structs.replace(export(memory, driver), pid=1)
        return MappedRank(memory, exported=exported), data

    return _GpuRig("cuda_ipc", directory, CudaIpcTransport([0], lambda: driver, driver.lane), make)


class _GpuRig(Rig):
    def local(self, layout: KvLayout, seed: int = 2) -> Local:
        data = driver_of(self.transport).allocate(extent(layout)).data
        data[:] = random_bytes(len(data), seed)
        return Local(data, replace(memory_over(data, layout), device=0))


def driver_of(transport: PeerTransport) -> FakeDriver:
    """The GPUs of `ipc_rig`."""
    assert isinstance(transport, CudaIpcTransport)
    driver = transport._driver()
    assert isinstance(driver, FakeDriver)
    return driver


def described(region: Region, **changes: object) -> RegionDescriptor:
    """Of `ipc_rig`: its descriptor with other fields in the endpoint, `memory_X` or `X`."""
    endpoint = IpcEndpoint.decode(region.descriptor.endpoints["cuda_ipc"])
    inner = {n.removeprefix("memory_"): v for n, v in changes.items() if n.startswith("memory_")}
    outer = {n: v for n, v in changes.items() if not n.startswith("memory_")}
    memory = msgspec.structs.replace(endpoint.memory, **inner)
    endpoint = msgspec.structs.replace(endpoint, memory=memory, **outer)
    return msgspec.structs.replace(region.descriptor, endpoints={"cuda_ipc": endpoint.encode()})


RIGS: dict[str, Callable[[Path], Rig]] = {
    "shm": shm_rig,
    "loopback": loopback_rig,
    "tcp": tcp_rig,
    "cuda_ipc": ipc_rig,
    "nixl": nixl_rig,
    "nccl": nccl_rig,
}
CONNECTS = {"nixl": 50}
"""How often to connect where a connection costs: agents, 0.15 s."""
MAPPED = ("shm", "cuda_ipc")
"""Those whose peer copies by itself: it holds the fence, so it can be held up holding it."""
