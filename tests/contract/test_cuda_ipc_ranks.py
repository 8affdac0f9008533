"""GPU workers with other numbers of ranks than each other, from what their ranks tell to the bytes:
every part real but the GPUs, which are plain memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pullfill.decode_worker.context import ConnectorParts
from pullfill.decode_worker.memory import offer
from pullfill.errors import ConfigError, Fenced
from pullfill.options import WorkerOptions
from pullfill.transfer import owners
from pullfill.transfer.connect import connect, peer_transports
from pullfill.transfer.contract import KvLayout, LocalMemory
from pullfill.transfer.cuda_ipc import ipc_transport
from pullfill.transfer.cuda_ipc.ipc_transport import CudaIpcTransport, IpcEndpoint
from pullfill.transfer.gpu import cuda
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.owners import Owner
from pullfill.transfer.shm.files import RegionFiles
from pullfill.wire import RegionDescriptor
from tests.support.fake_gpu import FakeDriver
from tests.support.transfer_rigs import (
    COMPAT,
    assert_same,
    extent,
    memory_over,
    pages,
    random_bytes,
)

BLOCKS, LAYERS, HEADS, PAGE = 12, 3, 4, 64
OPTIONS = WorkerOptions(model="m")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr(ipc_transport, "load", lambda: made)
    return made


class GpuRanks:
    """The GPU memory of a worker with so many ranks; all but rank 0 live in other processes."""

    def __init__(self, driver: FakeDriver, count: int, seed: int) -> None:
        self.layout: KvLayout = dense_layout(LAYERS, BLOCKS, HEADS // count, PAGE)
        self.data = []
        told = {}
        for rank in range(count):
            block = driver.allocate(extent(self.layout), rank % driver.count())
            block.data[:] = random_bytes(len(block.data), seed + rank)
            self.data.append(block.data)
            memory = replace(memory_over(block.data, self.layout), device=block.device)
            region = owners.tell_gpu(memory)
            told[0, rank] = replace(region, pid=1) if rank else region
        self.mapped = owners.attach_ranks(told, HEADS)

    @property
    def memories(self) -> list[LocalMemory]:
        return [rank.memory for rank in self.mapped]

    @property
    def pages(self) -> np.ndarray:
        """[layer, block, head of the whole model, byte]."""
        return np.concatenate([pages(data, self.layout) for data in self.data], axis=2)

    def parts(self, directory: Path) -> ConnectorParts:
        """Of a decode worker."""
        made = ConnectorParts("decode-1", RegionFiles("decode-1", directory))
        made.ranks = self.mapped
        return made

    def close(self) -> None:
        for rank in self.mapped:
            rank.close()


def described(owner: Owner) -> list[RegionDescriptor]:
    """As another process gets them: no process may map its own GPU memory."""
    found = []
    for descriptor in owner.describe(COMPAT):
        endpoint = IpcEndpoint.decode(descriptor.endpoints["cuda_ipc"])
        theirs = msgspec.structs.replace(endpoint.memory, pid=1)
        there = {"cuda_ipc": msgspec.structs.replace(endpoint, memory=theirs).encode()}
        found.append(msgspec.structs.replace(descriptor, endpoints=there))
    return found


@pytest.mark.parametrize(("mine", "theirs"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_every_head_gets_where_it_belongs(
    tmp_path: Path, driver: FakeDriver, mine: int, theirs: int
) -> None:
    decode, prefill = GpuRanks(driver, theirs, 1), GpuRanks(driver, mine, 50)
    owner = offer(decode.parts(tmp_path), "i1", OPTIONS, None)
    assert owner is not None
    transport = CudaIpcTransport(0, lambda: driver, driver.lane)
    openings = sum(driver.openings.values())
    session = connect(prefill.memories, described(owner), [transport])
    source, target = [7, 0, 3], [2, 11, 5]
    expected, token = decode.pages, owner.fences.open(target)
    session.write_blocks(token, source, target)
    expected[:, target] = prefill.pages[:, source]
    assert_same(decode.pages, expected)
    session.read_blocks(token, [5], [9])
    assert_same(prefill.pages[:, 9], decode.pages[:, 5])
    assert owner.fences.try_revoke(token)
    with pytest.raises(Fenced):
        session.write_blocks(token, [1], [2])
    assert_same(decode.pages, expected)
    session.close()
    owner.close()
    assert sum(driver.openings.values()) == openings
    decode.close()
    prefill.close()
    assert sum(driver.openings.values()) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_worker_reaches_others_over_cuda_ipc(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (ipc_transport, cuda):
        monkeypatch.setattr(module, "load", lambda: driver)
    prefill = GpuRanks(driver, 1, 1)
    names = [t.name for t in peer_transports(None, prefill.memories, None)]
    assert names[0] == "cuda_ipc"
    assert not {"shm", "tcp"} & set(names), "they would touch GPU memory with the CPU"
    with pytest.raises(ConfigError, match="on a GPU"):
        peer_transports(["shm"], prefill.memories, None)
    prefill.close()


def test_memory_that_one_of_our_ranks_cannot_reach_is_out_of_reach(
    tmp_path: Path, driver: FakeDriver
) -> None:
    """Another transport is taken then. Rank 0 alone would say that this one works."""
    decode, prefill = GpuRanks(driver, 1, 1), GpuRanks(driver, 2, 50)
    owner = offer(decode.parts(tmp_path), "i1", OPTIONS, None)
    assert owner is not None
    (descriptor,) = described(owner)
    gpus = [memory.device for memory in prefill.memories if memory.device is not None]
    assert gpus == [0, 1]
    transport = CudaIpcTransport(0, lambda: driver, driver.lane, others=gpus)
    assert transport.can_reach(descriptor) is None
    driver.apart = frozenset({(1, 0)})
    assert transport.can_reach(descriptor) == "GPU 1 cannot reach memory of GPU 0 directly"
    owner.close()
    decode.close()
    prefill.close()


def test_what_misses_one_rank_is_not_offered(
    tmp_path: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = GpuRanks(driver, 2, 1)
    whole = Owner.endpoints
    monkeypatch.setattr(Owner, "endpoints", lambda owner, rank: {} if rank else whole(owner, rank))
    options = WorkerOptions(model="m", transports=frozenset({"cuda_ipc"}))
    with pytest.raises(ConfigError, match="none of them reaches"):
        offer(decode.parts(tmp_path), "i1", options, None)
    decode.close()
