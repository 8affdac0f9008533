"""What carries the payload of the stream protocol: a socket, a communicator, an RDMA agent.

The protocol (`messages.py`) runs on one TCP connection between a peer (prefill worker) and a thread
of the owner (decode worker). It says which blocks move and in which batches, and it holds the
fence: the owner's thread enters the gate, moves one batch, leaves. Only the batches themselves go
through a `Backend`, so a backend knows nothing of blocks, tokens or fences.

Pairing. Each call on one side meets exactly one on the other, in the same order and with the same
number of bytes: `send` there is `receive` here, or `discard` when the owner refuses the batch. How
the bytes are cut into runs differs between the sides. Within a pair a backend may also speak over
the link (say, to name addresses); nobody else uses the link meanwhile.

Life of a backend: `BackendKind.make` on both sides → the two `setup`s are exchanged in hello and
welcome → `start` on both sides (may be collective: it returns when both are there) → moves →
`close`. After anything raised, the session is closed and never used again.

Threads: all calls come from one thread at a time, but `interrupt`, which comes from any thread at
any time after `make`, must not block, and makes a call under way (or `start`) end soon by raising
TransferFailed. After it, or after the peer's death, no call may hang. The owner's proof that
nothing lands any more is that the call has *returned*: a backend must not return, by an exception
either, while the machine may still write into the runs of a `receive`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pullfill.errors import TransferFailed
from pullfill.transfer.contract import LocalMemory


@dataclass(frozen=True, slots=True)
class Runs:
    """One batch as it lies in this side's memory, in the order of the stream.

    iovec: [n, 2] u64, C-contiguous: address, bytes (a `struct iovec[n]`). total: bytes in all, the
    same on both sides. All inside the LocalMemory given to `make`.
    """

    iovec: NDArray[np.uint64]
    total: int


class Interjected(TransferFailed):
    """Raised by a peer's `send` that waited for a word of the owner's backend and heard `frame`
    instead: the owner's answer, because it refused the batch and discarded it. The only error after
    which the backend goes on."""

    def __init__(self, frame: bytes) -> None:
        super().__init__("the owner refused the batch")
        self.frame = frame


class StreamConnection(Protocol):
    """The connection both sides talk over, for backends. Bounded: each call raises TransferFailed
    when the peer is gone or makes no progress for the stall time."""

    @property
    def fd(self) -> int:
        """The socket, blocking, with receive and send timeouts of `stall_s`."""
        ...

    @property
    def stall_s(self) -> float: ...

    def send(self, body: bytes) -> None:
        """One frame, sealed if there is a cluster key."""
        ...

    def receive(self, limit: int = 1 << 20) -> bytes:
        """The next frame of at most `limit` bytes. Also raises BadMessage, AuthFailed."""
        ...


class Backend(Protocol):
    """One side of one connection's payload path. See the module for pairing and threads."""

    @property
    def setup(self) -> bytes:
        """What the other side's `start` gets (at most 64 KiB)."""
        ...

    def start(self, link: StreamConnection, theirs: bytes) -> None:
        """Come up. Raises TransferFailed, BadMessage. `theirs` came over the network."""
        ...

    def send(self, runs: Runs) -> None:
        """Returns when the bytes of `runs` may change again. Raises TransferFailed, Interjected."""
        ...

    def receive(self, runs: Runs) -> None:
        """Returns when all bytes are in `runs` and visible to this process (and to kernels that
        start later). Raises TransferFailed."""
        ...

    def discard(self, nbytes: int) -> None:
        """Take the peer's next `send` and throw it away. Raises TransferFailed; a backend that
        cannot do it always does, and the connection is made anew."""
        ...

    def interrupt(self) -> None: ...

    def close(self) -> None:
        """Give everything back. Idempotent; no call is under way. The link is not the backend's."""
        ...


class BackendKind(Protocol):
    """A payload path as this process knows it; its name is the transport's. One object for all
    connections, thread-safe."""

    name: str
    batch_bytes: int
    """Bytes of a batch that the peer asks for: the fence is held for as long as one takes."""

    def why_not(self) -> str | None:
        """Why this process cannot use it at all (no device, package missing), for people."""
        ...

    def detail(self, memory: LocalMemory) -> str | None:
        """Owner: what a peer must know beforehand, published behind `#` in the endpoint (printable,
        may be empty). None: it does not work for this memory."""
        ...

    def can_reach(self, detail: str) -> str | None:
        """Peer: None, or why an owner with this `detail` (from the network) is out of reach."""
        ...

    def make(self, memory: LocalMemory, *, owner: bool) -> Backend:
        """One side of a new connection over `memory`. Raises TransferFailed, ConfigError."""
        ...

    def close(self) -> None:
        """Give back what is shared by all connections; they are closed already. Idempotent."""
        ...
