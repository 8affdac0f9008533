"""The peer's side of the stream transports: dials the owner's port and says which blocks move.

A session owns one connection at a time. A connection that broke is made anew at the next operation.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

import numpy as np

from pullfill.errors import (
    AuthFailed,
    BadMessage,
    Fenced,
    IncompatibleError,
    PeerUnavailable,
    TransferFailed,
)
from pullfill.net.channel import split_address
from pullfill.net.security import ClusterKey
from pullfill.runtime import failpoints
from pullfill.transfer.contract import Direction, LocalMemory, PeerSession, Rect
from pullfill.transfer.layout import both_sides, rect_of
from pullfill.transfer.runs import Iovec, checked_pairs, pieces, size_of, stream_of
from pullfill.transfer.stream.backends import Backend, BackendKind
from pullfill.transfer.stream.kv_protocol import (
    ANSWER,
    BATCH,
    HELLO_S,
    STALL_S,
    Answer,
    Operation,
    SocketConnection,
    StalePeer,
    Status,
    StreamHello,
    introduce,
)
from pullfill.wire import FenceToken, RegionDescriptor, decode, encode


class StreamTransport:
    """PeerTransport over one kind of backend. It does not own the kind and keeps nothing else."""

    def __init__(
        self, kind: BackendKind, key: ClusterKey | None = None, *, stall_s: float = STALL_S
    ) -> None:
        self.name = kind.name
        self.kind, self.key, self.stall_s = kind, key, stall_s

    def can_reach(self, descriptor: RegionDescriptor) -> str | None:
        """See PeerTransport. Sends nothing: only `connect` finds out whether the owner answers."""
        address, _, detail = descriptor.endpoints.get(self.name, "").partition("#")
        try:
            split_address(address)
        except BadMessage as exc:
            return str(exc)
        return self.kind.why_not() or self.kind.can_reach(detail)

    def connect(
        self, local: LocalMemory, descriptor: RegionDescriptor, part: Rect | None = None
    ) -> PeerSession:
        """See PeerTransport. Blocks for a few seconds at most. Also raises AuthFailed."""
        ours, _ = both_sides(local, descriptor, part)
        session = StreamSession(self, ours, descriptor)
        session.open()
        return session


class StreamSession(PeerSession):
    """Thread-safe; one operation at a time."""

    moved_bytes = 0

    def __init__(
        self, over: StreamTransport, local: LocalMemory, descriptor: RegionDescriptor
    ) -> None:
        """local: what the session moves (`layout.both_sides`)."""
        self._over, self._kind = over, over.kind
        self.transport = over.name
        self._local = local
        self._descriptor = descriptor
        self._theirs = local.rect.within(rect_of(descriptor))
        self._busy = threading.Lock()
        self._ended = ""  # why it moves nothing more, for people
        self._backend: Backend | None = None  # with its connection

    def open(self) -> Backend:
        """Connect. Raises what `PeerTransport.connect` raises."""
        link = SocketConnection(self._dial())
        try:
            backend = self._backend = self._kind.make(self._local, link, owner=False)
            if self._ended:
                raise TransferFailed(self._ended)
            welcome = introduce(link, self._over.key, self._hello(backend.setup))
            link.set_stall(self._over.stall_s)
            backend.start(welcome.setup)
            return backend
        except BaseException as exc:
            self._drop()
            link.close()
            if isinstance(exc, TransferFailed):
                raise PeerUnavailable(f"{self._descriptor.instance_id}: {exc}") from exc
            raise

    def interrupt(self) -> None:
        self._ended = "the session was interrupted"
        if (backend := self._backend) is not None:
            backend.interrupt()
            backend.link.interrupt()

    def close(self) -> None:
        """Wait for an operation under way, then disconnect. Idempotent."""
        with self._busy:
            self._ended = "the session is closed"
            self._drop()

    def move(
        self, verb: Direction, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> int:
        here, there = self._local.layout.num_blocks, self._descriptor.num_blocks
        if verb == "write":
            ours, theirs = checked_pairs(source, here, target, there)
        else:
            theirs, ours = checked_pairs(source, there, target, here)
        if len(np.unique(theirs if verb == "write" else ours)) != len(target):
            raise BadMessage("a target block appears twice")
        order = np.argsort(theirs, kind="stable")
        stream = stream_of(self._local, ours[order])
        operation = Operation(verb=verb, fence=fence, blocks=theirs[order].astype("<u4").tobytes())
        with self._busy:
            if self._ended:
                raise TransferFailed(self._ended)
            if len(stream):
                self._converse(operation, stream)
        return size_of(stream)

    def _converse(self, operation: Operation, stream: Iovec) -> None:
        backend = self._connected()
        run = self._send if operation.verb == "write" else self._receive
        try:
            backend.link.send(encode(operation))
            answer = run(backend, stream)
        except (TransferFailed, BadMessage, AuthFailed) as exc:
            self._drop()
            if isinstance(exc, TransferFailed) and not self._ended:
                self._ask_why(operation.fence, exc)
            raise TransferFailed(f"{self.transport}: {exc}") from exc
        except BaseException:
            self._drop()
            raise
        if operation.verb == "write" and answer.status is not Status.DONE:
            self._drop()  # the owner ends it: bytes that it does not want may be on their way
        self._judge(answer)

    def _connected(self) -> Backend:
        """The backend with its connection, made anew if there is none or the owner ended it."""
        if (backend := self._backend) is not None:
            if not backend.link.input_waits():
                return backend
            try:
                farewell = decode(backend.link.receive(), Answer)
            except (TransferFailed, BadMessage, AuthFailed):
                farewell = None
            self._drop()
            if farewell is not None:
                self._judge(farewell)
        try:
            return self.open()
        except StalePeer as exc:
            raise Fenced(str(exc)) from exc
        except (PeerUnavailable, IncompatibleError, AuthFailed, BadMessage) as exc:
            raise TransferFailed(str(exc)) from exc

    def _ask_why(self, fence: FenceToken, broken: TransferFailed) -> None:
        """After the connection broke, ask the owner anew. Raises Fenced if the grant is gone."""
        # The owner ends connections to enforce a revoke. Only it knows whether the grant stands.
        try:
            link = self._connected().link
            link.send(encode(Operation(verb="write", fence=fence, blocks=b"")))
            answer = decode(link.receive(), Answer)
        except (TransferFailed, BadMessage, AuthFailed):
            self._drop()
            return
        if answer.status is Status.FENCED:
            raise Fenced(answer.reason) from broken

    def _judge(self, answer: Answer) -> None:
        if answer.status is Status.FENCED:
            raise Fenced(answer.reason)
        if answer.status is Status.REFUSED:
            self._drop()
            raise BadMessage(f"the owner refuses: {answer.reason}")

    def _send(self, backend: Backend, stream: Iovec) -> Answer:
        connection = backend.link
        for batch in pieces(stream, self._kind.batch_bytes):
            failpoints.hit("stream.write.before_batch")
            if connection.input_waits():  # refused: nothing more is wanted
                break
            connection.mark(BATCH)
            failpoints.hit("stream.write.batch")
            backend.send(batch)
            self.moved_bytes += size_of(batch)
        return decode(connection.receive(), Answer)

    def _receive(self, backend: Backend, stream: Iovec) -> Answer:
        connection = backend.link
        for batch in pieces(stream, self._kind.batch_bytes):
            failpoints.hit("stream.read.before_batch")
            mark = connection.take_mark()
            if mark == ANSWER:
                answer = decode(connection.receive(), Answer)
                if answer.status is Status.DONE:
                    raise BadMessage("the owner sent less than was asked for")
                return answer
            if mark != BATCH:
                raise BadMessage(f"{mark!r} where a batch must begin")
            failpoints.hit("stream.read.batch")
            backend.receive(batch)
            self.moved_bytes += size_of(batch)
        if connection.take_mark() != ANSWER:
            raise BadMessage("no answer after the last batch")
        return decode(connection.receive(), Answer)

    def _dial(self) -> socket.socket:
        endpoint = self._descriptor.endpoints.get(self.transport, "")
        host, port = split_address(endpoint.partition("#")[0])
        try:
            return socket.create_connection((host.strip("[]"), port), HELLO_S)
        except (OSError, OverflowError) as exc:
            raise PeerUnavailable(
                f"the KV port of {self._descriptor.instance_id} at {host}:{port} does not answer: "
                f"{exc}"
            ) from exc

    def _hello(self, setup: bytes) -> StreamHello:
        return StreamHello(
            instance_id=self._descriptor.instance_id,
            incarnation=self._descriptor.incarnation,
            rank=self._descriptor.rank,
            backend=self.transport,
            nbytes=self._descriptor.nbytes,
            page_bytes=self._descriptor.page_bytes,
            head=self._theirs.first_head,
            heads=self._theirs.heads,
            layer=self._theirs.first_layer,
            layers=self._theirs.layers,
            batch_bytes=self._kind.batch_bytes,
            setup=setup,
        )

    def _drop(self) -> None:
        if self._backend is not None:
            self._backend.close()
            self._backend.link.close()
        self._backend = None
