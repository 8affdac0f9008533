"""The payload through NIXL. The owner always starts the transfer: it reads the peer's memory for a
write operation, and writes into it for a read. So the owner knows when nothing moves any more.

For each batch the peer says where its bytes are (`messages.py`). Then it lets UCX make progress
until the owner says that the bytes have moved. Nothing runs between batches.

An agent is made at the first batch, dropped when idle or after any fault, and made again when
needed. The peer counts its agents (`generation`), and sends an agent's metadata with the agent's
first batch. When the owner meets a new agent of the peer it drops its own too, so that no NIXL
connection outlives the agent at its other end.
"""

from __future__ import annotations

import logging
import select
import threading
import time

import numpy as np

from pullfill.errors import BadMessage, TransferFailed
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.idle_resources import Reaper
from pullfill.transfer.nixl import agent as nixl
from pullfill.transfer.nixl.agent import Agent, Pauses
from pullfill.transfer.nixl.messages import MAX_FRAME, NixlMoved, NixlRuns
from pullfill.transfer.stream.backend_contract import Backend, Interjected
from pullfill.transfer.stream.batches import Iovec, Runs, pairs
from pullfill.transfer.stream.socket_connection import SocketConnection
from pullfill.wire.codec import decode, encode

log = logging.getLogger(__name__)

IDLE_S = 60.0
_LOOK_EVERY = 64
"""Pauses between two looks at the connection while waiting."""


