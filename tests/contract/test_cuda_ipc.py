"""cuda_ipc beyond the conformance suite: other processes and their deaths, links between GPUs,
ranks, and what is refused. The GPUs are plain memory (fake_gpu.py)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pullfill.errors import (
    BadMessage,
    ConfigError,
    Fenced,
    PeerUnavailable,
    TransferFailed,
)
from pullfill.options import WorkerOptions
from pullfill.transfer import copying, owners
from pullfill.transfer.connect import connect, peer_transports
from pullfill.transfer.contract import KvLayout, LocalMemory
from pullfill.transfer.copying import read_pages
from pullfill.transfer.cuda_ipc import ipc_transport
from pullfill.transfer.cuda_ipc.ipc_transport import (
    CudaIpcTransport,
    GpuMapping,
    IpcEndpoint,
    export,
)
from pullfill.transfer.gpu import cuda
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.owners import Owner
from pullfill.transfer.shm.files import RegionFiles
from pullfill.wire import FenceToken, RegionDescriptor
from pullfill.worker.context import WorkerContext
from pullfill.worker.memory import open_to_peers
from tests.support.fake_gpu import FakeDriver
from tests.support.transfer_rigs import (
    DENSE,
    Region,
    Rig,
    assert_same,
    check_moved,
    described,
    driver_of,
    extent,
    memory_over,
    pages,
    random_bytes,
)
from tests.support.transfer_writer import FOREIGN, Program, Writer

ALL = range(DENSE.num_blocks)
OWN_PID = -1
"""Stands for the process that runs the test. Another process may have collected it."""


def end(writer: Program) -> None:
    """SIGKILL, and wait until the kernel says that it has ended (it stays a zombie)."""
    writer.process.kill()
    os.waitid(os.P_PID, writer.process.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.timeout(60)
@pytest.mark.essential
def test_a_free_lock_proves_nothing_before_the_writers_process_has_ended(
    gpu_region: Region, tmp_path: Path
) -> None:
    """A killed process loses its locks when its files are closed; its device may copy on until the
    driver has ended its context. The time between is made long here."""
    fences = gpu_region.owner.fences
    with Writer(gpu_region, tmp_path) as writer:
        token, other = fences.open(ALL), fences.open([])
        assert writer.ask("write", token) == "done"
        assert (gpu_region.pages == FOREIGN).all()
        assert writer.ask("start", token) == "queued"
        assert not fences.try_revoke(token), "the lock is held"
        assert writer.ask("unlock") == "unlocked"
        for _ in range(3):
            assert not fences.try_revoke(token), "the lock is free, but the copies are in flight"
        assert fences.in_use == 2
        assert fences.try_revoke(other), "no other grant is held up"
        writer.process.send_signal(signal.SIGSTOP)
        assert not fences.try_revoke(token)
        end(writer)
        assert fences.try_revoke(token)
        assert fences.in_use == 0
    reborn = fences.open(ALL)
    assert fences.try_revoke(reborn), "the dead writer's record is free again"


def test_after_a_gpu_error_only_the_end_of_the_process_is_proof(
    gpu_region: Region, tmp_path: Path
) -> None:
    fences = gpu_region.owner.fences
    with Writer(gpu_region, tmp_path) as writer:
        token, next_one = fences.open(ALL), fences.open(ALL)
        assert writer.ask("break", token).startswith("failed cuEventSynchronize")
        assert writer.ask("write", next_one).startswith("failed an earlier copy failed")
        assert not fences.try_revoke(token)
        assert writer.ask("close") == "closed"
        assert not fences.try_revoke(token), "closing the session lets go of nothing"
        assert writer.ask("unlock") == "unlocked"  # as when the process begins to die
        assert not fences.try_revoke(token), "its record still names the slot"
        end(writer)
        assert fences.try_revoke(token)
        assert fences.try_revoke(next_one)


def test_nothing_is_copied_outside_the_fence(gpu_rig: Rig, gpu_region: Region) -> None:
    """Many batches: each is over (synchronised) when its fence is left."""
    driver, mine = driver_of(gpu_rig.transport), gpu_rig.local(DENSE)
    session = gpu_rig.connect(mine, gpu_region)
    session.limits = 4096, 8
    hold, left = session.hold, []
    leave = hold.leave

    def watched(token: FenceToken) -> None:
        left.append(len(driver.copies))
        leave(token)

    hold.leave = watched
    token = gpu_region.owner.fences.open(ALL)
    session.move("write", token, [1, 5, 9, 30], [2, 4, 8, 16])
    assert left == list(range(1, len(left) + 1))
    assert len(left) > 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"memory_pid_space": "pid:[1]"}, "PID namespace"),
        ({"memory_pid_space": ""}, "PID namespace"),
        ({"memory_pid": OWN_PID}, "its own GPU memory"),
        ({"fence": "/dev/shm/pullfill-gone.fence"}, "fence"),
        ({"memory_device": "gpu-b"}, "cannot reach memory of GPU 1"),
        ({"memory_device": "hidden", "memory_handle": b"1 1".ljust(64)}, "CUDA_ERROR"),
        ({"v": 2}, "version 2"),
        ({}, "reachable"),
        # A device that CUDA_VISIBLE_DEVICES hides from us: its handle may open all the same.
        ({"memory_device": "hidden"}, "reachable"),
        # A death would not end the copies.
        ({"driver_mps": True}, "MPS runs here.*nvidia-cuda-mps-control"),
        ({"driver_module": None}, "settings cannot be read"),
        ({"driver_module": "RegistryDwords: RmClientListDeferredFree=1"}, "NVreg_RegistryDwords"),
    ],
)
def test_out_of_reach_and_why(
    gpu_rig: Rig, gpu_region: Region, changes: dict[str, object], reason: str
) -> None:
    driver = driver_of(gpu_rig.transport)
    driver.apart = frozenset({(0, 1)})
    for name in [name for name in changes if name.startswith("driver_")]:
        setattr(driver, name.removeprefix("driver_"), changes[name])
    theirs = {name: value for name, value in changes.items() if not name.startswith("driver_")}
    if theirs.get("memory_pid") == OWN_PID:
        theirs["memory_pid"] = os.getpid()
    descriptor = described(gpu_region, **theirs)
    assert re.search(reason, gpu_rig.transport.can_reach(descriptor) or "reachable")
    if changes and not theirs:
        with pytest.raises(PeerUnavailable, match=reason):
            gpu_rig.transport.connect(gpu_rig.local(DENSE).memory, descriptor)
    assert sum(driver.openings.values()) == 0


def test_out_of_reach_of_one_of_our_ranks(gpu_rig: Rig, gpu_region: Region) -> None:
    """Another transport is taken then. Rank 0 alone would say that this one works."""
    driver = driver_of(gpu_rig.transport)
    transport = CudaIpcTransport([0, 1], lambda: driver, driver.lane)
    assert transport.can_reach(gpu_region.descriptor) is None
    driver.apart = frozenset({(1, 0)})
    why = "GPU 1 cannot reach memory of GPU 0 directly"
    assert transport.can_reach(gpu_region.descriptor) == why


def test_out_of_reach_of_other_hosts(gpu_rig: Rig, gpu_region: Region) -> None:
    elsewhere = msgspec.structs.replace(gpu_region.descriptor, host_id="other")
    assert "another host" in (gpu_rig.transport.can_reach(elsewhere) or "")
    with pytest.raises(PeerUnavailable, match="another host"):
        gpu_rig.transport.connect(gpu_rig.local(DENSE).memory, elsewhere)


def test_memory_beyond_one_allocation_is_refused() -> None:
    driver = FakeDriver()
    memory = replace(memory_over(driver.allocate(extent(DENSE)).data, DENSE), device=0)
    with pytest.raises(ConfigError, match="one allocation"):
        export(replace(memory, nbytes=memory.nbytes + 1), driver)


def test_the_main_process_maps_what_a_rank_exported() -> None:
    driver, layout = FakeDriver(), dense_layout(1, 4, 1, 64)
    block = driver.allocate(8192 + extent(layout), device=1)
    theirs = replace(memory_over(block.data[8192:], layout), device=0, first_head=3)
    handle = export(replace(theirs, device=1), driver)
    mapping = GpuMapping(handle, theirs, driver)
    assert mapping.memory.device == 1, "as this process numbers it"
    assert mapping.memory.first_head == 3
    assert mapping.memory.address != theirs.address
    offset = mapping.memory.address
    block.data[8192] = 77
    assert np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 1).from_address(offset))[0] == 77
    mapping.close()
    mapping.close()
    assert sum(driver.openings.values()) == 0
    with pytest.raises(PeerUnavailable, match="not visible"):
        GpuMapping(msgspec.structs.replace(handle, device="gpu-z"), theirs, driver)
    block.free()
    with pytest.raises(PeerUnavailable, match="cannot be mapped"):
        GpuMapping(handle, theirs, driver)


def test_a_rank_whose_memory_has_no_handle(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver, layout = FakeDriver(), dense_layout(2, 4, 1, 64)
    pages = driver.allocate(extent(layout), exportable=False)
    told = owners.tell_gpu(replace(memory_over(pages.data, layout), device=0), driver)
    assert "expandable_segments" in told.why_not
    assert "--enable-sleep-mode" in told.why_not
    assert "expandable_segments" in caplog.text
    assert len(owners.attach_ranks({(0, 0): told}, 1)) == 1, (
        "still there for copies made by this process"
    )
    assert owners.attach_ranks({(0, 0): replace(told, pid=1)}, 1) == []


def test_blocks_of_gpu_memory_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(copying, "load", lambda: driver)
    data = driver.allocate(extent(DENSE)).data
    data[:] = random_bytes(len(data), 3)
    memory = memory_over(data, DENSE)
    on_gpu = [replace(memory, device=0)]
    assert (read_pages(on_gpu, [3, 1, 30]) == read_pages([memory], [3, 1, 30])).all()


def test_memory_of_another_gpu(gpu_rig: Rig, gpu_region: Region) -> None:
    """cuPointerGetAttribute calls it memory of that GPU, here too. It is mapped all the same."""
    driver, layout = driver_of(gpu_rig.transport), DENSE
    block = driver.allocate(extent(layout), device=1)
    block.data[:] = random_bytes(len(block.data), 5)
    memory = replace(memory_over(block.data, layout), device=1)
    exported = export(memory, driver)
    descriptor = described(
        gpu_region, memory_handle=exported.handle, memory_device="gpu-b", memory_offset=0
    )
    mine = gpu_rig.local(layout)
    assert gpu_rig.transport.can_reach(descriptor) is None
    session = gpu_rig.transport.connect(mine.memory, descriptor)
    before, token = pages(block.data, layout).copy(), gpu_region.owner.fences.open([7])
    session.move("write", token, [3], [7])
    check_moved(before, pages(block.data, layout), mine.pages[:, [3]], [7])
    session.close()
    with pytest.raises(BadMessage, match="beyond its allocation"):
        gpu_rig.transport.connect(mine.memory, described(
            gpu_region, memory_handle=exported.handle, memory_device="gpu-b", memory_offset=1
        ))  # fmt: skip
    assert not driver.maps(exported.handle)


def test_a_failed_copy_of_one_session_leaves_the_fences_of_others(
    gpu_rig: Rig, gpu_region: Region
) -> None:
    """They share a stream. The other session copies no more, but what it wrote is over."""
    driver, fences = driver_of(gpu_rig.transport), gpu_region.owner.fences
    one, two = (gpu_rig.connect(gpu_rig.local(DENSE), gpu_region) for _ in range(2))
    first, second = fences.open([1]), fences.open([2])
    two.move("write", second, [2], [2])
    driver.fail_sync = True
    with pytest.raises(TransferFailed, match="ILLEGAL_ADDRESS"):
        one.move("write", first, [1], [1])
    assert not fences.try_revoke(first)
    with pytest.raises(TransferFailed, match="restart this worker"):
        two.move("write", second, [2], [2])
    assert fences.try_revoke(second)
    for session in (one, two):
        session.close()
    assert sum(driver.openings.values()) == 1, "what may still be written to stays mapped"


def test_nothing_is_copied_to_memory_of_a_dead_owner(gpu_rig: Rig, gpu_region: Region) -> None:
    """CUDA frees it with its process. What a copy would break then, it breaks for all sessions."""
    driver, fences = driver_of(gpu_rig.transport), gpu_region.owner.fences
    handle = IpcEndpoint.decode(gpu_region.descriptor.endpoints["cuda_ipc"]).memory.handle
    fd = int(handle.split()[1])
    with subprocess.Popen(["sleep", "60"], pass_fds=[fd]) as process:
        handle = f"{process.pid} {fd} gpu-a".encode().ljust(len(handle))
        theirs = described(gpu_region, memory_pid=process.pid, memory_handle=handle)
        mine = gpu_rig.local(DENSE)
        session = gpu_rig.transport.connect(mine.memory, theirs)
        session.move("write", fences.open([1]), [1], [1])
        process.kill()
    other = gpu_rig.connect(mine, gpu_region)
    with pytest.raises(TransferFailed, match="owned the GPU memory has ended"):
        session.move("write", fences.open([2]), [2], [2])
    other.move("write", fences.open([3]), [3], [3])
    with pytest.raises(PeerUnavailable, match="owns the GPU memory"):
        gpu_rig.transport.connect(mine.memory, theirs)
    for one in (session, other):
        one.close()
    assert sum(driver.openings.values()) == 0


# --------------------------------------------------------------------------- several ranks


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

    def owner(self, directory: Path, options: WorkerOptions = OPTIONS) -> Owner:
        """Of a decode worker."""
        made = WorkerContext("decode-1", RegionFiles("decode-1", directory))
        made.ranks = self.mapped
        open_to_peers(made, options, None, decodes=True)
        return made.owner

    def close(self) -> None:
        for rank in self.mapped:
            rank.close()


def seen_by_others(owner: Owner) -> list[RegionDescriptor]:
    """As another process gets them: no process may map its own GPU memory."""
    found = []
    for descriptor in owner.describe():
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
    owner = decode.owner(tmp_path)
    transport = CudaIpcTransport([0], lambda: driver, driver.lane)
    openings = sum(driver.openings.values())
    session = connect(prefill.memories, seen_by_others(owner), [transport])
    source, target = [7, 0, 3], [2, 11, 5]
    expected, token = decode.pages, owner.fences.open(target)
    session.move("write", token, source, target)
    expected[:, target] = prefill.pages[:, source]
    assert_same(decode.pages, expected)
    session.move("read", token, [5], [9])
    assert_same(prefill.pages[:, 9], decode.pages[:, 5])
    assert owner.fences.try_revoke(token)
    with pytest.raises(Fenced):
        session.move("write", token, [1], [2])
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
    driver.mps = True
    with pytest.raises(ConfigError, match="MPS runs here"):
        peer_transports(["cuda_ipc"], prefill.memories, None)
    prefill.close()


def test_what_misses_one_rank_is_not_offered(
    tmp_path: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = GpuRanks(driver, 2, 1)
    whole = Owner.endpoints
    monkeypatch.setattr(Owner, "endpoints", lambda owner, rank: {} if rank else whole(owner, rank))
    options = WorkerOptions(model="m", transports=frozenset({"cuda_ipc"}))
    with pytest.raises(ConfigError, match="none of them reaches"):
        decode.owner(tmp_path, options)
    decode.close()
