"""One peer's connection on the owner's side: its operations, each batch inside the gate.

Made by the server's thread for it after the hello, used and closed by that thread; `hurry` and
`end` come from others. Owns its gate and its backend, not the link.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pullfill.errors import BadMessage, Fenced, IncompatibleError, PeerUnavailable, TransferFailed
from pullfill.transfer.contract import LocalMemory, Part
from pullfill.transfer.layout import check_pair
from pullfill.transfer.runs import Offsets, checked_ids
from pullfill.transfer.session import FenceHold
from pullfill.transfer.stream.backend_contract import Backend, BackendKind, Runs
from pullfill.transfer.stream.batches import ByteStream, Side
from pullfill.transfer.stream.hello import StalePeer
from pullfill.transfer.stream.messages import (
    ANSWER,
    BATCH,
    MAX_OPERATION,
    STOP,
    Answer,
    Operation,
    Status,
    StreamHello,
    StreamWelcome,
    Verb,
)
from pullfill.transfer.stream.socket_connection import SocketConnection
from pullfill.wire import FenceToken, decode, encode


@dataclass(frozen=True, slots=True)
class Ground:
    """What all connections of one owner stand on; see StreamServer."""

    instance_id: str
    memories: Sequence[LocalMemory]
    kinds: Mapping[str, BackendKind]
    open_gate: Callable[[str], FenceHold]
    granted: Callable[[FenceToken, bool], frozenset[int] | None]


class Connection:
    """inside: the token whose gate this thread holds or is about to."""

    def __init__(self, ground: Ground, link: SocketConnection, said: StreamHello) -> None:
        """Raises PeerUnavailable, IncompatibleError, BadMessage, TransferFailed; then nothing is
        left open but the link."""
        if said.instance_id != ground.instance_id:
            raise StalePeer(f"this address is now used by {ground.instance_id}")
        if said.rank >= len(ground.memories):
            raise IncompatibleError(f"there is no rank {said.rank}", field="rank")
        if said.backend not in ground.kinds:
            raise IncompatibleError(f"we do not offer {said.backend}", field="endpoints")
        self._memory = ground.memories[said.rank]
        self._side = _side_of(self._memory, said)
        self._ground = ground
        self._link = link
        self._batch_bytes = said.batch_bytes
        self._theirs = said.setup
        self._backend_name = said.backend
        self._mutex = threading.Lock()
        self._hurried: tuple[FenceToken, float] | None = None
        self._ending = False
        self.inside: FenceToken | None = None
        try:
            self._gate = ground.open_gate(said.incarnation)
        except PeerUnavailable as exc:
            raise StalePeer(str(exc)) from exc
        try:
            self._backend: Backend = ground.kinds[said.backend].make(self._memory, owner=True)
        except BaseException:
            self._gate.close()
            raise

    def run(self) -> None:
        """Serve until the peer leaves. Raises TransferFailed (the connection broke), BadMessage,
        AuthFailed."""
        self._link.send(encode(StreamWelcome(setup=self._backend.setup)))
        self._backend.start(self._link, self._theirs)
        try:
            while self._link.wait_for_input():
                self._operate(decode(self._link.receive(MAX_OPERATION), Operation))
        finally:
            if self._ending:
                self._say_goodbye()

    def hurry(self, token: FenceToken, now: float, patience_s: float) -> None:
        """A revoke waits for us (any thread): interrupt what still goes on after the patience."""
        with self._mutex:
            if self.inside != token:
                return
            if self._hurried is None or self._hurried[0] != token:
                self._hurried = (token, now)
            if now - self._hurried[1] >= patience_s:
                # Under the mutex: it is still this token's receive, and not the next one's.
                self._backend.interrupt()
                self._link.interrupt()

    def end(self) -> None:
        """Leave (any thread): nothing more is heard, and the peer is told if it can be."""
        self._ending = True
        if self.inside is not None:
            self._backend.interrupt()
        self._link.interrupt(socket.SHUT_RD)

    def close(self) -> None:
        self._backend.close()
        self._gate.close()

    # ------------------------------------------------------------------ operations

    def _operate(self, operation: Operation) -> None:
        try:
            blocks = self._blocks(operation)
        except BadMessage as exc:
            if operation.verb is Verb.READ:
                self._link.mark(ANSWER)
            self._answer(Status.REFUSED, str(exc))
            self._link.linger()
            raise
        stream = ByteStream(self._memory, self._side, blocks)
        if not stream.total:
            self._answer(*self._still_valid(operation.fence))
        elif operation.verb is Verb.WRITE:
            self._receive(operation.fence, stream)
        else:
            self._send(operation.fence, stream)

    def _blocks(self, operation: Operation) -> Offsets:
        """The operation's ids: of this region, of this grant (as far as the token lives; a write
        may not touch the prefix hit, which others share), in order. Raises BadMessage."""
        if len(operation.blocks) % 4:
            raise BadMessage("block ids are not u32")
        ids: Any = np.frombuffer(operation.blocks, "<u4")
        blocks = checked_ids(ids, self._memory.layout.num_blocks, "named")
        lowest_step = 1 if operation.verb is Verb.WRITE else 0
        if len(blocks) > 1 and int(np.diff(blocks).min()) < lowest_step:
            raise BadMessage("block ids are not ascending")
        granted = self._ground.granted(operation.fence, operation.verb is Verb.WRITE)
        if granted is not None and not granted.issuperset(blocks.tolist()):
            raise BadMessage("a block is outside the grant")
        return blocks

    def _receive(self, token: FenceToken, stream: ByteStream) -> None:
        refused = False
        for batch in stream.batches(self._batch_bytes):
            mark = self._link.take_mark()
            if mark == STOP and refused:
                return
            if mark != BATCH:
                raise BadMessage(f"{mark!r} where a batch must begin")
            if not refused:
                refused = not self._receive_batch(token, batch)
            else:
                self._backend.discard(batch.total)
        if not refused:
            self._answer(Status.DONE)

    def _receive_batch(self, token: FenceToken, batch: Runs) -> bool:
        """False: fenced; the peer was told, and the batch is gone."""
        try:
            with self._inside(token, "write"):
                self._backend.receive(batch)
                self._gate.copied("write", int(batch.iovec[0, 0]))
        except Fenced as exc:
            self._answer(Status.FENCED, str(exc))
            self._backend.discard(batch.total)
            return False
        return True

    def _send(self, token: FenceToken, stream: ByteStream) -> None:
        for batch in stream.batches(self._batch_bytes):
            try:
                with self._inside(token, "read"):
                    self._link.mark(BATCH)
                    self._backend.send(batch)
            except Fenced as exc:
                self._link.mark(ANSWER)
                self._answer(Status.FENCED, str(exc))
                return
        self._link.mark(ANSWER)
        self._answer(Status.DONE)

    def _still_valid(self, token: FenceToken) -> tuple[Status, str]:
        try:
            with self._inside(token, "check"):
                return Status.DONE, ""
        except Fenced as exc:
            return Status.FENCED, str(exc)

    @contextmanager
    def _inside(self, token: FenceToken, verb: str) -> Iterator[None]:
        self._gate.before_batch(verb)
        with self._mutex:
            self.inside = token
        try:
            self._gate.enter(token)
            try:
                self._gate.inside_batch(verb)
                yield
            finally:
                self._gate.leave(token)
        finally:
            with self._mutex:
                self.inside, self._hurried = None, None

    def _answer(self, status: Status, reason: str = "") -> None:
        self._link.send(encode(Answer(status=status, reason=reason[:512])))

    def _say_goodbye(self) -> None:
        """Between operations the next thing a peer reads is an answer: this one."""
        try:
            self._answer(Status.FENCED, "the owner closed its region")
        except TransferFailed:
            pass


def _side_of(memory: LocalMemory, said: StreamHello) -> Side:
    """What the peer asks for, checked. Raises IncompatibleError, BadMessage."""
    layout = memory.layout
    if said.nbytes != memory.nbytes:
        raise BadMessage(f"a descriptor of {said.nbytes} bytes for a region of {memory.nbytes}")
    if said.page_bytes != layout.page_bytes:
        raise IncompatibleError(
            f"pages of {layout.page_bytes} bytes here, of {said.page_bytes} there",
            field="page_bytes",
        )
    part = Part(said.head, said.head, said.heads, said.layer, said.layer, said.layers)
    check_pair(layout, layout, part)
    return Side(said.head, said.heads, said.layer, said.layers)
