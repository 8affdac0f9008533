"""The payload through NCCL: each batch is one group of sends here and receives there.

Both sides cut a batch into messages of `MESSAGE_BYTES`, at the same places. A message that is
contiguous in a side's memory goes straight from or into its KV blocks. The others go through memory
of that side's turn (gpu_turns.py): one kernel gathers or scatters them there.

The peer decides when the communicator is made (`NcclUse`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from functools import cache
from typing import Annotated, TypeVar

from msgspec import Meta

from pullfill.errors import BadMessage, PullfillError, TransferFailed
from pullfill.runtime import failpoints
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.gpu.copies import visible
from pullfill.transfer.gpu.cuda import load, why_no_cuda
from pullfill.transfer.nccl import library
from pullfill.transfer.nccl.device import Communicator, Device
from pullfill.transfer.nccl.gpu_turns import CudaGpu, Laid
from pullfill.transfer.nccl.library import NcclMove, setting
from pullfill.transfer.runs import Iovec
from pullfill.transfer.stream.backends import (
    Backend,
    BackendKind,
    LazyBackend,
)
from pullfill.transfer.stream.kv_protocol import SocketConnection
from pullfill.wire.codec import WIRE_VERSION, Count, Message, Version, decode, encode

log = logging.getLogger(__name__)

MESSAGE_BYTES = 4 << 20
BATCH_BYTES = 32 << 20
OWNER, PEER = 0, 1
_SHARING_FROM = 23000
SHARING = "NCCL 2.30 allows it with NCCL_MULTI_RANK_GPU_ENABLE=1 on both, older ones never"


class NcclUse(Message, tag="nccl_use", frozen=True, kw_only=True):
    """Announces the next batch.

    generation: of no use. Older builds compare it with that of the batch before.
    fresh: make the communicator of this connection now. When it is there, the peer announces the
        batch again.
    message_bytes: of each message. The last one has what is left.
    """

    v: Version = WIRE_VERSION
    generation: Count = 1
    fresh: bool = False
    message_bytes: Annotated[int, Meta(ge=4 << 10, le=64 << 20)]


class NcclStart(Message, tag="nccl_start", frozen=True, kw_only=True):
    """The id under which both sides make the communicator now. The owner is rank 0."""

    v: Version = WIRE_VERSION
    unique_id: Annotated[bytes, Meta(min_length=1, max_length=256)]


class NcclReady(Message, tag="nccl_ready", frozen=True, kw_only=True):
    """The owner queues its half of the batch now. So does the peer, when it hears this."""

    v: Version = WIRE_VERSION


T = TypeVar("T", NcclStart, NcclReady)


@cache
def nccl() -> library.Nccl:
    """This process's libnccl. Raises TransferFailed."""
    return library.Nccl(library.load())


# A communicator takes time to make and some 50 MB. It is made with the first batch of a connection,
# and given up with it.
class _NcclBackend(LazyBackend[Communicator]):
    """What both sides share."""

    rank: int

    def __init__(self, link: SocketConnection, device: Device, kind: NcclKind) -> None:
        # The other side learns which GPU this side is on.
        super().__init__(link, device.gpu.uuid.encode())
        self._device = device
        self._turns = device.turns[self.rank]
        self._kind = kind
        self._step = kind.message_bytes

    def start(self, theirs: bytes) -> None:
        if theirs == self.setup and not self._kind.shared:
            raise TransferFailed(f"both workers are on the same GPU ({SHARING})")

    def send(self, runs: Iovec) -> None:
        with self._call() as comm, self._turns.take(self._watch()) as turn:
            laid = Laid(runs, self._step, turn)
            turn.copy(laid.ring, laid.blocks)
            self._meet()
            comm.run([NcclMove(True, *place) for place in laid.places], self._watch())

    def receive(self, runs: Iovec) -> None:
        """See Backend. However it ends, no kernel writes into `runs` any more: device.py."""
        with self._call() as comm, self._turns.take(self._watch()) as turn:
            laid = Laid(runs, self._step, turn)
            self._meet()
            comm.run([NcclMove(False, *place) for place in laid.places], self._watch())
            turn.copy(laid.blocks, laid.ring)

    @contextlib.contextmanager
    def _call(self) -> Iterator[Communicator]:
        try:
            yield self._agree()
        except PullfillError:  # also a wrong seal
            self.close()
            raise
        except Exception as exc:  # of CUDA
            self.close()
            raise TransferFailed(f"the GPU failed: {exc}") from exc

    def _agree(self) -> Communicator:
        """The communicator of this call, the same on both sides."""
        raise NotImplementedError

    def _meet(self) -> None:
        """Wait until both sides have a turn and the bytes to send are in place.

        So a kernel waits for a message on the link, and for nothing else."""
        raise NotImplementedError

    def _make(self, unique_id: bytes) -> Communicator:
        self.resource = self._device.communicator(unique_id, self.rank)
        self.resource.wait_ready(self._watch())
        return self.resource


