"""GPUs of plain memory for the nccl transport, over the library of `fake_nccl.py`."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np

from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.gpu.cuda import Addresses
from pullfill.transfer.nccl.device import Device
from pullfill.transfer.nccl.nccl_backend import NcclKind
from pullfill.transfer.stream.backends import Backend
from tests.support.fake_kernels import FakeStream
from tests.support.fake_nccl import World


class FakeGpu:
    """CudaGpu over this process's memory."""

    def __init__(self, world: World, uuid: str) -> None:
        self.world, self.uuid = world, uuid
        self.copies = 0
        self.hold = threading.Event()
        """Cleared: copies within the GPU do not end."""
        self.hold.set()

    def library(self) -> World:
        return self.world

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


class FakeGpus:
    """CudaGpus: all memory is on one GPU."""

    def __init__(self, world: World, mine: str = "GPU-0", *, shared: bool = False) -> None:
        self.world = world
        self.gpu = FakeGpu(world, mine)
        gpu: Any = self.gpu
        self.device = Device(gpu)
        self._shared = shared
        self.reason: str | None = None

    def why_not(self) -> str | None:
        return self.reason

    def version(self) -> int:
        return self.device.nccl.version()

    def shared(self) -> bool:
        return self._shared

    def uuids(self) -> list[str]:
        return [self.gpu.uuid]

    def of(self, memory: LocalMemory) -> Device | None:
        return self.device


class PairKind(NcclKind):
    """Both workers of a pair in one process: the owner on GPU-0, the peer on GPU-1."""

    def __init__(self, world: World, **settings: Any) -> None:
        self.gpus = FakeGpus(world)
        ours: Any = self.gpus
        theirs: Any = FakeGpus(world, "GPU-1")
        super().__init__(ours, **settings)
        self.peer = NcclKind(theirs, **settings)
        self.theirs = theirs

    def can_reach(self, detail: str) -> str | None:
        return self.peer.can_reach(detail)

    def make(self, memory: LocalMemory, *, owner: bool) -> Backend:
        return super().make(memory, owner=True) if owner else self.peer.make(memory, owner=False)
