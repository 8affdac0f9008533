"""NCCL and its GPUs made of plain memory and threads, with cupy's signatures. For tests.

What is kept of the real one: a constructor that blocks until both ranks are there; sends and
receives that are queued on a stream, run in order on a thread of its own, and meet first in, first
out, without tags; a group that runs its messages side by side; `abort` that ends whatever goes on,
from any thread; a communicator that must not be touched after its abort. What is kinder: a size
mismatch is an error on both sides (NCCL hangs or overwrites), and a use after abort is only noted
(`World.violations`, empty at the end of each test).

Faults: `World.hang_init`, `World.hang` (kernels never finish), `World.block_calls` (a call that
queues does not return), `World.kill(rank)`, `World.dumb_streams` (CUDA does not answer).
"""

from __future__ import annotations

import ctypes
import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.nccl.contract import Addresses

RANKS = 2


class FakeNcclError(RuntimeError):
    pass


@dataclass
class _Pair:
    """Both ranks of one unique id. Everything is guarded by the world's condition."""

    ranks: dict[int, FakeComm] = field(default_factory=dict)
    queues: dict[int, deque[_Message]] = field(default_factory=lambda: {0: deque(), 1: deque()})
    error: str | None = None


@dataclass(eq=False)
class _Message:
    """One half of a transfer, queued under the rank that sends."""

    send: bool
    ptr: int
    nbytes: int
    over: bool = False


