"""GPUs of plain memory for the nccl transport, over the library of `fake_nccl.py`; communicators
between them, and transfers that go on in threads."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pullfill.errors import TransferFailed
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.gpu.cuda import Addresses
from pullfill.transfer.nccl.device import Communicator, Device
from pullfill.transfer.nccl.library import Nccl, NcclMove
from pullfill.transfer.nccl.nccl_backend import NcclKind
from pullfill.transfer.stream.backends import Backend
from pullfill.transfer.stream.kv_protocol import SocketConnection
from tests.support.fake_nccl import FakeStream, World
from tests.support.waiting import Call, eventually


class FakeGpu:
    """CudaGpu over this process's memory."""

    def __init__(self, world: World, uuid: str) -> None:
        self.world, self.uuid = world, uuid
        self.copies = 0
        self.hold = threading.Event()
        """Cleared: copies within the GPU do not end."""
        self.hold.set()

    def activate(self) -> None:
        self.world.activate(self.uuid)

    def stream(self) -> FakeStream:
        return FakeStream(self.world, self.uuid)

    def warm(self) -> None: ...

    def copy(self, target: Addresses, source: Addresses, nbytes: Addresses) -> None:
        self.copies += 1
        for t, s, n in zip(target.tolist(), source.tolist(), nbytes.tolist(), strict=True):
            ctypes.memmove(t, s, n)
        assert self.hold.wait(20)

    def allocate(self, nbytes: int) -> int:
        buffer = np.zeros(nbytes, np.uint8)
        self.world.memory[buffer.ctypes.data] = buffer
        return buffer.ctypes.data


class FakeKind(NcclKind):
    """One worker: all memory is on one GPU."""

    def __init__(self, world: World, mine: str = "GPU-0", **settings: Any) -> None:
        super().__init__(**settings)
        self.gpu = FakeGpu(world, mine)
        gpu: Any = self.gpu
        self.device = Device(gpu, Nccl(world))

    shared = False

    def version(self) -> int:
        return self.device.nccl.version()

    def uuids(self) -> list[str]:
        return [self.gpu.uuid]

    def device_of(self, memory: LocalMemory) -> Device | None:
        return self.device


class PairKind(FakeKind):
    """Both workers of a pair in one process: the owner on GPU-0, the peer on GPU-1."""

    def __init__(self, world: World, **settings: Any) -> None:
        super().__init__(world, **settings)
        self.peer = FakeKind(world, "GPU-1", **settings)

    def make(self, memory: LocalMemory, link: SocketConnection, *, owner: bool) -> Backend:
        make = super().make if owner else self.peer.make
        return make(memory, link, owner=owner)


@contextmanager
def clean_world() -> Iterator[World]:
    """A world in which the test leaves nothing: no communicator, thread, stream or violation."""
    made = World()
    before = set(threading.enumerate())

    def stays(thread: threading.Thread) -> bool:
        return thread in before or thread.name == "kv-nccl"

    yield made
    made.set(hang_init=False, hang_issue=False, dumb_streams=0)
    eventually(lambda: not made.comms, "a communicator is left")
    eventually(lambda: all(map(stays, threading.enumerate())), "a thread is left")
    assert made.violations == []
    assert made.streams == {}


def data(seed: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def patient() -> None:
    """A watch that never gives up."""


def impatient(seconds: float = 0.1) -> Callable[[], None]:
    until = time.monotonic() + seconds

    def watch() -> None:
        if time.monotonic() > until:
            raise TransferFailed("too late")

    return watch


class Here:
    """One GPU, and a communicator to each of some other GPUs, whose processes are this one."""

    def __init__(self, world: World, peers: int = 1) -> None:
        self.world = world
        gpus: list[Any] = [FakeGpu(world, f"GPU-{n}") for n in range(1 + peers)]
        self.devices = [Device(gpu, Nccl(world)) for gpu in gpus]
        self.ours: list[Communicator] = []
        self.theirs: list[Communicator] = []
        for other in self.devices[1:]:
            unique_id = self.devices[0].unique_id(patient)
            self.ours.append(self.devices[0].communicator(unique_id, 0))
            self.theirs.append(other.communicator(unique_id, 1))

    def wait_ready(self) -> None:
        for comm in (*self.ours, *self.theirs):
            comm.wait_ready(patient)

    def move(self, number: int = 0) -> None:
        """100 bytes from there to here."""
        source, target = data(number, 100), np.zeros(100, np.uint8)
        sending = Running(self.theirs[number], True, source)
        assert Running(self.ours[number], False, target).end() is None
        assert sending.end() is None
        np.testing.assert_array_equal(source, target)

    def receive_in_vain(self, number: int = 0) -> Running:
        """A kernel that waits for a send; it begins before this returns."""
        waiting = self.world.waiting("GPU-0")
        sending = Running(self.theirs[number], True, data(1, 100))  # both connect with it
        running = Running(self.ours[number], False, np.zeros(100, np.uint8))
        eventually(lambda: self.world.waiting("GPU-0") > waiting, "no kernel begins")
        running.other = sending
        return running

    def close(self) -> None:
        for comm in (*self.ours, *self.theirs):
            comm.close()
            comm.close()


class Running(Call):
    """One `Communicator.run`."""

    other: Running | None = None

    def __init__(self, comm: Communicator, send: bool, *arrays: np.ndarray) -> None:
        self.comm, self.arrays = comm, arrays
        self.stop = threading.Event()
        messages = [NcclMove(send, a.ctypes.data, a.nbytes) for a in arrays]
        super().__init__(comm.run, messages, self.watch)

    def watch(self) -> None:
        if self.stop.is_set():
            raise TransferFailed("stopped")

    def give_up(self) -> BaseException | None:
        self.stop.set()
        if self.other is not None:
            self.other.stop.set()
        return self.end()
