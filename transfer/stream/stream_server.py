"""The owner's side of the stream transports: a port, and a thread for each connected peer.

Life: made over the memories of all ranks and their fence -> `start` listens -> a thread serves one
peer until it leaves -> `close` ends all. Owns the listening socket and the threads; borrows the
memories and the backends' kinds.

The thread that moves the bytes is ours. It holds the fence meanwhile, through a hold (an open file
description) of its own. So the fence file proves a revoke here too.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pullfill.errors import (
    AuthFailed,
    BadMessage,
    Fenced,
    IncompatibleError,
    NotNow,
    PeerUnavailable,
    PullfillError,
    TransferFailed,
)
from pullfill.net import this_host as machine
from pullfill.net.security import ClusterKey
from pullfill.runtime import failpoints, log
from pullfill.runtime.metrics import AUTH_REFUSED, KV_CONNECTIONS, KV_REFUSED, STALE_REFUSED
from pullfill.transfer.contract import LocalMemory, Rect
from pullfill.transfer.layout import crop
from pullfill.transfer.runs import Iovec, Offsets, checked_ids, pieces, stream_of
from pullfill.transfer.shm.fence import ShmFences
from pullfill.transfer.stream.backends import Backend, BackendKind
from pullfill.transfer.stream.kv_protocol import (
    ANSWER,
    BATCH,
    MAX_OPERATION,
    STALL_S,
    Answer,
    Operation,
    SocketConnection,
    StalePeer,
    Status,
    StreamHello,
    StreamWelcome,
    accept,
    refuse,
)
from pullfill.wire import FenceToken, decode, encode

logger = log.get("transfer.stream")


class ServedPeer:
    """One connected peer: its operations. Each batch is moved under the fence.

    Made by a thread of the server after the hello. One thread at a time uses it, and the last one
    closes it. `hurry` and `end` come from other threads. Owns its fence hold and its backend, not
    the connection.

    inside: the token whose fence this thread holds or is about to hold."""

    def __init__(
        self, server: StreamServer, connection: SocketConnection, said: StreamHello
    ) -> None:
        """Raises PeerUnavailable, IncompatibleError, BadMessage, TransferFailed; then nothing is
        left open but the connection."""
        if said.instance_id != server.instance_id:
            raise StalePeer(f"this address is now used by {server.instance_id}")
        if said.rank >= len(server.memories):
            raise IncompatibleError(f"there is no rank {said.rank}", field="rank")
        if said.backend not in server.kinds:
            raise IncompatibleError(f"we do not offer {said.backend}", field="endpoints")
        region = server.memories[said.rank]
        self._memory = _asked_for(region, said)
        self._fences = server.fences
        self._connection = connection
        self._batch_bytes = said.batch_bytes
        self._theirs = said.setup
        self._mutex = threading.Lock()
        self._hurried: float | None = None  # since when a revoke waits for the token inside
        self._ending = False
        self.inside: FenceToken | None = None
        try:
            self._hold = server.fences.open_hold(said.incarnation)
        except PeerUnavailable as exc:
            raise StalePeer(str(exc)) from exc
        try:
            self._backend: Backend = server.kinds[said.backend].make(region, connection, owner=True)
        except BaseException:
            self._hold.close()
            raise

    def run(self) -> None:
        """Welcome the peer, and serve it until it leaves, or `end`.

        Raises TransferFailed (the connection broke), BadMessage, AuthFailed."""
        self._connection.send(encode(StreamWelcome(setup=self._backend.setup)))
        self._backend.start(self._theirs)
        try:
            while self._connection.wait_for_input():
                self._operate(decode(self._connection.receive(MAX_OPERATION), Operation))
        finally:
            if self._ending:
                # Between operations the next thing that a peer reads is an answer: this one.
                with contextlib.suppress(TransferFailed):
                    self._answer(Status.FENCED, "the owner closed its region")

    def hurry(self, token: FenceToken) -> None:
        """A revoke of `token` waits for this thread's batch: interrupt the batch if it still runs
        `PATIENCE_S` after the first call. Any thread."""
        with self._mutex:
            if self.inside != token:
                return
            now = time.monotonic()
            self._hurried = self._hurried or now
            if now - self._hurried >= PATIENCE_S:
                # Under the mutex: it is still this token's receive, and not the next one's.
                self._backend.interrupt()
                self._connection.interrupt()

    def end(self) -> None:
        """Serve no more. The peer is told, if it can be. Any thread."""
        self._ending = True
        if self.inside is not None:
            self._backend.interrupt()
            self._connection.interrupt()
        self._connection.interrupt(socket.SHUT_RD)  # its goodbye can still be sent

    def close(self) -> None:
        self._backend.close()
        self._hold.close()

    # ------------------------------------------------------------------ operations

    def _operate(self, operation: Operation) -> None:
        reads, token = operation.verb == "read", operation.fence
        try:
            stream = stream_of(self._memory, self._blocks(operation))
        except BadMessage as exc:
            self._answer(Status.REFUSED, str(exc), marked=reads)
            self._connection.linger()
            raise
        marked, move = reads and len(stream) > 0, self._send if reads else self._receive
        try:
            if len(stream):
                move(token, stream)
            else:
                with self._inside(token, "check"):
                    pass
        except Fenced as exc:
            self._answer(Status.FENCED, str(exc), marked=marked)
            if len(stream) and not reads:
                # What the peer sends until it hears that is thrown away. It connects anew.
                self._connection.linger()
                raise TransferFailed("a write was refused") from exc
        else:
            self._answer(Status.DONE, marked=marked)

    def _blocks(self, operation: Operation) -> Offsets:
        """The operation's block ids. Raises BadMessage unless they are in this region, in order and
        in the grant. (A write may not touch the prefix hit, which other requests share. Of a token
        that is dead, the fence file refuses every batch.)"""
        if len(operation.blocks) % 4:
            raise BadMessage("block ids are not u32")
        ids: Any = np.frombuffer(operation.blocks, "<u4")
        blocks = checked_ids(ids, self._memory.layout.num_blocks, "named")
        lowest_step = 1 if operation.verb == "write" else 0
        if len(blocks) > 1 and int(np.diff(blocks).min()) < lowest_step:
            raise BadMessage("block ids are not ascending")
        granted = self._fences.granted(operation.fence, writes=operation.verb == "write")
        if granted is not None and not np.isin(blocks, np.asarray(granted, np.int64)).all():
            raise BadMessage("a block is outside the grant")
        return blocks

    def _receive(self, token: FenceToken, stream: Iovec) -> None:
        for batch in pieces(stream, self._batch_bytes):
            if (mark := self._connection.take_mark()) != BATCH:
                raise BadMessage(f"{mark!r} where a batch must begin")
            with self._inside(token, "write"):
                self._backend.receive(batch)

    def _send(self, token: FenceToken, stream: Iovec) -> None:
        for batch in pieces(stream, self._batch_bytes):
            with self._inside(token, "read"):
                self._connection.mark(BATCH)
                self._backend.send(batch)

    @contextmanager
    def _inside(self, token: FenceToken, verb: str) -> Iterator[None]:
        failpoints.hit(f"kv.{verb}.before_batch")
        with self._mutex:
            self.inside = token
        try:
            self._hold.enter(token)
            try:
                failpoints.hit(f"kv.{verb}.batch")
                yield
            finally:
                self._hold.leave(token)
        finally:
            with self._mutex:
                self.inside, self._hurried = None, None

    def _answer(self, status: Status, reason: str = "", *, marked: bool = False) -> None:
        if marked:  # a batch could come in its place
            self._connection.mark(ANSWER)
        self._connection.send(encode(Answer(status=status, reason=reason[:512])))


def _asked_for(memory: LocalMemory, said: StreamHello) -> LocalMemory:
    """The part of the memory that the peer asks for. Raises IncompatibleError, BadMessage."""
    layout = memory.layout
    if said.nbytes != memory.nbytes:
        raise BadMessage(f"a descriptor of {said.nbytes} bytes for a region of {memory.nbytes}")
    if said.page_bytes != layout.page_bytes:
        raise IncompatibleError(
            f"pages of {layout.page_bytes} bytes here, of {said.page_bytes} there",
            field="page_bytes",
        )
    part = Rect(said.head, said.heads, said.layer, said.layers)
    return replace(memory, layout=crop(layout, part))


# File descriptors of one connection: its socket and its fence hold.
FILES_EACH = 2
# File descriptors that KV connections must leave for the rest of the process.
FILES_SPARED = 256
# Connections, at most, that have not sent their hello yet. One more ends the oldest of them, so
# that whoever connects and says nothing keeps nobody out. The next connection is accepted when the
# thread of the last one runs, and a hello takes a few milliseconds. So a fleet that connects at the
# same time has far fewer: of 1,200 writers with a cluster key, 37 at most.
MAX_STRANGERS = 512
# A batch of a peer that is alive ends within this time. A revoke interrupts one that takes longer.
# This decides when a connection is given up. It proves nothing.
PATIENCE_S = 0.02


@dataclass(eq=False, repr=False)
class StreamServer:
    """Serves every rank's memory on one port. Thread-safe.

    memories: of all ranks, in order.
    kinds: the backends, by name.
    fences: over all memories.
    """

    instance_id: str
    memories: Sequence[LocalMemory]
    kinds: Mapping[str, BackendKind]
    fences: ShmFences
    key: ClusterKey | None = None
    stall_s: float = STALL_S
    address: str = field(init=False, default="")
    _mutex: threading.Lock = field(init=False, default_factory=threading.Lock)
    # By the threads that serve them, in the order in which they came. Each is in one of these.
    _strangers: dict[threading.Thread, SocketConnection] = field(init=False, default_factory=dict)
    _peers: dict[threading.Thread, ServedPeer] = field(init=False, default_factory=dict)
    _closed: bool = field(init=False, default=False)
    _accepting: threading.Thread | None = field(init=False, default=None)
    _listening: socket.socket | None = field(init=False, default=None)
    _seldom: log.Seldom = field(init=False, default_factory=lambda: log.Seldom(1.0))

    def start(self, host: str, port: int = 0) -> None:
        """Listen. Raises ConfigError when the address cannot be had."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listening = socket.create_server((host, port), family=family, backlog=4096)
        except (OSError, OverflowError) as exc:
            raise NotNow(f"cannot listen for KV on {host}:{port}: {exc}") from exc
        self.address = f"tcp://{host}:{self._listening.getsockname()[1]}"
        self._accepting = threading.Thread(
            target=self._accept, args=(self._listening,), name="kv-accept", daemon=True
        )
        self._accepting.start()

    @property
    def peers(self) -> list[ServedPeer]:
        """Those that have sent their hello."""
        with self._mutex:
            return list(self._peers.values())

    def interrupt(self, token: FenceToken) -> None:
        """A revoke of `token` was not proved: end our batches under it that take too long. Never
        blocks."""
        # One of our threads holds the fence and may wait for a peer that says nothing. Once that
        # receive has ended, the next `try_revoke` proves. So a stopped or dead peer keeps nothing
        # in quarantine.
        for peer in self.peers:
            peer.hurry(token)

    def close(self) -> None:
        """Tell every peer and end every thread. Idempotent. The fence refuses new batches already,
        or is about to; what is under way is interrupted."""
        with self._mutex:
            self._closed = True
        if self._listening is not None:
            with contextlib.suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)
        if self._accepting is not None:
            self._accepting.join(5.0)  # then every thread that there is has been started
        with self._mutex:
            peers, strangers = dict(self._peers), dict(self._strangers)
        for peer in peers.values():
            peer.end()
        for connection in strangers.values():
            connection.interrupt()
        for thread in (*peers, *strangers):
            if thread is not threading.current_thread():
                thread.join(5.0)

    # ------------------------------------------------------------------ threads

    def _accept(self, listening: socket.socket) -> None:
        with listening:
            while not self._closed:
                try:
                    sock, address = listening.accept()
                except OSError as exc:
                    if self._closed:
                        return
                    KV_REFUSED.labels("open_files").inc()
                    self._complain(f"cannot accept KV connections: {exc}")
                    time.sleep(0.05)  # no descriptor left: others may be given back
                    continue
                host = str(address[0])
                try:
                    self._begin(sock, host)
                except (OSError, RuntimeError, TransferFailed) as exc:
                    self._complain(f"refused a KV connection from {host}: {exc}")
                    sock.close()

    def _begin(self, sock: socket.socket, host: str) -> None:
        """Start a thread for a stranger. Raises OSError (it has left), RuntimeError (there can be
        no further thread) and TransferFailed (there is no room)."""
        connection = SocketConnection(sock)
        thread = threading.Thread(
            target=self._serve, args=(connection, host), name=f"kv-{host}", daemon=True
        )
        with self._mutex:
            self._check_room()
            self._strangers[thread] = connection
        try:
            thread.start()  # waits until it runs, so not under the mutex
        except RuntimeError:
            KV_REFUSED.labels("threads").inc()
            with self._mutex:
                self._strangers.pop(thread, None)
            raise

    def _check_room(self) -> None:
        """Raise TransferFailed if there is no room for another connection. The caller holds the
        mutex."""
        if self._closed:
            raise TransferFailed("this worker leaves")
        held = len(self._peers) + len(self._strangers)
        most = (machine.open_files() - FILES_SPARED) // FILES_EACH
        if held >= most:
            KV_REFUSED.labels("open_files").inc()
            raise TransferFailed(
                f"{held} KV connections are all that the limit of {machine.open_files()} open "
                "files allows: raise it (ulimit -n) and restart this worker"
            )
        # Where files are few, strangers use a part of them only.
        if (strangers := len(self._strangers)) >= min(MAX_STRANGERS, max(1, most // 4)):
            KV_REFUSED.labels("strangers").inc()
            self._complain(
                f"{strangers} KV connections have sent no hello: ending the oldest one to let "
                "others in. Check who connects to the KV port"
            )
            oldest = next(iter(self._strangers))
            self._strangers.pop(oldest).interrupt()  # its thread ends it

    def _serve(self, connection: SocketConnection, host: str) -> None:
        """Serve a stranger who becomes a peer, until it leaves."""
        peer = None
        try:
            peer = self._admit(connection)
            peer.run()
        except AuthFailed as exc:
            AUTH_REFUSED.labels("kv").inc()
            self._complain(f"refused a KV connection from {host}: {exc}")
        except BadMessage as exc:
            STALE_REFUSED.labels("message").inc()
            self._complain(f"closed a KV connection from {host}: {exc}")
        except PullfillError as exc:
            logger.debug("KV connection from %s: %s", host, exc)
        except Exception:
            logger.exception("a KV connection from %s failed", host)
        if peer is not None:
            peer.close()
        connection.close()
        with self._mutex:
            self._strangers.pop(threading.current_thread(), None)
            if self._peers.pop(threading.current_thread(), None) is not None:
                KV_CONNECTIONS.dec()

    def _admit(self, connection: SocketConnection) -> ServedPeer:
        """Shake hands. Whoever is refused is told why."""
        try:
            said = accept(connection, self.key)
            peer = ServedPeer(self, connection, said)
        except (PullfillError, OSError) as exc:
            if not isinstance(exc, TransferFailed):
                refuse(connection, exc)
            raise
        connection.set_stall(self.stall_s)
        with self._mutex:
            self._strangers.pop(threading.current_thread(), None)
            self._peers[threading.current_thread()] = peer
            KV_CONNECTIONS.inc()
            leaving = self._closed
        if leaving:
            peer.end()
        return peer

    def _complain(self, text: str) -> None:
        """Log a warning, at most one a second: strangers can come as often as they like."""
        if (more := self._seldom.due("")) is not None:
            logger.warning("%s%s", text, more)
