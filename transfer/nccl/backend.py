"""The payload through NCCL: each batch is one group of sends here and receives there.

A batch is cut into messages of `MESSAGE_BYTES` at the same places on both sides. A message that is
contiguous in a side's memory goes straight from or into the KV blocks; the others through memory of
that side's turn (staging.py), gathered or scattered there by one kernel. Neither side needs to know
how the other does it. Both queue their half when both have a turn and the bytes to send are in
place, so that a kernel on either GPU waits for a message on the link and no longer.

A communicator takes time and memory (some 50 MB), so it is made with the first batch, kept while
batches come, and given up when idle or after any fault. The peer decides (`messages.py`): it
lets go first, the owner after twice the time, and a peer that comes in between is told by an error.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from pullfill.errors import BadMessage, ConfigError, PullfillError, TransferFailed
from pullfill.runtime import failpoints
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.idle_resources import Reaper
from pullfill.transfer.nccl.device import Communicator, Device, Gpus
from pullfill.transfer.nccl.library import Message
from pullfill.transfer.nccl.messages import NcclReady, NcclStart, NcclUse
from pullfill.transfer.nccl.staging import Laid
from pullfill.transfer.stream.backend_contract import Backend, Interjected
from pullfill.transfer.stream.batches import Runs
from pullfill.transfer.stream.socket_connection import SocketConnection
from pullfill.wire.codec import decode, encode

log = logging.getLogger(__name__)

IDLE_S = 60.0
MESSAGE_BYTES = 4 << 20
BATCH_BYTES = 32 << 20
OWNER, PEER = 0, 1
M = TypeVar("M", NcclStart, NcclReady)


class _NcclBackend:
    """What both sides share. `_held` is taken for each call; everything below it by the holder."""

    rank: int
    patience = 1

    def __init__(self, device: Device, kind: NcclKind) -> None:
        self._device = device
        self._kind = kind
        self._held = threading.Lock()
        self._stop = threading.Event()
        self._comm: Communicator | None = None
        self._generation = 0
        self._step = kind.message_bytes
        self._used = 0.0
        self._connection: SocketConnection | None = None

    @property
    def setup(self) -> bytes:
        """Which GPU this side is on."""
        return self._device.gpu.uuid.encode()

    def start(self, connection: SocketConnection, theirs: bytes) -> None:
        """See Backend. The communicator waits for the first batch."""
        if theirs == self.setup and not self._kind.shared:
            raise TransferFailed(f"both workers are on the same GPU ({SHARING})")
        self._connection = connection

    def send(self, runs: Runs) -> None:
        """See Backend."""
        with self._call() as comm, self._device.turns.take(self._watch()) as turn:
            laid = Laid(runs, self._step, turn)
            turn.copy(laid.ring, laid.blocks)
            self._meet()
            comm.run([Message(True, *place) for place in laid.places], self._watch())

    def receive(self, runs: Runs) -> None:
        """See Backend. However it ends, no kernel writes into `runs` any more: device.py."""
        with self._call() as comm, self._device.turns.take(self._watch()) as turn:
            laid = Laid(runs, self._step, turn)
            self._meet()
            comm.run([Message(False, *place) for place in laid.places], self._watch())
            turn.copy(laid.blocks, laid.ring)

    def interrupt(self) -> None:
        self._stop.set()
        if self._connection is not None:
            self._connection.interrupt()

    def close(self) -> None:
        self._kind.reaper.forget(self)
        with self._held:
            self._drop()

    def release_if_idle(self, now: float) -> None:
        """See Idle."""
        if not self._held.acquire(blocking=False):
            return
        try:
            idle = now - self._used > self._kind.idle_s * self.patience
            if self._comm is not None and idle:
                log.debug("releasing an idle NCCL communicator")
                self._drop()
        finally:
            self._held.release()

    @contextlib.contextmanager
    def _call(self) -> Iterator[Communicator]:
        with self._held:
            try:
                yield self._agree()
                self._used = time.monotonic()
            except Interjected:
                raise
            except PullfillError:  # also a wrong seal
                self._drop()
                raise
            except Exception as exc:  # of CUDA
                self._drop()
                raise TransferFailed(f"the GPU failed: {exc}") from exc

    def _agree(self) -> Communicator:
        """The communicator of this call, the same on both sides. The two backends below say how."""
        raise NotImplementedError  # this class is only ever a base

    def _meet(self) -> None:
        """Both sides have their turn and their bytes; what they queue now ends soon."""
        raise NotImplementedError

    def _make(self, unique_id: bytes) -> Communicator:
        self._comm = self._device.communicator(unique_id, self.rank)
        self._comm.wait_ready(self._watch())
        self._used = time.monotonic()
        self._kind.reaper.watch(self)
        return self._comm

    def _drop(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.close()

    def _watch(self) -> Callable[[], None]:
        """Raises TransferFailed when it is called after an interrupt, the peer's end, or too
        late."""
        assert self._connection is not None
        stall_s, poll = self._connection.stall_s, select.poll()
        poll.register(self._connection.fd, select.POLLRDHUP)
        until = time.monotonic() + stall_s

        def watch() -> None:
            if self._stop.is_set():
                raise TransferFailed("interrupted")
            if poll.poll(0):
                raise TransferFailed("the peer is gone")
            if time.monotonic() > until:
                raise TransferFailed(f"the peer makes no progress for {stall_s:g} s")

        return watch


class OwnerBackend(_NcclBackend):
    """The decode side: makes the id, posts what the peer announces."""

    rank = OWNER
    patience = 2

    def discard(self, nbytes: int) -> None:
        """See Backend. Nothing is sent: the peer waits for our word and hears the refusal
        instead."""
        with self._held:
            try:
                if self._hear().fresh:
                    self._drop()
            except BaseException:
                self._drop()
                raise

    def _agree(self) -> Communicator:
        assert self._connection is not None
        said = self._hear()
        if said.fresh:
            self._drop()
            self._generation = said.generation
            unique_id = self._device.unique_id(self._watch())
            self._connection.send(encode(NcclStart(unique_id=unique_id)))
            self._make(unique_id)
            said = self._hear()
        if self._comm is None or said.generation != self._generation or not self._comm.usable:
            raise TransferFailed("the communicator was given up here; it is made anew")
        return self._comm

    def _hear(self) -> NcclUse:
        assert self._connection is not None
        said = decode(self._connection.receive(), NcclUse)
        self._step = said.message_bytes
        return said

    def _meet(self) -> None:
        assert self._connection is not None
        self._connection.send(encode(NcclReady()))


class PeerBackend(_NcclBackend):
    """The prefill side: says which communicator, and when there must be a new one."""

    rank = PEER

    def discard(self, nbytes: int) -> None:
        raise TransferFailed("the owner discards, the peer does not")

    def _agree(self) -> Communicator:
        if self._comm is not None and self._comm.usable:
            return self._comm
        self._drop()
        self._generation += 1
        return self._make(self._ask(NcclStart, fresh=True).unique_id)

    def _meet(self) -> None:
        self._ask(NcclReady, fresh=False)
        failpoints.hit("nccl.ready")

    def _ask(self, wanted: type[M], *, fresh: bool) -> M:
        assert self._connection is not None
        use = NcclUse(generation=self._generation, fresh=fresh, message_bytes=self._step)
        self._connection.send(encode(use))
        answer = self._connection.receive()
        try:
            return decode(answer, wanted)
        except BadMessage:
            raise Interjected(answer) from None


SHARING = "NCCL 2.30 allows it with NCCL_MULTI_RANK_GPU_ENABLE=1 on both, older ones never"


class NcclKind:
    """The BackendKind over the GPUs of this process."""

    name = "nccl"

    def __init__(
        self,
        gpus: Gpus,
        *,
        batch_bytes: int = BATCH_BYTES,
        message_bytes: int = MESSAGE_BYTES,
        idle_s: float = IDLE_S,
    ) -> None:
        """batch_bytes, message_bytes: what a peer asks for. idle_s: of the peer; the owner waits
        twice as long."""
        self._gpus = gpus
        self.batch_bytes = batch_bytes
        self.message_bytes = message_bytes
        self.idle_s = idle_s
        self.reaper = Reaper(idle_s / 2)

    @property
    def shared(self) -> bool:
        """Whether two ranks may be on one GPU."""
        return self._gpus.shared()

    def why_not(self) -> str | None:
        """See BackendKind."""
        return self._gpus.why_not()

    def detail(self, memory: LocalMemory) -> str | None:
        """See BackendKind: NCCL's version, the GPU, whether it may be shared. Workers ask for it
        when they start, so it also takes the memory for turns."""
        device = self._gpus.of(memory)
        if device is None:
            return None
        try:
            device.turns.make(self.batch_bytes)
        except TransferFailed as exc:
            log.warning("nccl is not used: %s", exc)
            return None
        return f"{self._gpus.version()}/{device.gpu.uuid}/{int(self.shared)}"

    def can_reach(self, detail: str) -> str | None:
        """See BackendKind. NCCL promises nothing between two versions."""
        version, _, rest = detail.partition("/")
        uuid, _, shared = rest.partition("/")
        if not version.isdecimal() or len(version) > 9:
            return "its nccl endpoint says no version"
        ours = self._gpus.version()
        if int(version) // 100 != ours // 100:
            return (
                f"it has NCCL {_dotted(int(version))}, we have {_dotted(ours)}: "
                "install the same release on both"
            )
        if self._gpus.uuids() == [uuid] and not (self.shared and shared == "1"):
            return f"it is on the same GPU as we are ({SHARING})"
        return None

    def make(self, memory: LocalMemory, *, owner: bool) -> Backend:
        """See BackendKind."""
        device = self._gpus.of(memory)
        if device is None:
            raise ConfigError("nccl moves GPU memory only")
        device.turns.make(self.batch_bytes)
        return (OwnerBackend if owner else PeerBackend)(device, self)

    def close(self) -> None:
        """Turns stay: they are the GPU's."""


def _dotted(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
