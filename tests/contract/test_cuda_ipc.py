"""cuda_ipc beyond the conformance suite: other processes, their deaths, and what is refused."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pullfill.errors import BadMessage, ConfigError, IncompatibleError, PeerUnavailable
from pullfill.transfer import owners
from pullfill.transfer.cuda_ipc.ipc_transport import (
    CudaIpcTransport,
    GpuMapping,
    export,
)
from pullfill.transfer.layout import dense_layout
from pullfill.wire import FenceToken
from tests.support.fake_gpu import FakeDriver
from tests.support.transfer_rigs import (
    DENSE,
    Region,
    Rig,
    described,
    driver_of,
    extent,
    memory_over,
)
from tests.support.transfer_writer import FOREIGN, Program, Writer

BLOCKS = range(DENSE.num_blocks)
OWN_PID = -1
"""Stands for the process that runs the test. Another process may have collected it."""


def end(writer: Program) -> None:
    """SIGKILL, and wait until the kernel says that it has ended (it stays a zombie)."""
    writer.process.kill()
    os.waitid(os.P_PID, writer.process.pid, os.WEXITED | os.WNOWAIT)


def test_a_writer_of_another_process(gpu_region: Region, tmp_path: Path) -> None:
    fences = gpu_region.owner.fences
    with Writer(gpu_region, tmp_path) as writer:
        token = fences.open(BLOCKS)
        assert writer.ask("write", token) == "done"
        assert (gpu_region.pages == FOREIGN).all()
        assert fences.try_revoke(token)
        assert writer.ask("write", token) == "fenced"
        assert writer.ask("close") == "closed"


@pytest.mark.timeout(60)
@pytest.mark.essential
def test_a_free_lock_proves_nothing_before_the_writers_process_has_ended(
    gpu_region: Region, tmp_path: Path
) -> None:
    """A killed process loses its locks when its files are closed; its device may copy on until the
    driver has ended its context. The time between is made long here."""
    fences = gpu_region.owner.fences
    with Writer(gpu_region, tmp_path) as writer:
        token, other = fences.open(BLOCKS), fences.open([])
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
    reborn = fences.open(BLOCKS)
    assert fences.try_revoke(reborn), "the dead writer's record is free again"


def test_after_a_gpu_error_only_the_end_of_the_process_is_proof(
    gpu_region: Region, tmp_path: Path
) -> None:
    fences = gpu_region.owner.fences
    with Writer(gpu_region, tmp_path) as writer:
        token, next_one = fences.open(BLOCKS), fences.open(BLOCKS)
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


def test_every_opening_is_given_back_and_sessions_share_a_stream(
    gpu_rig: Rig, gpu_region: Region
) -> None:
    driver, mine = driver_of(gpu_rig.transport), gpu_rig.local(DENSE)
    sessions = [gpu_rig.connect(mine, gpu_region) for _ in range(3)]
    assert (sum(driver.openings.values()), len(driver.streams)) == (3, 1), "one stream for all"
    for changes in ({"num_layers": 1}, {"incarnation": "no"}):
        with pytest.raises((PeerUnavailable, IncompatibleError)):
            gpu_rig.connect(mine, gpu_region, **changes)
    with pytest.raises(BadMessage, match="beyond its allocation"):
        gpu_rig.transport.connect(mine.memory, described(gpu_region, memory_offset=4097))
    assert sum(driver.openings.values()) == 3
    for session in sessions:
        session.close()
    assert (sum(driver.openings.values()), len(driver.streams)) == (0, 1)


def test_nothing_is_copied_outside_the_fence(gpu_rig: Rig, gpu_region: Region) -> None:
    """Many batches: each is over (synchronised) when its fence is left."""
    driver, mine = driver_of(gpu_rig.transport), gpu_rig.local(DENSE)
    session = gpu_rig.connect(mine, gpu_region)
    session._limits = 4096, 8  # type: ignore[attr-defined]
    hold, left = session._hold, []  # type: ignore[attr-defined]
    leave = hold.leave

    def watched(token: FenceToken) -> None:
        left.append(len(driver.copies))
        leave(token)

    hold.leave = watched
    token = gpu_region.owner.fences.open(BLOCKS)
    session.move("write", token, [1, 5, 9, 30], [2, 4, 8, 16])
    assert left == list(range(1, len(left) + 1))
    assert len(left) > 1
    session.close()


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
    ],
)
def test_out_of_reach_and_why(
    gpu_rig: Rig, gpu_region: Region, changes: dict[str, object], reason: str
) -> None:
    driver_of(gpu_rig.transport).apart = frozenset({(0, 1)})
    if changes.get("memory_pid") == OWN_PID:
        changes = {"memory_pid": os.getpid()}
    assert reason in (gpu_rig.transport.can_reach(described(gpu_region, **changes)) or "reachable")


def test_within_reach(gpu_rig: Rig, gpu_region: Region) -> None:
    assert gpu_rig.transport.can_reach(gpu_region.descriptor) is None
    # A device that CUDA_VISIBLE_DEVICES hides from us: its handle may open all the same.
    assert gpu_rig.transport.can_reach(described(gpu_region, memory_device="hidden")) is None
    assert sum(driver_of(gpu_rig.transport).openings.values()) == 0


def test_out_of_reach_of_other_hosts_and_of_cpu_memory(gpu_rig: Rig, gpu_region: Region) -> None:
    elsewhere = msgspec.structs.replace(gpu_region.descriptor, host_id="other")
    assert "another host" in (gpu_rig.transport.can_reach(elsewhere) or "")
    with pytest.raises(PeerUnavailable, match="another host"):
        gpu_rig.transport.connect(gpu_rig.local(DENSE).memory, elsewhere)
    on_cpu = CudaIpcTransport(None, lambda: driver_of(gpu_rig.transport))
    assert "not on a GPU" in (on_cpu.can_reach(gpu_region.descriptor) or "")
    with pytest.raises(IncompatibleError):
        on_cpu.connect(replace(gpu_rig.local(DENSE).memory, device=None), gpu_region.descriptor)


def test_mapped_physical_pages_are_refused_with_what_to_do() -> None:
    driver = FakeDriver()
    pages = driver.allocate(extent(DENSE), exportable=False)
    memory = replace(memory_over(pages.data, DENSE), device=0)
    with pytest.raises(ConfigError, match="expandable_segments") as refused:
        export(memory, driver)
    assert "--enable-sleep-mode" in str(refused.value)
    with pytest.raises(ConfigError, match="CPU"):
        export(replace(memory, device=None), driver)
    beyond = replace(memory, nbytes=memory.nbytes + 1)
    pages.exportable = True
    with pytest.raises(ConfigError, match="one allocation"):
        export(beyond, driver)


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
    assert "expandable_segments" in caplog.text
    assert len(owners.attach_ranks({(0, 0): told}, 1)) == 1, (
        "still there for copies made by this process"
    )
    assert owners.attach_ranks({(0, 0): replace(told, pid=1)}, 1) == []
