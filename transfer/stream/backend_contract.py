"""What carries the payload of the stream protocol: a socket, a communicator, an RDMA agent.

The protocol (`messages.py`) runs on one TCP connection between a peer and a thread of the owner. It
says which blocks move and in which batches. The owner's thread takes the fence, moves one batch and
lets go of the fence. Only the batches go through a `Backend`. So a backend knows nothing of blocks,
tokens or fences.

Pairing. Each call on one side meets exactly one call on the other side, in the same order and with
the same number of bytes: `send` meets `receive`, or `discard` when the owner refuses the batch. How
the bytes are cut into runs differs between the sides. Within a pair the two backends may also talk
over the connection (say, to name addresses). Nobody else uses the connection meanwhile.

Life of a backend: `BackendKind.make` on both sides → hello and welcome exchange the two `setup`s →
`start` on both sides (it may wait for the other side) → moves → `close`. After any exception the
session is closed and never used again.

Threads: one thread at a time makes the calls. `interrupt` comes from any thread, at any time after
`make`. It must not block. It makes a call under way end soon with TransferFailed. After it, or
after the peer's death, no call may hang.

Proof: that nothing lands any more is proved when the owner's call has *returned*. So a backend must
not return, and not raise, while the machine may still write into the runs of a `receive`.
"""

from __future__ import annotations

from typing import Protocol

from pullfill.errors import TransferFailed
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.stream.batches import Runs
from pullfill.transfer.stream.socket_connection import SocketConnection


class Interjected(TransferFailed):
    """Raised by a peer's backend that waited for a word of the owner's backend and received the
    owner's answer instead: the owner refused the batch and discarded it. The only exception after
    which the session goes on.

    frame: the owner's answer."""

    def __init__(self, frame: bytes) -> None:
        super().__init__("the owner refused the batch")
        self.frame = frame


class Backend(Protocol):
    """What one side of one connection moves its batches with.

    setup: what the other side's `start` gets. At most 64 KiB."""

    setup: bytes

    def start(self, connection: SocketConnection, theirs: bytes) -> None:
        """Get ready to move batches. Raises TransferFailed, BadMessage.

        theirs: the other side's `setup`, from the network."""
        ...

    def send(self, runs: Runs) -> None:
        """Returns when the bytes of `runs` may change again. Raises TransferFailed, Interjected."""
        ...

    def receive(self, runs: Runs) -> None:
        """Returns when all bytes are in `runs` and visible to this process (and to kernels that
        start later). Raises TransferFailed."""
        ...

    def discard(self, nbytes: int) -> None:
        """Owner: take the peer's next `send` and throw it away. Raises TransferFailed. A backend
        that cannot discard always raises it; then the peer connects anew."""
        raise TransferFailed("this backend discards nothing")

    def interrupt(self) -> None: ...

    def close(self) -> None:
        """Give everything back, but not the connection. No call is under way. Idempotent."""
        ...


class BackendKind(Protocol):
    """Makes the backends of one transport in this process. Thread-safe.

    name: the transport's.
    batch_bytes: of a batch that a peer asks for. The fence is held for one batch.

    By default it works everywhere, reaches every owner, and shares nothing."""

    name: str
    batch_bytes: int

    def why_not(self) -> str | None:
        """For people: why this process cannot use it (no device, package missing). None: it can."""
        return None

    def detail(self, memory: LocalMemory) -> str | None:
        """Owner: what a peer must know before it connects, printable. It is published in the
        endpoint, behind a `#`. None: it does not work for this memory."""
        ...

    def can_reach(self, detail: str) -> str | None:
        """Peer: why an owner with this `detail` (from the network) is out of reach, for people.
        None: it can be reached."""
        return None

    def make(self, memory: LocalMemory, *, owner: bool) -> Backend:
        """The backend of one side of a new connection. Raises TransferFailed, ConfigError."""
        ...

    def close(self) -> None:
        """Give back what all connections share. They are closed already. Idempotent."""
        return None
