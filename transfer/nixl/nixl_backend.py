"""The payload through NIXL. The owner always starts the transfer: it reads the peer's memory for a
write operation, and writes into it for a read. So the owner knows when nothing moves any more.

For each batch the peer says where its bytes are (`NixlRuns`). Then it lets UCX make progress
until the owner says that the bytes have moved. Nothing runs between batches.

An agent is made at the first batch of a connection, and closed with it.
"""

from __future__ import annotations

import time
from typing import Annotated

import numpy as np
from msgspec import Meta

from pullfill.errors import BadMessage
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.nixl import agent as nixl
from pullfill.transfer.nixl.agent import Agent, pause
from pullfill.transfer.runs import Iovec, pairs, size_of
from pullfill.transfer.stream.backends import Backend, BackendKind, LazyBackend
from pullfill.transfer.stream.kv_protocol import SocketConnection
from pullfill.wire.codec import WIRE_VERSION, Count, Message, Version, decode, encode

MAX_METADATA = 1 << 20
# Bytes of a run list: half a million runs.
MAX_RUNS = 8 << 20
MAX_FRAME = MAX_METADATA + MAX_RUNS + 4096
# Pauses between two looks at the connection while waiting.
_LOOK_EVERY = 64


class NixlRuns(Message, tag="nixl_runs", frozen=True, kw_only=True):
    """Where the peer's bytes of a batch are.

    generation: of no use. Older builds compare it with that of the batch before.
    metadata: of the peer's agent, with the first batch of a connection.
    device: that holds the peer's memory. -1: the CPU.
    iovec: pairs of little-endian u64, address and bytes.
    """

    v: Version = WIRE_VERSION
    generation: Count = 1
    metadata: Annotated[bytes, Meta(max_length=MAX_METADATA)] = b""
    device: Annotated[int, Meta(ge=-1, le=1023)] = -1
    iovec: Annotated[bytes, Meta(max_length=MAX_RUNS)]


class NixlMoved(Message, tag="nixl_moved", frozen=True, kw_only=True):
    """The owner is done with the batch."""

    v: Version = WIRE_VERSION


class NixlOwner(LazyBackend[Agent]):
    """The owner's side: starts every transfer."""

    def __init__(self, link: SocketConnection, memory: LocalMemory) -> None:
        super().__init__(link)
        self._memory = memory

    def send(self, runs: Iovec) -> None:
        self._move("WRITE", runs)

    def receive(self, runs: Iovec) -> None:
        """See Backend. However it ends, nothing lands in `runs` afterwards: see `agent.py`."""
        self._move("READ", runs)

    def _move(self, verb: str, runs: Iovec) -> None:
        said = decode(self.link.receive(MAX_FRAME), NixlRuns)
        theirs = _checked(said, size_of(runs))
        try:
            if self.resource is None:
                if not said.metadata:
                    raise BadMessage("a new NIXL agent without its metadata")
                self.resource = Agent(self._memory)
                self.resource.connect(said.metadata)
            ours, there = pairs(runs, theirs)
            self.resource.move(verb, ours, there, said.device, self._watch(_LOOK_EVERY))
        except BaseException:
            self.close()
            raise
        self.link.send(encode(NixlMoved()))


class NixlPeer(LazyBackend[Agent]):
    """The peer's side: names its memory, and lets UCX make progress until the owner is done."""

    def __init__(self, link: SocketConnection, memory: LocalMemory) -> None:
        super().__init__(link)
        self._memory = memory

    def send(self, runs: Iovec) -> None:
        """Name the bytes of a batch, and wait until the owner has moved them."""
        metadata = b""
        if self.resource is None:
            self.resource = Agent(self._memory)
            metadata = self.resource.metadata
        said = NixlRuns(
            metadata=metadata,
            device=-1 if self._memory.device is None else self._memory.device,
            iovec=runs.astype("<u8").tobytes(),
        )
        self.link.send(encode(said))
        self._help(self.resource)
        self._hear(NixlMoved)

    # The owner does the same to receive. After a fault the session closes this backend before its
    # move raises, and the closed agent takes the memory away from the owner.
    receive = send

    def _help(self, agent: Agent) -> None:
        """Let UCX answer the owner until the owner says something or leaves."""
        began, watch = time.monotonic(), self._watch(_LOOK_EVERY)
        while not self.link.input_waits():
            watch()
            agent.progress()
            pause(began)


def _checked(said: NixlRuns, total: int) -> Iovec:
    """The peer's runs. Raises BadMessage unless they have `total` bytes. NIXL checks against the
    peer's metadata whether they are in its memory."""
    if len(said.iovec) % 16 or not said.iovec:
        raise BadMessage("not a list of runs")
    theirs = np.frombuffer(said.iovec, "<u8").reshape(-1, 2).astype(np.uint64)
    lengths = theirs[:, 1]
    if int(lengths.min()) < 1 or int(lengths.max()) > total or int(lengths.sum()) != total:
        raise BadMessage(f"the peer's runs are not {total} bytes in all")
    return theirs


class NixlKind(BackendKind):
    """Backends of one process share nothing."""

    name = "nixl"
    # Small, because over shared memory NIXL copies a batch itself, and holds the GIL meanwhile.
    batch_bytes = 4 << 20

    def why_not(self) -> str | None:
        return nixl.why_not()

    def detail(self, memory: LocalMemory) -> str | None:
        """See BackendKind: NIXL's version. Agents of two versions may not understand each other."""
        return nixl.version()

    def can_reach(self, detail: str) -> str | None:
        ours = nixl.version()
        if detail != ours:
            return f"it has NIXL {detail[:32] or 'of no version'}, we have {ours}"
        return None

    def make(self, memory: LocalMemory, link: SocketConnection, *, owner: bool) -> Backend:
        return (NixlOwner if owner else NixlPeer)(link, memory)
