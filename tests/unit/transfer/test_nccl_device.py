"""The one thread that makes a GPU's NCCL calls, over a library that keeps NCCL's rules."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from pullfill.errors import TransferFailed
from pullfill.transfer.nccl import device as device_module
from pullfill.transfer.nccl.device import Device, State
from pullfill.transfer.nccl.library import Nccl
from tests.support.fake_nccl import CUDA_ERROR, INVALID_USAGE, FakeStream, World
from tests.support.nccl_rig import FakeGpu, Here, Running, clean_world, data, impatient, patient
from tests.support.waiting import eventually


@pytest.fixture
def world() -> Iterator[World]:
    with clean_world() as made:
        yield made


@pytest.fixture
def here(world: World) -> Iterator[Here]:
    made = Here(world)
    made.wait_ready()
    yield made
    made.close()


@pytest.fixture
def three(world: World) -> Iterator[Here]:
    made = Here(world, peers=3)
    made.wait_ready()
    for number in range(3):
        made.move(number)
    yield made
    made.close()


# ---------------------------------------------------------------------- faults


def test_an_error_in_the_background_ends_the_transfer(here: Here) -> None:
    here.move()
    here.world.set(hang=True)
    receiving = here.receive_in_vain()
    here.world.fail("GPU-0")
    assert "remote process exited" in str(receiving.end())
    assert receiving.other is not None
    assert receiving.other.give_up() is not None
    for comm in (here.ours[0], here.theirs[0]):
        with pytest.raises(TransferFailed, match="over"):
            comm.run([], patient)
    eventually(lambda: here.world.aborts == 2, "not freed")


def test_an_error_that_comes_with_the_end_of_the_kernel_is_an_error(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's manual: after an error nothing can be assumed about the bytes."""
    here.move()
    done = FakeStream.done.fget
    assert done is not None

    def done_and_failed(stream: FakeStream) -> bool:
        if stream.device == "GPU-0" and (ended := done(stream)):
            here.world.fail("GPU-0")
            return ended
        return bool(done(stream))

    monkeypatch.setattr(FakeStream, "done", property(done_and_failed))
    sending = Running(here.theirs[0], True, data(1, 100))
    receiving = Running(here.ours[0], False, np.zeros(100, np.uint8))
    assert "remote process exited" in str(receiving.end())
    sending.give_up()


def test_nothing_is_queued_after_an_error_that_came_while_idle(here: Here) -> None:
    here.move()
    here.world.fail("GPU-0")
    receiving = Running(here.ours[0], False, np.zeros(100, np.uint8))
    assert "remote process exited" in str(receiving.end())


def test_a_stream_that_fails_is_a_failed_transfer_and_not_busy_for_ever(here: Here) -> None:
    here.world.set(hang=True)
    receiving = here.receive_in_vain()
    here.world.set(dumb_streams=1)
    ended = [receiving.comm, receiving.other.comm if receiving.other else None]
    eventually(lambda: any(c is not None and not c.usable for c in ended), "reads as busy")
    eventually(lambda: here.world.revokes > 0, "not revoked")
    receiving.give_up()


