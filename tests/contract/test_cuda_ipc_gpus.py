"""What GPUs demand of cuda_ipc: a proof of a writer's end, one stream for all sessions, links
between GPUs, copies in flight when something fails. The GPUs are plain memory (fake_gpu.py)."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace

import pytest

from pullfill.errors import BadMessage, PeerUnavailable, TransferFailed
from pullfill.runtime import failpoints
from pullfill.runtime.failpoints import FailpointError
from pullfill.transfer import copying
from pullfill.transfer.copying import read_pages
from pullfill.transfer.cuda_ipc.ipc_transport import IpcEndpoint, export
from pullfill.transfer.gpu.copies import NVLINK, PCIE, SAME, Interconnect, link_to
from tests.support.fake_gpu import FakeDriver
from tests.support.transfer_rigs import (
    DENSE,
    Region,
    Rig,
    check_moved,
    described,
    driver_of,
    extent,
    memory_over,
    pages,
    random_bytes,
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mps": True}, "MPS runs here.*nvidia-cuda-mps-control"),
        ({"module": None}, "settings cannot be read"),
        ({"module": "RegistryDwords: RmClientListDeferredFree=1"}, "NVreg_RegistryDwords"),
    ],
)
def test_no_copies_where_a_death_would_not_end_them(
    gpu_rig: Rig, gpu_region: Region, changes: dict[str, object], reason: str
) -> None:
    for name, value in changes.items():
        setattr(driver_of(gpu_rig.transport), name, value)
    assert re.search(reason, gpu_rig.transport.can_reach(gpu_region.descriptor) or "")
    with pytest.raises(PeerUnavailable, match=reason):
        gpu_rig.connect(gpu_rig.local(DENSE), gpu_region)


@pytest.mark.parametrize(
    ("uuid", "link"), [("gpu-a", SAME), ("gpu-b", NVLINK), ("gpu-c", PCIE), ("hidden", PCIE)]
)
def test_links(uuid: str, link: Interconnect) -> None:
    driver = FakeDriver(devices=("gpu-a", "gpu-b", "gpu-c"), nvlinks=frozenset({(0, 1)}))
    assert link_to(driver, 0, uuid) is link


def test_within_one_gpu_the_kernel_moves_long_runs_too(gpu_rig: Rig, gpu_region: Region) -> None:
    driver, token = driver_of(gpu_rig.transport), gpu_region.owner.fences.open(range(40))
    session = gpu_rig.connect(gpu_rig.local(DENSE), gpu_region)
    session.write_blocks(token, range(40), range(40))  # one run for each layer, or fewer
    assert driver.launched == driver.copies
    session.close()
    # Over PCIe the engines move what is longer than their threshold, and the model keeps the GPU.
    far = gpu_rig.transport.connect(
        gpu_rig.local(DENSE).memory, described(gpu_region, memory_device="gpu-b")
    )
    far.write_blocks(token, range(40), range(40))
    assert len(driver.launched) == 1
    assert driver.engines == [False, True]
    assert len(driver.copies) == 2
    far.close()


def test_blocks_of_gpu_memory_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(copying, "lane_of", driver.lane)
    data = driver.allocate(extent(DENSE)).data
    data[:] = random_bytes(len(data), 3)
    memory = memory_over(data, DENSE)
    on_gpu = [replace(memory, device=0)]
    assert (read_pages(on_gpu, [3, 1, 30]) == read_pages([memory], [3, 1, 30])).all()
    assert driver.to_host == [3 * DENSE.block_bytes], "one copy to the CPU for all blocks"
    read_pages(on_gpu, [5])
    assert driver.to_host[1:] == [DENSE.block_bytes]
    read_pages(on_gpu, range(20))
    assert len(driver._locked) == 1, "one page-locked buffer, also when more is asked for later"


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
    session.write_blocks(token, [3], [7])
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
    two.write_blocks(second, [2], [2])
    driver.fail_sync = True
    with pytest.raises(TransferFailed, match="ILLEGAL_ADDRESS"):
        one.write_blocks(first, [1], [1])
    assert not fences.try_revoke(first)
    with pytest.raises(TransferFailed, match="restart this worker"):
        two.write_blocks(second, [2], [2])
    assert fences.try_revoke(second)
    two.close()


def test_a_fault_with_copies_in_flight(
    gpu_rig: Rig, gpu_region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The point between queueing a batch and waiting for it."""
    monkeypatch.setattr(failpoints, "_active", failpoints.parse("cuda_ipc.queued=error:now"))
    session = gpu_rig.connect(gpu_rig.local(DENSE), gpu_region)
    token = gpu_region.owner.fences.open([1])
    with pytest.raises(FailpointError, match="now"):
        session.write_blocks(token, [1], [1])
    assert driver_of(gpu_rig.transport).copies, "the batch was waited for all the same"
    assert gpu_region.owner.fences.try_revoke(token)
    session.close()


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
        session.write_blocks(fences.open([1]), [1], [1])
        process.kill()
    other = gpu_rig.connect(mine, gpu_region)
    with pytest.raises(TransferFailed, match="owned the GPU memory has ended"):
        session.write_blocks(fences.open([2]), [2], [2])
    other.write_blocks(fences.open([3]), [3], [3])
    with pytest.raises(PeerUnavailable, match="owns the GPU memory"):
        gpu_rig.transport.connect(mine.memory, theirs)
    for one in (session, other):
        one.close()
    assert sum(driver.openings.values()) == 0


def test_a_session_closes_where_cuda_does_not_unmap(
    gpu_rig: Rig, gpu_region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    session = gpu_rig.connect(gpu_rig.local(DENSE), gpu_region)
    driver_of(gpu_rig.transport).error = "cuIpcCloseMemHandle: CUDA_ERROR_MAP_FAILED"
    session.close()
    assert "stays mapped: cuIpcCloseMemHandle" in caplog.text
