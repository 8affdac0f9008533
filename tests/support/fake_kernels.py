"""GPUs of plain memory on which NCCL's kernels run: streams, and messages that meet.

Nothing here has a thread. Groups are launched and kernels run as soon as something changes, also if
nobody asks. Kernels meet first in, first out, without tags. `fake_nccl.py` is the library.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from dataclasses import dataclass, field

RANKS = 2
SUCCESS, REMOTE_ERROR, IN_PROGRESS = 0, 6, 7  # ncclResult_t


@dataclass(eq=False)
class FakeMessage:
    """One half of a transfer."""

    send: bool
    address: int
    nbytes: int
    over: bool = False


@dataclass(eq=False)
class FakePair:
    """Both ranks of one unique id."""

    ranks: dict[int, FakeComm] = field(default_factory=dict)
    waiting: list[tuple[int, FakeMessage]] = field(default_factory=list)
    """Kernels that began and wait for the other side's: who sends, and the message."""


@dataclass(eq=False)
class FakeComm:
    device: str
    pair: FakePair
    rank: int
    blocking: bool
    state: int = IN_PROGRESS
    doing: str = "init"
    """What goes on in the background while `state` is IN_PROGRESS."""
    group: list[tuple[FakeStream, FakeMessage]] = field(default_factory=list)
    connected: bool = False
    revoked: bool = False
    gone: bool = False
    dead: bool = False


class FakeStream:
    """CudaStream."""

    def __init__(self, world: Kernels, device: str) -> None:
        self._world, self.device = world, device
        self.groups: deque[tuple[FakeComm, list[FakeMessage]]] = deque()
        self.running = False
        with world.changed:
            self.handle = world.number()
            world.streams[self.handle] = self

    @property
    def done(self) -> bool:
        # CUDA driver API, cuStreamQuery: CUDA_ERROR_NOT_READY, or the error of earlier work.
        with self._world.changed:
            if self._world.dumb_streams:
                self._world.dumb_streams -= 1
                raise RuntimeError("CUDA does not answer")
            return not self.groups

    def close(self) -> None:
        with self._world.changed:
            assert not self.groups
            del self._world.streams[self.handle]


class Kernels:
    """All streams of a test, and what runs on them. Faults: fake_nccl.py."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.comms: dict[int, FakeComm] = {}
        self.streams: dict[int, FakeStream] = {}
        self.sizes: list[int] = []
        self.most_waiting = 0
        self.hang_issue = self.hang = False
        self.dumb_streams = 0
        self._numbers = 0

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def waiting(self, device: str) -> int:
        """Kernels on that GPU that have begun and not ended."""
        with self.changed:
            return sum(s.running for s in self.streams.values() if s.device == device)

    def _launch(self) -> None:
        """Every group that can be, whether or not anybody asks about its communicator."""
        issuing = [
            comm
            for comm in self.comms.values()
            if comm.doing == "issue" and comm.state == IN_PROGRESS and not comm.revoked
        ]
        if self.hang_issue:
            return
        for comm in issuing:
            # Environment variable NCCL_RUNTIME_CONNECT: the two sides connect with the first
            # operation, so the first group is issued when both have one.
            comm.connected = comm.connected or not comm.dead
        for comm in issuing:
            if not comm.dead and all(other.connected for other in comm.pair.ranks.values()):
                comm.state = SUCCESS
                for stream in {stream for stream, _ in comm.group}:
                    stream.groups.append((comm, [m for s, m in comm.group if s is stream]))
                comm.group = []

    def _run_kernels(self) -> None:
        """As far as they get."""
        self._launch()
        while any([self._run(stream) for stream in list(self.streams.values())]):
            pass
        on_gpus: dict[str, int] = {}
        for stream in self.streams.values():
            on_gpus[stream.device] = on_gpus.get(stream.device, 0) + stream.running
        self.most_waiting = max(self.most_waiting, *on_gpus.values(), 0)
        self.changed.notify_all()

    def _run(self, stream: FakeStream) -> bool:
        """Begin or end the first group of a stream: streams run in order. Whether one ended."""
        if not stream.groups:
            return False
        comm, messages = stream.groups[0]
        waiting = comm.pair.waiting
        if not stream.running:
            stream.running = True
            for message in messages:
                waiting.append((comm.rank if message.send else RANKS - 1 - comm.rank, message))
        if comm.revoked:
            comm.pair.waiting = [entry for entry in waiting if entry[1] not in messages]
        else:
            self._exchange(comm.pair)
            if not all(message.over for message in messages):
                return False
        stream.groups.popleft()
        stream.running = False
        return True

    def _exchange(self, pair: FakePair) -> None:
        if self.hang or any(c.dead or c.state == REMOTE_ERROR for c in pair.ranks.values()):
            return
        for sender in range(RANKS):
            halves: dict[bool, list[FakeMessage]] = {True: [], False: []}
            for rank, message in pair.waiting:
                if rank == sender and not message.over:
                    halves[message.send].append(message)
            for source, target in zip(halves[True], halves[False], strict=False):
                if source.nbytes != target.nbytes:
                    # "ncclSend": the same datatype and count on both sides. Kinder than NCCL.
                    for comm in pair.ranks.values():
                        comm.state = REMOTE_ERROR
                    return
                ctypes.memmove(target.address, source.address, source.nbytes)
                self.sizes.append(source.nbytes)
                source.over = target.over = True
        pair.waiting = [entry for entry in pair.waiting if not entry[1].over]
