"""What carries the payload of the stream protocol: a socket, a communicator, an RDMA agent.

The protocol (`kv_protocol.py`) runs on one TCP connection between a peer and a thread of the owner.
It says which blocks move and in which batches. The owner's thread takes the fence, moves one batch
and lets go of the fence. Only the batches go through a `Backend`, which knows nothing of fences.

Life: `BackendKind.make` on both sides -> hello and welcome exchange the two `setup`s -> `start` on
both sides (it may wait for the other side) -> moves -> `close`. After any exception, and after a
write that the owner refuses, it is closed and never used again.
"""

from __future__ import annotations

import itertools
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from pullfill.errors import BadMessage, TransferFailed
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.runs import Iovec
from pullfill.transfer.stream.kv_protocol import SocketConnection
from pullfill.wire import decode


class Backend(ABC):
    """What one side of one connection moves its batches with.

    link: the connection, which it borrows.
    setup: what the other side's `start` gets. At most 64 KiB.

    Pairing: each `send` on one side meets exactly one `receive` on the other side, in the same
    order and with the same number of bytes, unless the owner refuses the batch. How the bytes are
    cut into runs differs between the sides. Within a pair the two backends may also talk over the
    connection. Nobody else uses the connection meanwhile.

    Threads: one thread at a time makes the calls. `interrupt` comes from any thread, at any time
    after `make`, and the connection is interrupted with it. It must not block. A call under way
    ends soon with TransferFailed. After it, or after the peer's death, no call may hang.

    Proof: that nothing lands any more is proved when the owner's call has *returned*. So a backend
    must not return, and not raise, while the machine may still write into the runs of a `receive`.
    """

    def __init__(self, link: SocketConnection, setup: bytes = b"") -> None:
        self.link, self.setup = link, setup

    def start(self, theirs: bytes) -> None:
        """Get ready to move batches. Raises TransferFailed, BadMessage.

        theirs: the other side's `setup`, from the network."""
        return None

    @abstractmethod
    def send(self, runs: Iovec) -> None:
        """Returns when the bytes of `runs` may change again. Raises TransferFailed."""

    @abstractmethod
    def receive(self, runs: Iovec) -> None:
        """Returns when all bytes are in `runs` and visible to this process (and to kernels that
        start later). Raises TransferFailed."""

    def interrupt(self) -> None:
        return None

    def close(self) -> None:
        """Give everything back, but not the connection. No call is under way. Idempotent."""
        return None


class BackendKind(Protocol):
    """Makes the backends of one transport in this process. Thread-safe.

    name: the transport's.
    batch_bytes: of a batch that a peer asks for. The fence is held for one batch.

    By default it works everywhere, reaches every owner, and shares nothing."""

    name: str
    batch_bytes: int

    def why_not(self) -> str | None:
        """Return, for people, why this process cannot use this kind. None: it can."""
        return None

    def detail(self, memory: LocalMemory) -> str | None:
        """Return what a peer must know before it connects, as printable text. Called by the owner.

        The endpoint carries it after a `#`. None: this kind does not work for this memory."""
        ...

    def can_reach(self, detail: str) -> str | None:
        """Return, for people, why an owner with this `detail` is out of reach. None: it is not.

        Called by the peer. `detail` comes from the network."""
        return None

    def make(self, memory: LocalMemory, link: SocketConnection, *, owner: bool) -> Backend:
        """Return the backend for a new connection: the owner's, or the peer's.

        Raises TransferFailed if it cannot be made, ConfigError if its settings are wrong."""
        ...


class _Resource(Protocol):
    def close(self) -> None: ...


R = TypeVar("R", bound=_Resource)
M = TypeVar("M")


class LazyBackend(Backend, Generic[R]):
    """A backend with a `resource` that is slow to make: an NCCL communicator or a NIXL agent.

    The first batch makes it. It lives until a fault, or until the session ends: a prefill worker
    closes a session that it has not used for 60 s."""

    def __init__(self, link: SocketConnection, setup: bytes = b"") -> None:
        super().__init__(link, setup)
        self.resource: R | None = None
        self._stop = threading.Event()

    def interrupt(self) -> None:
        self._stop.set()

    def close(self) -> None:
        """Close the resource. The next batch makes it anew."""
        resource, self.resource = self.resource, None
        if resource is not None:
            resource.close()

    def _hear(self, wanted: type[M]) -> M:
        """Peer: the next word of the owner's backend. Raises TransferFailed."""
        try:
            return decode(self.link.receive(), wanted)
        except BadMessage as exc:  # the owner refuses the batch
            raise TransferFailed(str(exc)) from None

    def _watch(self, look_every: int = 1) -> Callable[[], None]:
        """A function to call again and again during a wait. It raises TransferFailed after an
        interrupt, when the peer has left, and when the stall time is over.

        look_every: look at the connection and the clock once in so many calls."""
        stall_s, poll = self.link.stall_s, select.poll()
        poll.register(self.link.fd, select.POLLRDHUP)
        until = time.monotonic() + stall_s
        calls = itertools.count(1)

        def watch() -> None:
            if self._stop.is_set():
                raise TransferFailed("interrupted")
            if next(calls) % look_every:
                return
            if poll.poll(0):
                raise TransferFailed("the peer is gone")
            if time.monotonic() > until:
                raise TransferFailed(f"the peer makes no progress for {stall_s:g} s")

        return watch