class NcclOwner(_NcclBackend):
    """The decode worker's side: makes the id, and posts what the peer announces."""

    rank = OWNER

    def _agree(self) -> Communicator:
        if self._announced().fresh:
            self.close()
            unique_id = self._device.unique_id(self._watch())
            self.link.send(encode(NcclStart(unique_id=unique_id)))
            self._make(unique_id)
            self._announced()
        if self.resource is None:
            raise BadMessage("a batch before its communicator")
        return self.resource

    def _announced(self) -> NcclUse:
        said = decode(self.link.receive(), NcclUse)
        self._step = said.message_bytes
        return said

    def _meet(self) -> None:
        self.link.send(encode(NcclReady()))


class NcclPeer(_NcclBackend):
    """The prefill worker's side: says when the communicator must be made."""

    rank = PEER

    def _agree(self) -> Communicator:
        return self.resource or self._make(self._ask(NcclStart, fresh=True).unique_id)

    def _meet(self) -> None:
        self._ask(NcclReady, fresh=False)
        failpoints.hit("nccl.ready")

    def _ask(self, wanted: type[T], *, fresh: bool) -> T:
        self.link.send(encode(NcclUse(fresh=fresh, message_bytes=self._step)))
        return self._hear(wanted)


class NcclKind(BackendKind):
    """Over the GPUs of this process. One for the process, because a GPU has one `Device`."""

    name = "nccl"

    def __init__(
        self, *, batch_bytes: int = BATCH_BYTES, message_bytes: int = MESSAGE_BYTES
    ) -> None:
        """batch_bytes, message_bytes: what a peer asks for."""
        self.batch_bytes = batch_bytes
        self.message_bytes = message_bytes
        self._devices: dict[int, Device] = {}
        self._mutex = threading.Lock()

    def why_not(self) -> str | None:
        if (reason := why_no_cuda() or library.blocking_forced()) is not None:
            return reason
        try:
            nccl()
        except TransferFailed as exc:
            return str(exc)
        return None

    def version(self) -> int:
        """NCCL's, as NCCL writes it: 22903 is 2.29.3."""
        return nccl().version()

    @property
    def shared(self) -> bool:
        """Whether two ranks may be on one GPU."""
        value, _ = setting("NCCL_MULTI_RANK_GPU_ENABLE")
        return value == "1" and self.version() >= _SHARING_FROM

    def uuids(self) -> list[str]:
        """Of the GPUs of this process."""
        return list(visible(load()))

    def device_of(self, memory: LocalMemory) -> Device | None:
        """The GPU that holds `memory`, the same object each time. None: it is not on a GPU."""
        number = memory.device
        if number is None:
            return None
        with self._mutex:
            if number not in self._devices:
                self._devices[number] = Device(CudaGpu(number), nccl())
            return self._devices[number]

    def detail(self, memory: LocalMemory) -> str | None:
        """See BackendKind: NCCL's version, the GPU, whether it may be shared."""
        device = self.device_of(memory)
        if device is None:
            return None
        try:
            # Workers ask for the detail when they start: the time to take the memory for turns.
            for turns in device.turns:
                turns.make(self.batch_bytes)
        except TransferFailed as exc:
            log.warning("nccl is not used: %s", exc)
            return None
        return f"{self.version()}/{device.gpu.uuid}/{int(self.shared)}"

    def can_reach(self, detail: str) -> str | None:
        """See BackendKind. NCCL promises nothing between two versions."""
        version, _, rest = detail.partition("/")
        uuid, _, shared = rest.partition("/")
        if not version.isdecimal() or len(version) > 9:
            return "its nccl endpoint says no version"
        ours = self.version()
        if int(version) // 100 != ours // 100:
            return (
                f"it has NCCL {_dotted(int(version))}, we have {_dotted(ours)}: "
                "install the same release on both"
            )
        if self.uuids() == [uuid] and not (self.shared and shared == "1"):
            return f"it is on the same GPU as we are ({SHARING})"
        return None

    def make(self, memory: LocalMemory, link: SocketConnection, *, owner: bool) -> Backend:
        device = self.device_of(memory)
        assert device is not None  # else it has no `detail`
        device.turns[OWNER if owner else PEER].make(self.batch_bytes)
        return (NcclOwner if owner else NcclPeer)(link, device, self)


def _dotted(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


@cache
def make_kind() -> NcclKind:
    """The transport of this process. Its `why_not` says what is missing."""
    return NcclKind()
