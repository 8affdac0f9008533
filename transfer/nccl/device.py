"""All NCCL calls of one GPU, on one thread: communicators of two ranks, from making to abort.

making --both there--> idle --run--> issuing --on the stream--> running --done--> idle
  |                     |               |                          | fault, given up
  |                     |               |                       revoking
  | fault, given up     | closed        | fault, given up          | nothing runs any more
  +---------------------+---------------+--------> dead <----------+
                                                    | nothing else runs on the GPU
                                                   freed
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Sequence

from pullfill.errors import TransferFailed
from pullfill.transfer.gpu.cuda import CudaStream
from pullfill.transfer.nccl.gpu_turns import TICK_S, CudaGpu, Turns
from pullfill.transfer.nccl.library import RANKS, Nccl, NcclMove

log = logging.getLogger(__name__)

# While so many communicators wait to be freed, no new group begins.
DEAD = 4
_FAST_POLLS = 200


class State(enum.Enum):
    MAKING = enum.auto()
    IDLE = enum.auto()
    ISSUING = enum.auto()
    RUNNING = enum.auto()
    REVOKING = enum.auto()
    DEAD = enum.auto()
    FREED = enum.auto()


_ON_THE_GPU = (State.ISSUING, State.RUNNING, State.REVOKING)


class Communicator:
    """One side of one pair. One thread at a time calls `wait_ready`, `run` and `close`."""

    def __init__(self, device: Device, unique_id: bytes, rank: int) -> None:
        self._device = device
        self.unique_id, self.rank = unique_id, rank
        # Set when the communicator is made, or has failed.
        self.ready = threading.Event()
        # Set when the GPU does nothing more with `messages`, whether they arrived or not.
        self.settled = threading.Event()
        self.given_up = threading.Event()
        self.error: Exception | None = None
        # What follows belongs to the owner thread; `run` hands it `messages` while it is idle.
        self.unsure = False
        self.state = State.MAKING
        self.messages: Sequence[NcclMove] | None = None
        self.comm: int | None = None
        self.stream: CudaStream | None = None

    @property
    def usable(self) -> bool:
        """No fault so far, and not closed."""
        return self.error is None and not self.given_up.is_set()

    def wait_ready(self, watch: Callable[[], None]) -> None:
        """Wait until both ranks are there. Raises TransferFailed; then the communicator is over.

        watch: called every TICK_S. It raises to give up.
        """
        self._wait(self.ready, watch)
        if self.error is not None:
            raise TransferFailed(f"no NCCL communicator: {self.error}")

    def run(self, messages: Sequence[NcclMove], watch: Callable[[], None]) -> None:
        """Send and receive all messages, in order, as one group. Returns when they have arrived.

        watch: called every TICK_S. It raises to give up.

        Raises TransferFailed, and what `watch` raised. The GPU does nothing more with the messages
        then, and the communicator is over.
        """
        if not self.usable:
            raise TransferFailed("the communicator is over")
        self.settled.clear()
        self.messages = messages
        self._device.wake()
        try:
            self._wait(self.settled, watch)
        except BaseException:
            # Until the kernel has ended, or was never launched and the communicator is gone. While
            # CUDA cannot tell, this does not return, because the caller holds a fence.
            self.settled.wait()
            raise
        if self.error is not None:
            raise TransferFailed(f"NCCL failed: {self.error}")

    def close(self) -> None:
        """Ask for its end, and return at once. It is freed later, when nothing else runs on the
        GPU. Idempotent."""
        self.given_up.set()
        self._device.wake()

    def _wait(self, event: threading.Event, watch: Callable[[], None]) -> None:
        try:
            self._device.wait(event, watch)
        except BaseException:
            self.close()
            raise


class Device:
    """One GPU: its turns, and its owner thread. There is one per GPU and process, for as long as
    the process lives. Thread-safe."""

    # NCCL's manual forbids calls for one GPU from two threads at once ("Thread Safety"). It allows
    # an abort only while no other thread is in a call ("Fault Tolerance"). So sessions never call
    # NCCL. They leave a request at their communicator. The GPU's owner thread does what is asked,
    # and polls every communicator until it is idle. All communicators are nonblocking, so its calls
    # do not wait for other workers.
    #
    # An abort is the exception. It frees GPU memory, and that waits for every kernel on the GPU,
    # also for one that waits for a dead worker. Only the owner thread could stop that kernel. So a
    # running transfer is first *revoked*, which stops its kernel and frees nothing. The abort comes
    # when nothing else runs. No new group begins while a `run` waits for an abort, or while `DEAD`
    # communicators wait.

    def __init__(self, gpu: CudaGpu, nccl: Nccl) -> None:
        self.gpu, self.nccl = gpu, nccl
        # By rank: see gpu_turns.py.
        self.turns = tuple(Turns(gpu) for _ in range(RANKS))
        self._changed = threading.Condition()
        self._asked: list[Callable[[], None]] = []
        self._comms: list[Communicator] = []
        self._polls = 0
        self._thread = threading.Thread(target=self._main, name="kv-nccl", daemon=True)
        self._thread.start()

    def communicator(self, unique_id: bytes, rank: int) -> Communicator:
        """Begin to make a communicator."""
        made = Communicator(self, unique_id, rank)
        self._ask(lambda: self._comms.append(made))
        return made

    def unique_id(self, watch: Callable[[], None]) -> bytes:
        """The id under which both ranks of a new communicator meet. Raises TransferFailed.

        watch: called every TICK_S. It raises to give up.
        """
        answered = threading.Event()
        answer: list[bytes | Exception] = []

        def ask() -> None:
            try:
                self.gpu.activate()
                answer.append(self.nccl.unique_id())
            except Exception as exc:
                answer.append(exc)
            answered.set()

        self._ask(ask)
        self.wait(answered, watch)
        if isinstance(answer[0], Exception):
            raise TransferFailed(f"no NCCL communicator: {answer[0]}") from answer[0]
        return answer[0]

    def wake(self) -> None:
        """Let the owner thread look at its communicators now."""
        self._ask(lambda: None)

    def _ask(self, do: Callable[[], None]) -> None:
        with self._changed:
            self._asked.append(do)
            self._changed.notify_all()

    def wait(self, event: threading.Event, watch: Callable[[], None]) -> None:
        """Wait for what the owner thread does. Raises TransferFailed if it has died.

        watch: called every TICK_S. It raises to give up."""
        while not event.wait(TICK_S):
            watch()
            if not self._thread.is_alive():
                raise TransferFailed(
                    "the thread that makes this GPU's NCCL calls has died (see the log); "
                    "restart this worker"
                )

    # ------------------------------------------------------------------ the owner thread

    def _main(self) -> None:
        try:
            while True:
                self._serve()
        except BaseException:  # a bug; `wait` tells whoever waits
            log.critical("the thread that makes a GPU's NCCL calls has died", exc_info=True)

    def _serve(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._asked, self._pause())
            asked, self._asked = self._asked, []
        self._polls = 0 if asked else self._polls + 1
        for do in asked:
            do()
        for comm in self._comms:
            try:
                self._step(comm)
            except Exception as exc:
                self._fail(comm, exc)
        self._bury()
        self._comms = [comm for comm in self._comms if comm.state is not State.FREED]

    def _pause(self) -> float | None:
        """How long until the next poll. None: nothing changes by itself."""
        if all(comm.state is State.IDLE and comm.messages is None for comm in self._comms):
            return None
        return 20e-6 if self._polls <= _FAST_POLLS else 500e-6

    def _step(self, comm: Communicator) -> None:
        """Bring one communicator forward. Whatever it raises is a fault of this communicator."""
        if comm.state is State.DEAD:
            return
        if comm.given_up.is_set() and comm.state is not State.REVOKING:
            raise TransferFailed("given up")
        if comm.comm is None:
            self.gpu.activate()
            comm.stream = comm.stream or self.gpu.stream()
            comm.comm, error = self.nccl.init(comm.unique_id, comm.rank)
            if error is not None:
                raise error
        assert comm.comm is not None
        match comm.state:
            case State.MAKING:
                if not self.nccl.busy(comm.comm):
                    comm.state = State.IDLE
                    comm.ready.set()
            case State.IDLE:
                if comm.messages is not None and not self._somebody_waits_to_be_freed():
                    assert comm.stream is not None
                    self.nccl.busy(comm.comm)  # raises what has failed while it was idle
                    comm.state = State.ISSUING
                    peer = RANKS - 1 - comm.rank
                    self.nccl.issue(comm.comm, comm.messages, peer, comm.stream.handle)
            case State.ISSUING:
                if not self.nccl.busy(comm.comm):
                    comm.state = State.RUNNING
            case State.RUNNING:
                quiet = self._is_quiet(comm)
                # Raises what went wrong in the background. Then nothing is known about the bytes,
                # also if the stream is done (NCCL's manual, "ncclCommGetAsyncError").
                self.nccl.busy(comm.comm)
                if quiet:
                    self._settle(comm, State.IDLE)
            case State.REVOKING:
                if not self.nccl.busy(comm.comm) and self._is_quiet(comm):
                    self._settle(comm, State.DEAD)

    def _fail(self, comm: Communicator, exc: Exception) -> None:
        if comm.error is None:
            comm.error = exc
            log.debug("a communicator is over: %s", exc)
        match comm.state:
            case State.RUNNING:
                comm.state = State.REVOKING
                try:
                    assert comm.comm is not None
                    self.nccl.revoke(comm.comm)
                except TransferFailed as worse:
                    log.warning("NCCL does not end a transfer, aborting: %s", worse)
                    comm.state = State.DEAD
            case State.REVOKING if self._is_quiet(comm):  # what failed may be what was revoked
                self._settle(comm, State.DEAD)
            case State.REVOKING:
                log.warning("NCCL does not end a transfer, aborting: %s", exc)
                comm.state = State.DEAD
            case State.MAKING | State.IDLE:  # nothing was queued
                self._settle(comm, State.DEAD)
            case State.ISSUING:  # nobody knows what was queued
                comm.state = State.DEAD
        comm.ready.set()

    def _settle(self, comm: Communicator, state: State) -> None:
        comm.state, comm.messages = state, None
        comm.settled.set()

    def _is_quiet(self, comm: Communicator) -> bool:
        """Whether the stream is done. When CUDA fails to say it, a running transfer has failed, and
        the exception is raised. Any other stream counts as not done."""
        assert comm.stream is not None
        try:
            return comm.stream.done
        except Exception as exc:
            if comm.state is State.RUNNING:
                raise
            if not comm.unsure:
                log.error("a GPU does not say whether it still writes; waiting: %s", exc)
            comm.unsure = True
            return False

    def _somebody_waits_to_be_freed(self) -> bool:
        dead = [comm for comm in self._comms if comm.state is State.DEAD]
        return len(dead) >= DEAD or any(comm.messages is not None for comm in dead)

    def _bury(self) -> None:
        """Free the dead communicators when nothing else runs on this GPU."""
        if any(comm.state in _ON_THE_GPU for comm in self._comms):
            return
        dead = [comm for comm in self._comms if comm.state is State.DEAD]
        # A group that was given up while it was `issuing` cannot be revoked, and NCCL may still
        # launch it. So all are aborted together, in one group of NCCL's. The group stops all their
        # kernels before it frees anything.
        # Launched groups first: to abort one that is not means to wait for its launch, and CUDA may
        # hold up a launch until running kernels have ended.
        dead.sort(key=self._still_launching)
        handles = [comm.comm for comm in dead if comm.comm is not None]
        for comm in dead:
            comm.comm = None
        if handles:
            try:
                self.nccl.abort(handles)
            except TransferFailed as exc:
                log.warning("NCCL could not free a communicator: %s", exc)
        for comm in dead:
            if comm.stream is None or self._is_quiet(comm):
                if comm.stream is not None:
                    try:
                        comm.stream.close()
                    except Exception as exc:  # the thread must go on: others wait for it
                        log.warning("a stream could not be destroyed: %s", exc)
                self._settle(comm, State.FREED)

    def _still_launching(self, comm: Communicator) -> bool:
        try:
            return comm.comm is not None and self.nccl.busy(comm.comm)
        except TransferFailed:
            return False