class World:
    """All communicators of a test, and its faults."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.pairs: dict[bytes, _Pair] = {}
        self.streams: dict[int, FakeStream] = {}
        self.memory: dict[int, np.ndarray] = {}
        self.alive: set[FakeComm] = set()
        self.constructed = 0
        self.aborts = 0
        self.sizes: list[int] = []
        self.blocked = 0
        self.violations: list[str] = []
        """What would have crashed the process."""
        self.hang_init = False
        self.hang = False
        self.block_calls = False
        self.dumb_streams = 0
        self._numbers = itertools.count(1)
        self._group = threading.local()

    # ------------------------------------------------------------------ the module cupy.cuda.nccl

    NCCL_UINT8 = 1

    def get_unique_id(self) -> bytes:
        return secrets.token_bytes(128)

    def get_version(self) -> int:
        return 23203

    def NcclCommunicator(self, ndev: int, commId: bytes, rank: int) -> FakeComm:
        assert ndev == RANKS
        return FakeComm(self, commId, rank)

    def groupStart(self) -> None:
        self._group.calls = []

    def groupEnd(self) -> None:
        calls: list[tuple[FakeStream, FakeComm, _Message]] = self._group.calls
        self._group.calls = None
        by_stream: dict[FakeStream, list[tuple[FakeComm, _Message]]] = {}
        for stream, comm, message in calls:
            by_stream.setdefault(stream, []).append((comm, message))
        for stream, group in by_stream.items():
            stream.push(group)

    def queue(self, comm: FakeComm, message: _Message, stream: int) -> None:
        """A send or recv: into the group, or a group of its own."""
        with self.changed:
            if comm.aborted:
                self.violations.append("queued on after its abort")
            if self.block_calls:
                self.blocked += 1
                self.changed.wait_for(lambda: not self.block_calls or comm.aborted)
                if comm.aborted:
                    raise FakeNcclError("aborted")
        one = (self.streams[stream], comm, message)
        if getattr(self._group, "calls", None) is not None:
            self._group.calls.append(one)
        else:
            one[0].push([(comm, message)])

    # ------------------------------------------------------------------ faults

    def set(self, **faults: bool | int) -> None:
        with self.changed:
            for name, value in faults.items():
                assert hasattr(self, name)
                setattr(self, name, value)
            self.changed.notify_all()

    def kill(self, rank: int) -> None:
        """The process of that rank dies: it does nothing any more, and nobody is told."""
        with self.changed:
            for pair in self.pairs.values():
                if (comm := pair.ranks.get(rank)) is not None:
                    comm.dead = True
            self.changed.notify_all()


class FakeComm:
    """cupy's NcclCommunicator."""

    def __init__(self, world: World, unique_id: bytes, rank: int) -> None:
        self._world, self._rank = world, rank
        self.aborted = self.dead = False
        with world.changed:
            pair = self._pair = world.pairs.setdefault(unique_id, _Pair())
            pair.ranks[rank] = self
            world.changed.notify_all()
            world.changed.wait_for(lambda: len(pair.ranks) == RANKS and not world.hang_init)
            world.alive.add(self)
            world.constructed += 1

    def send(self, ptr: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._queue(True, ptr, count, datatype, peer, stream)

    def recv(self, ptr: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._queue(False, ptr, count, datatype, peer, stream)

    def check_async_error(self) -> None:
        with self._world.changed:
            if self.aborted:
                self._world.violations.append("asked for errors after its abort")
            if self._pair.error:
                raise FakeNcclError(self._pair.error)

    def abort(self) -> None:
        with self._world.changed:
            if self.aborted:
                self._world.violations.append("aborted twice")
            self.aborted = True
            self._world.aborts += 1
            self._world.alive.discard(self)
            self._world.changed.notify_all()

    def _queue(
        self, send: bool, ptr: int, count: int, datatype: int, peer: int, stream: int
    ) -> None:
        assert datatype == World.NCCL_UINT8
        assert peer == RANKS - 1 - self._rank
        assert count > 0
        self._world.queue(self, _Message(send, ptr, count), stream)

    def post(self, message: _Message) -> None:
        """The kernel of `message` begins; call with `changed` held."""
        sender = self._rank if message.send else RANKS - 1 - self._rank
        waiting = self._pair.queues[sender]
        if self.dead or self._pair.error or self._world.hang:
            return
        other = next((m for m in waiting if m.send != message.send), None)
        if other is None:
            waiting.append(message)
            return
        waiting.remove(other)
        source, target = (message, other) if message.send else (other, message)
        if source.nbytes != target.nbytes:
            self._pair.error = f"sent {source.nbytes} bytes, expected {target.nbytes}"
        else:
            ctypes.memmove(target.ptr, source.ptr, source.nbytes)
            self._world.sizes.append(source.nbytes)
            source.over = target.over = True
        self._world.changed.notify_all()

    def withdraw(self, messages: list[_Message]) -> None:
        """The kernels were aborted; call with `changed` held. The other side's wait on."""
        for queue in self._pair.queues.values():
            for message in messages:
                if message in queue:
                    queue.remove(message)


class FakeStream:
    """Runs groups in order on a thread."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._groups: deque[list[tuple[FakeComm, _Message]]] = deque()
        self._busy = self._closed = False
        self.ptr = next(world._numbers)
        with world.changed:
            world.streams[self.ptr] = self
        self._thread = threading.Thread(target=self._run, name="fake-stream", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        with self._world.changed:
            return not self._groups and not self._busy

    def synchronize(self) -> None:
        with self._world.changed:
            if self._world.dumb_streams:
                self._world.dumb_streams -= 1
                raise FakeNcclError("CUDA does not answer")
            self._world.changed.wait_for(lambda: not self._groups and not self._busy)

    def close(self) -> None:
        with self._world.changed:
            self._closed = True
            self._world.streams.pop(self.ptr, None)
            self._world.changed.notify_all()
        self._thread.join(10)

    def push(self, group: list[tuple[FakeComm, _Message]]) -> None:
        with self._world.changed:
            self._groups.append(group)
            self._world.changed.notify_all()

    def _run(self) -> None:
        changed = self._world.changed
        with changed:
            while True:
                changed.wait_for(lambda: self._groups or self._closed)
                if not self._groups:
                    return
                group = self._groups.popleft()
                self._busy = True
                comm = group[0][0]
                messages = [message for _, message in group]
                for message in messages:
                    comm.post(message)
                changed.wait_for(all_over(comm, messages))
                comm.withdraw(messages)
                self._busy = False
                changed.notify_all()


def all_over(comm: FakeComm, messages: list[_Message]) -> Callable[[], bool]:
    return lambda: comm.aborted or all(message.over for message in messages)


class FakeGpu:
    """contract.Gpu over this process's memory."""

    def __init__(self, world: World, uuid: str) -> None:
        self.nccl = world
        self.uuid = uuid
        self.copies = 0

    def activate(self) -> None:
        pass

    def stream(self) -> FakeStream:
        return FakeStream(self.nccl)

    def copier(self) -> FakeGpu:
        return self

    def copy(self, target: Addresses, source: Addresses, nbytes: Addresses) -> None:
        self.copies += 1
        for t, s, n in zip(target.tolist(), source.tolist(), nbytes.tolist(), strict=True):
            ctypes.memmove(t, s, n)

    def close(self) -> None:
        pass

    def allocate(self, nbytes: int) -> int:
        buffer = np.zeros(nbytes, np.uint8)
        self.nccl.memory[buffer.ctypes.data] = buffer
        return buffer.ctypes.data

    def free(self, address: int) -> None:
        del self.nccl.memory[address]


class FakeGpus:
    """contract.Gpus: memory is on the GPU that its `device` numbers; plain memory is on GPU 0 of
    the owner and GPU 1 of the peer, as both live in one process."""

    def __init__(self, world: World, mine: str = "GPU-0", *, shared: bool = False) -> None:
        self.world = world
        self.gpu = FakeGpu(world, mine)
        self._shared = shared
        self.reason: str | None = None

    def why_not(self) -> str | None:
        return self.reason

    def version(self) -> int:
        return self.world.get_version()

    def shared(self) -> bool:
        return self._shared

    def uuids(self) -> list[str]:
        return [self.gpu.uuid]

    def of(self, memory: LocalMemory) -> FakeGpu | None:
        return self.gpu
