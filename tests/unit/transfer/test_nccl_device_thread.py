"""The thread that makes a GPU's NCCL calls: what it is asked for, and what it survives."""

from __future__ import annotations

import threading

import pytest

from pullfill.errors import TransferFailed
from pullfill.transfer.nccl.device import Device
from tests.support.fake_kernels import FakeStream
from tests.support.fake_nccl import World
from tests.support.nccl_comms import impatient, patient
from tests.support.nccl_gpus import FakeGpu
from tests.support.waiting import eventually


def test_an_id_that_cannot_be_made_says_so() -> None:
    world = World()
    world.ncclGetUniqueId = lambda *_: 1  # type: ignore[method-assign]
    with pytest.raises(TransferFailed, match="unhandled cuda error"):
        Device(FakeGpu(world, "GPU-0")).unique_id(patient)


def test_an_id_that_nccl_does_not_make_is_given_up() -> None:
    world, go_on = World(), threading.Event()
    world.ncclGetUniqueId = lambda *_: go_on.wait(20) and 1  # type: ignore[method-assign]
    with pytest.raises(TransferFailed, match="too late"):
        Device(FakeGpu(world, "GPU-0")).unique_id(impatient())
    go_on.set()


def test_who_waits_for_a_dead_owner_thread_hears_of_it(caplog: pytest.LogCaptureFixture) -> None:
    def fail(comm: object) -> int:
        raise MemoryError("no more")

    world = World()
    device = Device(FakeGpu(world, "GPU-0"))
    waiting, other = (device.communicator(device.unique_id(patient), 0) for _ in range(2))
    eventually(lambda: len(world.comms) == 2, "not begun")
    world.ncclCommAbort = fail  # type: ignore[method-assign]
    other.close()
    with pytest.raises(TransferFailed, match="restart this worker"):
        waiting.wait_ready(impatient(20))
    with pytest.raises(TransferFailed, match="restart this worker"):
        device.unique_id(impatient(20))
    assert "no more" in caplog.text


def test_an_id_of_another_length_is_refused() -> None:
    comm = Device(FakeGpu(World(), "GPU-0")).communicator(b"x", 1)
    with pytest.raises(TransferFailed, match="128 bytes"):
        comm.wait_ready(lambda: None)


class Lasting(FakeGpu):
    """Its streams cannot be destroyed."""

    def stream(self) -> FakeStream:
        def fail() -> None:
            raise TransferFailed("cuStreamDestroy: CUDA_ERROR_ILLEGAL_ADDRESS")

        made = super().stream()
        made.close = fail  # type: ignore[method-assign]
        return made


def test_a_stream_that_cannot_be_destroyed_ends_no_owner_thread() -> None:
    def give_up() -> None:
        raise TransferFailed("too late")

    world = World()
    device = Device(Lasting(world, "GPU-0"))
    alone = device.communicator(device.unique_id(patient), 0)
    eventually(lambda: len(world.comms) == 1, "not begun")
    with pytest.raises(TransferFailed, match="too late"):
        alone.wait_ready(give_up)
    eventually(lambda: world.aborts == 1, "not freed")
    asking = threading.Thread(target=device.unique_id, args=(patient,), daemon=True)
    asking.start()
    asking.join(20)
    assert not asking.is_alive()
