"""One two-rank communicator, its stream and its thread, from birth to abort.

    starting --constructed--> ready --work--> ready ...
        |                       |
        +----- any fault, close, idle ----> over   (aborted, never used again)

NCCL blocks where it likes: the constructor until the other rank is there, the first send or receive
until the two are connected, and a kernel on the GPU until the other side does its part. So all of
it happens on one owner thread, and whoever waits for that thread may give up at any time:

- in the constructor: there is nothing to abort yet, and nothing of ours is known to NCCL yet. The
  thread is left behind and aborts what it gets, should it ever come back.
- in a call: aborted from the thread that gives up, which makes the call return.
- on the GPU: the owner thread polls the stream; it aborts.

After an abort the stream is synchronised before `run` raises, so that no kernel of ours writes
anywhere any more. If CUDA cannot even say that, `run` does not return: its caller holds a fence.

An abort also ends what is healthy: unlike `destroy` it does not wait for the other rank.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pullfill.errors import TransferFailed
from pullfill.transfer.nccl.contract import Comm, Gpu, Stream

log = logging.getLogger(__name__)

RANKS = 2
TICK_S = 0.02
"""How often a waiting thread looks at its connection."""
GRACE_S = 0.05
"""The owner thread notices within this that it shall stop, unless it is inside NCCL."""
_PAUSES_S = (20e-6, 500e-6)
_FAST_POLLS = 200


@dataclass(frozen=True, slots=True)
class Message:
    """One send or receive of NCCL: `nbytes` at `address`."""

    send: bool
    address: int
    nbytes: int


@dataclass(slots=True)
class _Work:
    messages: Sequence[Message]
    settled: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Communicator:
    """Made on first use. `run` and `close` by one thread at a time."""

    def __init__(self, gpu: Gpu, unique_id: bytes, rank: int, left_behind: LeftBehind) -> None:
        """Starts the thread. Raises TransferFailed when too many were left behind already."""
        left_behind.check()
        self._gpu = gpu
        self._id = unique_id
        self._peer = RANKS - 1 - rank
        self._rank = rank
        self._left_behind = left_behind
        self._works: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._constructed = threading.Event()
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._mutex = threading.Lock()
        self._inside = False
        self._aborting = threading.Lock()
        self._aborted = False
        self._comm: Comm | None = None
        self._stream: Stream | None = None
        self._thread = threading.Thread(target=self._main, name="kv-nccl", daemon=True)
        self._thread.start()

    @property
    def usable(self) -> bool:
        """No fault so far, and not closed."""
        return not self._stop.is_set() and not self._over.is_set()

    def wait_ready(self, watch: Callable[[], None]) -> None:
        """Until both ranks are there. `watch` is called now and then and raises to give up; then
        the communicator is over. Raises TransferFailed."""
        try:
            while not self._constructed.wait(TICK_S):
                watch()
        except BaseException:
            self._give_up_starting()
            raise
        if self._error is not None:
            raise TransferFailed(f"no NCCL communicator: {self._error}")

    def run(self, messages: Sequence[Message], watch: Callable[[], None]) -> None:
        """Do all of them, in order, as one group. Returns when they are done; raises when nothing
        of them goes on any more, and the communicator is over. Raises TransferFailed."""
        if not self.usable:
            raise TransferFailed("the communicator is over")
        work = _Work(messages)
        self._works.put(work)
        try:
            while not work.settled.wait(TICK_S):
                watch()
        except BaseException:
            self._end()
            work.settled.wait()
            raise
        if work.error is not None:
            self._end()
            raise TransferFailed(f"NCCL failed: {work.error}")

    def close(self) -> None:
        """Abort and end the thread. No `run` is under way. Idempotent."""
        if self._constructed.is_set():
            self._end()
            self._over.wait()
            self._thread.join()
        else:
            self._give_up_starting()

    # ------------------------------------------------------------------ who gives up

    def _give_up_starting(self) -> None:
        self._stop.set()
        self._works.put(None)
        if self._constructed.wait(GRACE_S):
            self._over.wait()
            self._thread.join()
            return
        self._left_behind.add(self._thread)

    def _end(self) -> None:
        """Make the owner thread stop, aborting under it if it is inside NCCL."""
        self._stop.set()
        self._works.put(None)
        if self._over.wait(GRACE_S):
            return
        with self._mutex:
            inside = self._inside
        if inside:
            self._abort()

    def _abort(self) -> None:
        """Exactly once, by whoever comes first; the other one waits."""
        with self._aborting:
            if self._aborted or self._comm is None:
                return
            self._aborted = True
            try:
                self._comm.abort()
            except Exception as exc:
                log.debug("aborting a communicator: %s", exc)

    # ------------------------------------------------------------------ the owner thread

    def _main(self) -> None:
        try:
            self._gpu.activate()
            self._comm = self._gpu.nccl.NcclCommunicator(RANKS, self._id, self._rank)
            self._stream = self._gpu.stream()
        except Exception as exc:
            self._error = exc
            self._stop.set()
        self._constructed.set()
        work: _Work | None = None
        try:
            while not self._stop.is_set():
                work = self._works.get()
                if work is None:
                    break
                self._do(work)
        finally:
            self._finish(work)

    def _do(self, work: _Work) -> None:
        """Settles a work that went well; leaves the others to `_finish`."""
        try:
            self._queue(work)
            self._wait_for_stream()
        except Exception as exc:
            work.error = exc
            self._stop.set()
            return
        work.settled.set()

    def _queue(self, work: _Work) -> None:
        comm, stream, nccl = self._comm, self._stream, self._gpu.nccl
        assert comm is not None
        assert stream is not None
        with self._mutex:
            if self._stop.is_set():
                raise TransferFailed("given up")
            self._inside = True
        try:
            nccl.groupStart()
            try:
                for message in work.messages:
                    move = comm.send if message.send else comm.recv
                    move(message.address, message.nbytes, nccl.NCCL_UINT8, self._peer, stream.ptr)
            finally:
                nccl.groupEnd()
        finally:
            with self._mutex:
                self._inside = False

    def _wait_for_stream(self) -> None:
        assert self._comm is not None
        assert self._stream is not None
        polls = 0
        while not self._stream.done:
            polls += 1
            if self._stop.wait(_PAUSES_S[polls > _FAST_POLLS]):
                raise TransferFailed("given up")
            self._comm.check_async_error()
        if self._stop.is_set():
            raise TransferFailed("given up")

    def _finish(self, work: _Work | None) -> None:
        """Abort; then settle what was under way or still queued, all of it failed."""
        self._stop.set()
        self._abort()
        self._settle_stream()
        error = work.error if work is not None else None
        while work is not None or not self._works.empty():
            if work is not None and not work.settled.is_set():
                work.error = work.error or error or TransferFailed("given up")
                work.settled.set()
            work = None if self._works.empty() else self._works.get()
        self._over.set()

    def _settle_stream(self) -> None:
        if self._stream is not None:
            settle(self._stream.synchronize)
            self._stream.close()


def settle(synchronize: Callable[[], None]) -> None:
    """Wait, for as long as it takes, until nothing runs on a stream. Never raises: who cannot know
    that the GPU is quiet must not let go of a fence."""
    said = False
    while True:
        try:
            return synchronize()
        except Exception as exc:
            if not said:
                log.error("a GPU does not say whether it still writes; waiting: %s", exc)
            said = True
            time.sleep(GRACE_S)


class LeftBehind:
    """Threads still inside a constructor that nobody waits for. Few are normal (a peer died just
    then); many mean that NCCL does not work here."""

    LIMIT = 8

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._threads: list[threading.Thread] = []

    def add(self, thread: threading.Thread) -> None:
        with self._mutex:
            self._threads.append(thread)

    @property
    def count(self) -> int:
        """How many are still there."""
        with self._mutex:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            return len(self._threads)

    def check(self) -> None:
        """Raises TransferFailed when there are too many."""
        if (count := self.count) >= self.LIMIT:
            raise TransferFailed(
                f"{count} NCCL communicators never came up: check NCCL_SOCKET_IFNAME and the "
                "network between the two workers (NCCL_DEBUG=INFO says more)"
            )