def test_nccl_that_cannot_revoke_is_aborted(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.world.set(hang=True)
    receiving = here.receive_in_vain()
    monkeypatch.setattr(here.world, "ncclCommRevoke", lambda *_: INVALID_USAGE)
    assert "stopped" in str(receiving.give_up())
    assert here.world.aborts >= 1


# ---------------------------------------------------------------------- one GPU, several peers


def test_a_peer_that_hangs_holds_up_no_other_and_no_abort(three: Here) -> None:
    """An abort frees memory and so waits for every kernel on the GPU: it comes when nothing else
    runs there. Whoever hangs can be ended all the same."""
    three.world.kill("GPU-1")
    hanging = Running(three.ours[0], False, np.zeros(100, np.uint8))
    eventually(lambda: three.world.waiting("GPU-0") == 1, "no kernel begins")
    three.ours[1].close()
    three.theirs[1].close()
    three.move(2)
    assert "stopped" in str(hanging.give_up())
    eventually(lambda: three.world.aborts == 3, "not freed when the GPU is quiet")
    three.move(2)


def test_nothing_new_begins_while_somebody_waits_for_an_abort(world: World) -> None:
    """Else a GPU that is never quiet would never free what its communicators hold."""
    here = Here(world, peers=2)
    here.wait_ready()
    here.move(1)
    connecting = Running(here.ours[0], False, np.zeros(100, np.uint8))
    world.kill("GPU-2")
    hanging = Running(here.ours[1], False, np.zeros(100, np.uint8))
    eventually(lambda: world.waiting("GPU-0") == 1, "no kernel begins")
    connecting.stop.set()
    connecting.join(0.1)
    assert connecting.is_alive(), "its group may be launched at any time"
    assert "stopped" in str(hanging.give_up())
    assert "stopped" in str(connecting.end())
    here.close()


def test_the_dead_do_not_pile_up_on_a_busy_gpu(world: World) -> None:
    here = Here(world, peers=device_module.DEAD + 2)
    here.wait_ready()
    here.move(0)
    here.move(1)
    world.set(hang=True)
    busy = here.receive_in_vain()
    for comm in here.ours[2:]:
        comm.close()
    eventually(lambda: all(c.state is State.DEAD for c in here.ours[2:]), "not given up")
    waiting = Running(here.ours[1], False, np.zeros(100, np.uint8))
    sending = Running(here.theirs[1], True, data(1, 100))
    time.sleep(0.05)
    assert world.waiting("GPU-0") == 1, "a new group begins though many wait to be freed"
    world.set(hang=False)
    assert [running.end() for running in (busy, waiting, sending)] == [None] * 3
    eventually(lambda: world.aborts >= device_module.DEAD, "not freed")
    here.close()


def test_one_that_cannot_be_made_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL gives no communicator that could be aborted."""
    monkeypatch.setattr(world, "ncclCommInitRankConfig", lambda *_: 1)
    here = Here(world)
    for comm in (here.ours[0], here.theirs[0]):
        with pytest.raises(TransferFailed, match="unhandled cuda error"):
            comm.wait_ready(patient)
        assert not comm.usable


# ---------------------------------------------------------------------- the rules are kept by force


def given_up(here: Here, *numbers: int) -> list[Running]:
    """Receives that end while NCCL launches their groups. Their kernels never end by themselves."""
    here.world.set(hang=True)
    busy = here.receive_in_vain(2)  # it holds up the aborts until all are given up
    here.world.set(hang_issue=True)
    transfers = [Running(here.ours[n], False, np.zeros(100, np.uint8)) for n in numbers]
    comms = [transfer.comm for transfer in transfers]
    eventually(lambda: all(c.state is State.ISSUING for c in comms), "not issued")
    for transfer in transfers:
        transfer.stop.set()
    eventually(lambda: all(c.state is State.DEAD for c in comms), "not given up")
    here.world.set(hang_issue=False)
    assert "stopped" in str(busy.give_up())
    return transfers


@pytest.mark.parametrize("connected", [(0, 1, 2), (1, 2)])
def test_groups_that_nccl_launches_after_they_were_given_up(
    world: World, connected: tuple[int, ...]
) -> None:
    """One abort after the other would wait for ever: the first for the kernel of the second. If 0
    is not connected, its group is never launched. It is aborted after those that are, because an
    abort waits for the launch, and that may wait for the kernels of the others."""
    here = Here(world, peers=3)
    here.wait_ready()
    for number in connected:
        here.move(number)
    for transfer in given_up(here, 0, 1):
        assert "stopped" in str(transfer.end())
    here.close()


def test_one_that_cannot_be_made_is_freed_when_nothing_else_runs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort at once would wait for the kernel that runs, and nobody could stop that one."""
    here = Here(world)
    here.wait_ready()
    world.set(hang=True)
    busy = here.receive_in_vain()
    init = world.ncclCommInitRankConfig

    def fail(*arguments: Any) -> int:
        init(*arguments)
        return CUDA_ERROR

    monkeypatch.setattr(world, "ncclCommInitRankConfig", fail)
    device = here.devices[0]
    refused = device.communicator(device.unique_id(patient), 0)
    with pytest.raises(TransferFailed, match="unhandled cuda error"):
        refused.wait_ready(impatient(5.0))
    assert "stopped" in str(busy.give_up())
    eventually(lambda: world.aborts == 3, "not freed")
    here.close()


def test_who_waits_for_a_dead_owner_thread_hears_of_it(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    device = Device(FakeGpu(world, "GPU-0"), Nccl(world))
    waiting, other = (device.communicator(device.unique_id(patient), 0) for _ in range(2))
    eventually(lambda: len(world.comms) == 2, "not begun")
    world.ncclCommAbort = Mock(side_effect=MemoryError("no more"))  # type: ignore[method-assign]
    other.close()
    with pytest.raises(TransferFailed, match="restart this worker"):
        waiting.wait_ready(impatient(20))
    with pytest.raises(TransferFailed, match="restart this worker"):
        device.unique_id(impatient(20))
    assert "no more" in caplog.text
