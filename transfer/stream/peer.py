"""The prefill worker's side of the stream transports: dials the owner's port, says which blocks.

A session owns one connection at a time. One that broke is made anew at the next operation, and at
once after an operation broke with it: only the owner knows whether the grant still stands (it cuts
connections to enforce a revoke).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from pullfill.errors import (
    AuthFailed,
    BadMessage,
    Fenced,
    IncompatibleError,
    PeerUnavailable,
    TransferFailed,
)
from pullfill.net import frames
from pullfill.net.security import ClusterKey
from pullfill.runtime import failpoints
from pullfill.transfer.contract import Direction, LocalMemory, MoveResult, Part, PeerSession
from pullfill.transfer.layout import check_bounds, check_pair, layout_of
from pullfill.transfer.runs import Offsets, checked_ids
from pullfill.transfer.stream import hello
from pullfill.transfer.stream.backend_contract import Backend, BackendKind, Interjected
from pullfill.transfer.stream.batches import ByteStream, Side
from pullfill.transfer.stream.messages import (
    ANSWER,
    BATCH,
    STOP,
    Answer,
    Operation,
    Status,
    StreamHello,
    Verb,
)
from pullfill.transfer.stream.socket_connection import STALL_S, SocketConnection
from pullfill.wire import FenceToken, RegionDescriptor, decode, encode

CONNECT_S = 5.0
_INTERRUPTED = "the session was interrupted"


def endpoint_of(address: str, detail: str) -> str:
    """What an owner publishes for one backend."""
    return f"{address}#{detail}" if detail else address


class StreamTransport:
    """PeerTransport over one kind of backend. Stateless but for the kind, which it borrows."""

    def __init__(
        self, kind: BackendKind, key: ClusterKey | None = None, *, stall_s: float = STALL_S
    ) -> None:
        self.name = kind.name
        self._kind = kind
        self._key = key
        self._stall_s = stall_s

    def can_reach(self, descriptor: RegionDescriptor) -> str | None:
        """See PeerTransport. Sends nothing: whether the owner answers shows at `connect`."""
        address, _, detail = descriptor.endpoints.get(self.name, "").partition("#")
        try:
            frames.split_address(address)
        except BadMessage as exc:
            return str(exc)
        return self._kind.why_not() or self._kind.can_reach(detail)

    def connect(
        self, local: LocalMemory, descriptor: RegionDescriptor, part: Part | None = None
    ) -> PeerSession:
        """See PeerTransport. Blocks for at most a few seconds. Raises AuthFailed, too."""
        layout = layout_of(descriptor)
        check_bounds(local.layout, local.nbytes)
        check_pair(local.layout, layout, part)
        session = StreamSession(
            self._kind, self._key, local, descriptor, part, stall_s=self._stall_s
        )
        session.open()
        return session


class StreamSession:
    """A PeerSession. Thread-safe; one operation at a time. Who interrupts looks at `_opening`
    before `_link`; who opens sets them in the opposite order. So no connection is missed."""

    def __init__(
        self,
        kind: BackendKind,
        key: ClusterKey | None,
        local: LocalMemory,
        descriptor: RegionDescriptor,
        part: Part | None,
        *,
        stall_s: float = STALL_S,
    ) -> None:
        self._kind = kind
        self._key = key
        self._local = local
        self._descriptor = descriptor
        self._blocks = descriptor.num_blocks
        self._side = Side.local(part) if part else Side.whole(local.layout)
        self._theirs = Side.local(part.swapped()) if part else self._side
        self._stall_s = stall_s
        self._busy = threading.Lock()
        self._closed = False
        self._interrupted = False
        self._opening: SocketConnection | None = None
        self._link: SocketConnection | None = None
        self._backend: Backend | None = None
        self._moved = 0

    @property
    def transport(self) -> str:
        return self._kind.name

    @property
    def moved_bytes(self) -> int:
        """See PeerSession."""
        return self._moved

    def open(self) -> None:
        """Connect. See PeerTransport.connect for what it raises."""
        sock = self._dial()
        link = SocketConnection(sock, hello.HELLO_S)
        try:
            backend = self._kind.make(self._local, owner=False)
        except BaseException:
            link.close()
            raise
        self._opening = link
        try:
            if self._interrupted:
                raise TransferFailed(_INTERRUPTED)
            welcome = hello.introduce(link, self._key, self._hello(backend.setup))
            link.set_stall(self._stall_s)
            backend.start(link, welcome.setup)
        except TransferFailed as exc:
            backend.close()
            link.close()
            raise PeerUnavailable(f"{self._descriptor.instance_id}: {exc}") from exc
        except BaseException:
            backend.close()
            link.close()
            raise
        else:
            self._link, self._backend = link, backend
        finally:
            self._opening = None

    def write_blocks(
        self, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> MoveResult:
        """See PeerSession."""
        ours = checked_ids(source, self._local.layout.num_blocks, "source")
        theirs = checked_ids(target, self._blocks, "target")
        _check_pairs(ours, theirs, theirs)
        return self._move(Verb.WRITE, fence, ours, theirs, self._send)

    def read_blocks(
        self, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> MoveResult:
        """See PeerSession."""
        theirs = checked_ids(source, self._blocks, "source")
        ours = checked_ids(target, self._local.layout.num_blocks, "target")
        _check_pairs(ours, theirs, ours)
        return self._move(Verb.READ, fence, ours, theirs, self._receive)

    def move_now(
        self, verb: Direction, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> MoveResult | None:
        """See PeerSession. Always None: the owner has to answer."""
        return None

    def interrupt(self) -> None:
        """See PeerSession."""
        self._interrupted = True
        opening, link, backend = self._opening, self._link, self._backend
        if backend is not None:
            backend.interrupt()
        for connection in (opening, link):
            if connection is not None:
                connection.interrupt()

    def close(self) -> None:
        """Waits for an operation under way. Idempotent."""
        with self._busy:
            self._closed = True
            self._drop()

    # ------------------------------------------------------------------ one operation

    def _move(
        self,
        verb: Verb,
        fence: FenceToken,
        ours: Offsets,
        theirs: Offsets,
        run: Callable[[SocketConnection, Backend, ByteStream], Answer],
    ) -> MoveResult:
        started = time.perf_counter()
        order = np.argsort(theirs, kind="stable")
        stream = ByteStream(self._local, self._side, ours[order])
        operation = Operation(verb=verb, fence=fence, blocks=theirs[order].astype("<u4").tobytes())
        with self._busy:
            if self._closed:
                raise TransferFailed("the session is closed")
            if self._interrupted:
                raise TransferFailed(_INTERRUPTED)
            if stream.total:
                self._converse(operation, stream, run)
        return MoveResult(
            blocks=len(ours),
            nbytes=stream.total,
            seconds=time.perf_counter() - started,
            runs=stream.runs,
        )

    def _converse(
        self,
        operation: Operation,
        stream: ByteStream,
        run: Callable[[SocketConnection, Backend, ByteStream], Answer],
    ) -> None:
        link, backend = self._connection()
        try:
            link.send(encode(operation))
            answer = run(link, backend, stream)
        except (TransferFailed, BadMessage, AuthFailed) as exc:
            self._drop()
            if isinstance(exc, TransferFailed) and not self._interrupted:
                self._ask_why(operation.fence, exc)
            raise TransferFailed(f"{self.transport}: {exc}") from exc
        except BaseException:
            self._drop()
            raise
        self._judge(answer)

    def _connection(self) -> tuple[SocketConnection, Backend]:
        """The one there is, if the owner did not end it meanwhile; else a new one."""
        if self._link is not None and self._link.input_waits():
            farewell = self._farewell(self._link)
            self._drop()
            if farewell is not None:
                self._judge(farewell)
        if self._link is None:
            try:
                self.open()
            except hello.StalePeer as exc:
                raise Fenced(str(exc)) from exc
            except (PeerUnavailable, IncompatibleError, AuthFailed, BadMessage) as exc:
                raise TransferFailed(str(exc)) from exc
        assert self._link is not None
        assert self._backend is not None
        return self._link, self._backend

    def _farewell(self, link: SocketConnection) -> Answer | None:
        try:
            return decode(link.receive(), Answer)
        except (TransferFailed, BadMessage, AuthFailed):
            return None

    def _ask_why(self, fence: FenceToken, broken: TransferFailed) -> None:
        """After the connection broke: raises Fenced if the grant is gone."""
        try:
            link, _ = self._connection()
            link.send(encode(Operation(verb=Verb.WRITE, fence=fence, blocks=b"")))
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

    def _send(self, link: SocketConnection, backend: Backend, stream: ByteStream) -> Answer:
        left = stream.total
        for batch in stream.batches(self._kind.batch_bytes):
            failpoints.hit("stream.write.before_batch")
            if link.input_waits():  # refused: nothing more is wanted
                answer = decode(link.receive(), Answer)
                link.mark(STOP)
                return answer
            link.mark(BATCH)
            failpoints.hit("stream.write.batch")
            try:
                backend.send(batch)
            except Interjected as said:
                answer = decode(said.frame, Answer)
                if left > batch.total:  # the owner waits for another batch
                    link.mark(STOP)
                return answer
            left -= batch.total
            self._moved += batch.total
        return decode(link.receive(), Answer)

    def _receive(self, link: SocketConnection, backend: Backend, stream: ByteStream) -> Answer:
        for batch in stream.batches(self._kind.batch_bytes):
            failpoints.hit("stream.read.before_batch")
            mark = link.take_mark()
            if mark == ANSWER:
                answer = decode(link.receive(), Answer)
                if answer.status is Status.DONE:
                    raise BadMessage("the owner sent less than was asked for")
                return answer
            if mark != BATCH:
                raise BadMessage(f"{mark!r} where a batch must begin")
            failpoints.hit("stream.read.batch")
            backend.receive(batch)
            self._moved += batch.total
        if link.take_mark() != ANSWER:
            raise BadMessage("no answer after the last batch")
        return decode(link.receive(), Answer)

    # ------------------------------------------------------------------ the connection

    def _dial(self) -> socket.socket:
        endpoint = self._descriptor.endpoints.get(self.transport, "")
        host, port = frames.split_address(endpoint.partition("#")[0])
        try:
            return socket.create_connection((host.strip("[]"), port), CONNECT_S)
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
            head=self._theirs.head,
            heads=self._theirs.heads,
            layer=self._theirs.layer,
            layers=self._theirs.layers,
            batch_bytes=self._kind.batch_bytes,
            setup=setup,
        )

    def _drop(self) -> None:
        if self._backend is not None:
            self._backend.close()
        if self._link is not None:
            self._link.close()
        self._backend = self._link = None


def _check_pairs(ours: Offsets, theirs: Offsets, targets: Offsets) -> None:
    if len(ours) != len(theirs):
        raise BadMessage(f"{len(ours)} of our blocks for {len(theirs)} of the owner's")
    if len(np.unique(targets)) != len(targets):
        raise BadMessage("a target block appears twice")