class _NixlBackend:
    """What both sides share: an agent that comes and goes. Each call takes `_held`."""

    def __init__(self, memory: LocalMemory, reaper: Reaper, idle_s: float) -> None:
        self._memory = memory
        self._reaper = reaper
        self._idle_s = idle_s
        self._held = threading.Lock()
        self._stop = threading.Event()
        self._agent: Agent | None = None
        self._used = 0.0
        self._connection: SocketConnection | None = None

    @property
    def setup(self) -> bytes:
        return b""

    def start(self, connection: SocketConnection, theirs: bytes) -> None:
        """See Backend. The agent is made with the first batch."""
        self._connection = connection

    def interrupt(self) -> None:
        self._stop.set()

    def close(self) -> None:
        self._reaper.forget(self)
        with self._held:
            self._drop()

    def release_if_idle(self, now: float) -> None:
        """See Idle."""
        if not self._held.acquire(blocking=False):
            return
        try:
            if self._agent is not None and now - self._used > self._idle_s:
                log.debug("dropping an idle NIXL agent")
                self._drop()
        finally:
            self._held.release()

    def _ready(self) -> Agent:
        """The agent, made if there is none. Raises TransferFailed."""
        if self._agent is None:
            self._agent = Agent(self._memory)
            self._made(self._agent)
            self._reaper.watch(self)
        return self._agent

    def _made(self, agent: Agent) -> None:
        """A new agent is there."""

    def _drop(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.drop()

    def _watch(self) -> _Watch:
        assert self._connection is not None
        return _Watch(self._connection, self._stop)


class OwnerBackend(_NixlBackend):
    """The owner's side: starts every transfer."""

    def __init__(self, memory: LocalMemory, reaper: Reaper, idle_s: float) -> None:
        super().__init__(memory, reaper, idle_s)
        self._generation: int | None = None
        self._metadata = b""

    def send(self, runs: Runs) -> None:
        """See Backend."""
        self._move("WRITE", runs)

    def receive(self, runs: Runs) -> None:
        """See Backend. However it ends, nothing lands in `runs` afterwards: see `agent.py`."""
        self._move("READ", runs)

    def discard(self, nbytes: int) -> None:
        """See Backend. The peer's bytes stay where they are. Next it hears the owner's answer."""
        assert self._connection is not None
        with self._held:
            self._meet(decode(self._connection.receive(MAX_FRAME), NixlRuns))

    def _move(self, verb: str, runs: Runs) -> None:
        assert self._connection is not None
        said = decode(self._connection.receive(MAX_FRAME), NixlRuns)
        theirs = _checked(said, runs.total)
        with self._held:
            try:
                self._meet(said)
                agent = self._ready()
                ours, there = pairs(runs.iovec, theirs)
                agent.move(verb, ours, there, said.device, self._watch())
                self._used = time.monotonic()
            except BaseException:
                self._drop()
                raise
        self._connection.send(encode(NixlMoved()))

    def _meet(self, said: NixlRuns) -> None:
        if said.generation == self._generation:
            return
        if not said.metadata:
            raise BadMessage("a new NIXL agent without its metadata")
        self._drop()
        self._generation, self._metadata = said.generation, said.metadata

    def _made(self, agent: Agent) -> None:
        agent.connect(self._metadata)


class PeerBackend(_NixlBackend):
    """The peer's side: names its memory, and lets UCX make progress until the owner is done."""

    def __init__(self, memory: LocalMemory, reaper: Reaper, idle_s: float) -> None:
        super().__init__(memory, reaper, idle_s)
        self._generation = 0
        self._told = 0

    def send(self, runs: Runs) -> None:
        """See Backend."""
        self._offer(runs)

    def receive(self, runs: Runs) -> None:
        """See Backend. Dropping the agent takes the memory away from the owner."""
        self._offer(runs)

    def discard(self, nbytes: int) -> None:
        raise TransferFailed("the owner discards, the peer does not")

    def _made(self, agent: Agent) -> None:
        self._generation += 1

    def _offer(self, runs: Runs) -> None:
        assert self._connection is not None
        with self._held:
            try:
                agent = self._ready()
                new = self._told != self._generation
                self._told = self._generation
                said = NixlRuns(
                    generation=self._generation,
                    metadata=agent.metadata if new else b"",
                    device=-1 if self._memory.device is None else self._memory.device,
                    iovec=runs.iovec.astype("<u8").tobytes(),
                )
                self._connection.send(encode(said))
                self._help(agent)
                answer = self._connection.receive()
                self._used = time.monotonic()
                if not _moved(answer):
                    raise Interjected(answer)
            except Interjected:
                raise
            except BaseException:
                self._drop()
                raise

    def _help(self, agent: Agent) -> None:
        """Let UCX answer the owner until the owner says something or leaves."""
        assert self._connection is not None
        poll = select.poll()
        poll.register(self._connection.fd, select.POLLIN)
        pauses, watch = Pauses(), self._watch()
        while not poll.poll(0):
            watch()
            agent.progress()
            pauses.pause()


def _moved(frame: bytes) -> bool:
    try:
        decode(frame, NixlMoved)
        return True
    except BadMessage:
        return False


class _Watch:
    """Called again and again during a wait. Raises TransferFailed when the backend was interrupted,
    the peer is gone, or the stall time is over."""

    def __init__(self, connection: SocketConnection, stop: threading.Event) -> None:
        self._stop = stop
        self._stall_s = connection.stall_s
        self._until = time.monotonic() + connection.stall_s
        self._calls = 0
        self._poll = select.poll()
        self._poll.register(connection.fd, select.POLLRDHUP)

    def __call__(self) -> None:
        if self._stop.is_set():
            raise TransferFailed("interrupted")
        self._calls += 1
        if self._calls % _LOOK_EVERY == 0:
            if self._poll.poll(0):
                raise TransferFailed("the peer is gone")
            if time.monotonic() > self._until:
                raise TransferFailed(f"the peer makes no progress for {self._stall_s:g} s")


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


class NixlKind:
    """The BackendKind. Backends of one process share only the thread that drops idle agents."""

    name = "nixl"
    batch_bytes = 4 << 20
    """Small, because over shared memory NIXL copies a batch itself, and holds the GIL meanwhile."""

    def __init__(self, *, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._reaper = Reaper(idle_s / 2)

    def why_not(self) -> str | None:
        """See BackendKind."""
        return nixl.why_not()

    def detail(self, memory: LocalMemory) -> str | None:
        """See BackendKind: NIXL's version. Agents of two versions may not understand each other."""
        return nixl.version()

    def can_reach(self, detail: str) -> str | None:
        """See BackendKind."""
        ours = nixl.version()
        if detail != ours:
            return f"it has NIXL {detail[:32] or 'of no version'}, we have {ours}"
        return None

    def make(self, memory: LocalMemory, *, owner: bool) -> Backend:
        """See BackendKind."""
        return (OwnerBackend if owner else PeerBackend)(memory, self._reaper, self._idle_s)

    def close(self) -> None:
        """Nothing else is shared."""
