"""libnccl and CUDA streams over plain memory, with the rules of NCCL's manual and of CUDA's. For
tests. The production code runs on it unchanged: same C names, ctypes arguments, result codes.

Nothing here has a thread. Groups are launched and kernels run as soon as something changes, also if
nobody asks. Kernels meet first in, first out, without tags. Each rule says in a comment where the
manual has it; the manual is NVIDIA's "NCCL documentation" 2.30. What breaks a rule and would crash
or hang a process some day, but need not at once, is noted in `World.violations`, empty at the end
of each test.

Faults: `World.hang_init`, `World.hang_issue` (a group stays in progress), `World.hang` (kernels
never finish), `World.kill(device)`, `World.dumb_streams` (CUDA fails to say what a stream does, so
many times), `World.fail(device)` (an error in the background).
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pullfill.transfer.nccl.library import MAGIC, UINT8, UNIQUE_ID_BYTES

RANKS = 2
# ncclResult_t
SUCCESS, REMOTE_ERROR, IN_PROGRESS = 0, 6, 7
CUDA_ERROR, INVALID_ARGUMENT, INVALID_USAGE = 1, 4, 5


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

    def __init__(self, world: World, device: str) -> None:
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


VERSION = 23203


class _Mine(threading.local):
    """What CUDA and NCCL keep of a thread: its device, the group that it has open, its aborts."""

    device: str | None = None
    group: list[tuple[FakeComm, FakeStream, FakeMessage]] | None = None

    def __init__(self) -> None:
        self.aborts: list[FakeComm] = []


class World:
    """libnccl, all communicators and streams of a test, and its faults."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.pairs: dict[bytes, FakePair] = {}
        self.comms: dict[int, FakeComm] = {}
        self.streams: dict[int, FakeStream] = {}
        self.memory: dict[int, np.ndarray] = {}
        self.sizes: list[int] = []
        self.constructed = self.aborts = self.revokes = self.most_waiting = 0
        self.violations: list[str] = []
        self.hang_init = self.hang_issue = self.hang = False
        self.dumb_streams = 0
        self._numbers = 0
        self._mine = _Mine()
        self._inside: dict[str, threading.Thread] = {}
        self._owners: dict[str, threading.Thread] = {}

    # ------------------------------------------------------------------ kernels

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
                    # "ncclSend": the same datatype and count on both sides.
                    self.violations.append(f"{source.nbytes} bytes sent, {target.nbytes} received")
                    return
                ctypes.memmove(target.address, source.address, source.nbytes)
                self.sizes.append(source.nbytes)
                source.over = target.over = True
        pair.waiting = [entry for entry in pair.waiting if not entry[1].over]

    # ------------------------------------------------------------------ faults

    def set(self, **faults: bool | int) -> None:
        with self.changed:
            for name, value in faults.items():
                assert hasattr(self, name)
                setattr(self, name, value)
            self._run_kernels()

    def kill(self, device: str) -> None:
        """The process on that GPU dies: nothing of it moves any more, and nobody is told."""
        with self.changed:
            for comm in self.comms.values():
                comm.dead = comm.dead or comm.device == device
            self._run_kernels()

    def fail(self, device: str) -> None:
        """The network of that GPU's communicators fails."""
        # "Asynchronous errors and error handling": reported by ncclCommGetAsyncError; the
        # operation usually does not progress and never completes.
        with self.changed:
            for comm in self.comms.values():
                if comm.device == device:
                    comm.state = REMOTE_ERROR

    # ------------------------------------------------------------------ rules for threads

    def activate(self, device: str) -> None:
        self._mine.device = device

    @contextmanager
    def _call(self) -> Iterator[str]:
        """Inside NCCL, for the GPU that this thread made current, with `changed` held."""
        # "Thread Safety": it is not safe to issue operations in parallel to communicators on the
        # same device with multiple threads. "Fault Tolerance": no thread is calling any NCCL
        # operation while ncclCommAbort is called.
        me = threading.current_thread()
        with self.changed:
            if (device := self._mine.device) is None:
                self.violations.append("a call on a thread without a device")
                device = "none"
            if device in self._inside:
                self.violations.append(f"two threads inside for {device}")
            owner = self._owners.setdefault(device, me)
            if owner is not me and owner.is_alive():
                self.violations.append(f"{me.name} calls for {device}, which {owner.name} owns")
            self._owners[device] = self._inside[device] = me
            try:
                yield device
            finally:
                self._inside.pop(device, None)

    def _comm(self, handle: Any, device: str, what: str) -> FakeComm | None:
        comm = self.comms.get(handle.value)
        if comm is None or comm.gone:
            # "ncclCommAbort": it frees the communicator.
            self.violations.append(f"{what} after the abort")
            return None
        if comm.device != device:
            self.violations.append(f"{what} for {comm.device} with {device} current")
        return comm

    # ------------------------------------------------------------------ libnccl

    def ncclGetVersion(self, version: Any) -> int:
        version._obj.value = VERSION
        return SUCCESS

    def ncclGetErrorString(self, result: int) -> bytes:
        return {
            CUDA_ERROR: b"unhandled cuda error",
            INVALID_ARGUMENT: b"invalid argument",
            INVALID_USAGE: b"invalid usage",
            REMOTE_ERROR: b"remote process exited or there was a network error",
        }[result]

    def ncclGetLastError(self, comm: Any) -> bytes | None:
        return None

    def ncclGetUniqueId(self, unique_id: Any) -> int:
        with self._call():
            ctypes.memmove(unique_id, secrets.token_bytes(UNIQUE_ID_BYTES), UNIQUE_ID_BYTES)
        return SUCCESS

    def ncclCommInitRankConfig(
        self, comm: Any, nranks: int, unique_id: Any, rank: int, config: Any
    ) -> int:
        said = config._obj
        # "Types", ncclConfig_t: size, magic and version are NCCL_CONFIG_INITIALIZER's.
        if said.magic != MAGIC or said.size != ctypes.sizeof(said) or said.version < 21400:
            return INVALID_ARGUMENT
        with self._call() as device:
            assert nranks == RANKS
            pair = self.pairs.setdefault(bytes(unique_id), FakePair())
            made = pair.ranks[rank] = FakeComm(device, pair, rank, said.blocking != 0)
            comm._obj.value = self.number()
            self.comms[comm._obj.value] = made
            self.changed.notify_all()
            if made.blocking:
                self.violations.append("a blocking communicator")
            # "Creating a communicator with options": with blocking = 0 it returns at once, and the
            # state is ncclInProgress until all ranks are there.
            return IN_PROGRESS

    def ncclCommGetAsyncError(self, comm: Any, state: Any) -> int:
        with self._call() as device:
            if (found := self._comm(comm, device, "ncclCommGetAsyncError")) is None:
                return INVALID_ARGUMENT
            if found.state == IN_PROGRESS:
                self._advance(found)
            state._obj.value = found.state
        return SUCCESS

    def ncclGroupStart(self) -> int:
        self._mine.group = []
        return SUCCESS

    def ncclSend(self, *arguments: Any) -> int:
        return self._queue(True, *arguments)

    def ncclRecv(self, *arguments: Any) -> int:
        return self._queue(False, *arguments)

    def _queue(
        self, send: bool, address: Any, count: Any, datatype: int, peer: int, comm: Any, stream: Any
    ) -> int:
        with self._call() as device:
            if (found := self._comm(comm, device, "a send or receive")) is None:
                return INVALID_ARGUMENT
            if found.state == IN_PROGRESS or found.revoked:
                # "ncclCommGetAsyncError": after ncclInProgress, no other function before the
                # state is ncclSuccess. "ncclCommRevoke": launching returns ncclInvalidUsage.
                self.violations.append(f"queued while {found.doing} goes on, or after a revoke")
                return INVALID_USAGE
            if found.state != SUCCESS:
                # "ncclCommGetAsyncError": after an error, the communicator is to be aborted.
                self.violations.append("queued after an error")
                return found.state
            assert (peer, datatype) == (RANKS - 1 - found.rank, UINT8)
            # "Group Calls": calls inside a group may return without having enqueued anything.
            message = FakeMessage(send, address.value, count.value)
            assert self._mine.group is not None
            self._mine.group.append((found, self.streams[stream.value], message))
        return SUCCESS

    def ncclGroupEnd(self) -> int:
        if self._mine.aborts:
            # Not NCCL's rule but Python's: who waits with the GIL stops the process.
            self.violations.append("a group of aborts ends with the GIL held")
        return self.ncclGroupEndOfAborts()

    def ncclGroupEndOfAborts(self) -> int:
        with self._call() as device:
            group, self._mine.group = self._mine.group, None
            for comm, stream, message in group or ():
                comm.group.append((stream, message))
                comm.state, comm.doing = IN_PROGRESS, "issue"
            self._free(device)
            self._run_kernels()
        # "Nonblocking Group Operation": the kernels are issued to the streams in the background;
        # until the state is ncclSuccess a stream does not know of them.
        return IN_PROGRESS if group else SUCCESS

    def ncclCommRevoke(self, comm: Any, flags: int) -> int:
        with self._call() as device:
            if (found := self._comm(comm, device, "ncclCommRevoke")) is None or flags:
                return INVALID_ARGUMENT
            if found.state == IN_PROGRESS:
                # Source of NCCL 2.30.7, ncclCommEnsureReady: the group's task is freed and used.
                self.violations.append(f"revoked while {found.doing} goes on")
            # "ncclCommRevoke": ends what is in flight, destroys nothing; may be in progress.
            self.revokes += 1
            found.revoked, found.state, found.doing = True, IN_PROGRESS, "revoke"
            return IN_PROGRESS

    def ncclCommAbort(self, comm: Any) -> int:
        with self._call() as device:
            if (found := self._comm(comm, device, "ncclCommAbort")) is None:
                return INVALID_ARGUMENT
            # Source of NCCL 2.30.7, ncclCommAbort: it tells the kernel to stop, then waits for the
            # thread that launches a group. That thread allocates GPU memory, which CUDA may hold up
            # until kernels of others have ended (CUDA C Programming Guide, "Implicit
            # Synchronization").
            found.revoked = True
            self._run_kernels()
            if found.state == IN_PROGRESS and found.doing != "revoke":
                self.changed.wait_for(lambda: not self.waiting(device))
            found.gone = True
            del self.comms[comm.value]
            # Release notes of 2.22 (ncclGroupStart/End for ncclCommAbort): in a group, nothing is
            # freed before the group ends.
            self._mine.aborts.append(found)
            if self._mine.group is None:
                self._free(device)
        return SUCCESS

    def _free(self, device: str) -> None:
        """What the thread has aborted."""
        aborted, self._mine.aborts = self._mine.aborts, []
        if aborted:
            # "Fault Tolerance": all calls but destroy and abort are nonblocking. This one gives
            # device memory back. CUDA C Programming Guide, "Implicit Synchronization"; cudaFree
            # waits for all that runs on the device, also for other communicators' kernels.
            self.changed.wait_for(lambda: not self.waiting(device))
            self.aborts += len(aborted)

    # ------------------------------------------------------------------ in the background

    def _advance(self, comm: FakeComm) -> None:
        """What goes on for a communicator, when it is asked about."""
        both = comm.pair.ranks.values()
        if comm.doing == "init":
            if len(both) == RANKS and not self.hang_init and not any(one.dead for one in both):
                comm.state, self.constructed = SUCCESS, self.constructed + 1
        elif comm.doing == "revoke":
            comm.state = SUCCESS
            self._run_kernels()
