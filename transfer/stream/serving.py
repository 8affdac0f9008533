"""One connected peer on the owner's side: its operations. Each batch is moved under the fence.

Made by a thread of the server after the hello. One thread at a time uses it, and the last one
closes it. `hurry` and `end` come from other threads. Owns its fence hold and its backend, not the
connection.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pullfill.errors import BadMessage, Fenced, IncompatibleError, PeerUnavailable, TransferFailed
from pullfill.transfer.contract import LocalMemory, Rect
from pullfill.transfer.layout import part_of
from pullfill.transfer.runs import Offsets, checked_ids
from pullfill.transfer.shm.owner import FenceOwner
from pullfill.transfer.stream.backend_contract import Backend, BackendKind
from pullfill.transfer.stream.batches import ByteStream, Runs
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
)
from pullfill.transfer.stream.socket_connection import SocketConnection
from pullfill.wire import FenceToken, decode, encode


@dataclass(frozen=True, slots=True)
class Offer:
    """What one owner serves to every peer.

    memories: of all ranks, in order.
    kinds: the backends, by name.
    base: the fence over all memories.
    """

    instance_id: str
    memories: Sequence[LocalMemory]
    kinds: Mapping[str, BackendKind]
    base: FenceOwner


class ServedPeer:
    """inside: the token whose fence this thread holds or is about to hold."""

    def __init__(self, offer: Offer, connection: SocketConnection, said: StreamHello) -> None:
        """Raises PeerUnavailable, IncompatibleError, BadMessage, TransferFailed; then nothing is
        left open but the connection."""
        if said.instance_id != offer.instance_id:
            raise StalePeer(f"this address is now used by {offer.instance_id}")
        if said.rank >= len(offer.memories):
            raise IncompatibleError(f"there is no rank {said.rank}", field="rank")
        if said.backend not in offer.kinds:
            raise IncompatibleError(f"we do not offer {said.backend}", field="endpoints")
        region = offer.memories[said.rank]
        self._memory = _asked_for(region, said)
        self._fences = offer.base.fences
        self._connection = connection
        self._batch_bytes = said.batch_bytes
        self._theirs = said.setup
        self._mutex = threading.Lock()
        self._hurried: tuple[FenceToken, float] | None = None
        self._ending = False
        self.inside: FenceToken | None = None
        try:
            self._hold = offer.base.open_hold(said.incarnation)
        except PeerUnavailable as exc:
            raise StalePeer(str(exc)) from exc
        try:
            self._backend: Backend = offer.kinds[said.backend].make(region, owner=True)
        except BaseException:
            self._hold.close()
            raise

    def start(self) -> None:
        """Welcome the peer. Raises TransferFailed."""
        self._connection.send(encode(StreamWelcome(setup=self._backend.setup)))
        self._backend.start(self._connection, self._theirs)

    def run(self, rest_s: float) -> bool:
        """Serve until the peer leaves, or asks for nothing in `rest_s`. Returns whether it rests.

        Raises TransferFailed (the connection broke), BadMessage, AuthFailed."""
        rests = False
        try:
            while said := self._connection.wait_for_input(rest_s):
                self._operate(decode(self._connection.receive(MAX_OPERATION), Operation))
            rests = said is None
        finally:
            if self._ending and not rests:
                self._say_goodbye()
        return rests

    def hurry(self, token: FenceToken, now: float, patience_s: float) -> None:
        """A revoke of `token` waits for this thread's batch: interrupt the batch if it still runs
        `patience_s` after the first call. Any thread."""
        with self._mutex:
            if self.inside != token:
                return
            if self._hurried is None or self._hurried[0] != token:
                self._hurried = (token, now)
            if now - self._hurried[1] >= patience_s:
                # Under the mutex: it is still this token's receive, and not the next one's.
                self._backend.interrupt()
                self._connection.interrupt()

    def end(self) -> None:
        """Serve no more. The peer is told, if it can be. Any thread."""
        self._ending = True
        if self.inside is not None:
            self._backend.interrupt()
        self._connection.interrupt(socket.SHUT_RD)

    def close(self) -> None:
        self._backend.close()
        self._hold.close()

    # ------------------------------------------------------------------ operations

    def _operate(self, operation: Operation) -> None:
        try:
            blocks = self._blocks(operation)
        except BadMessage as exc:
            if operation.verb == "read":
                self._connection.mark(ANSWER)
            self._answer(Status.REFUSED, str(exc))
            self._connection.linger()
            raise
        stream = ByteStream(self._memory, blocks)
        if not stream.total:
            self._answer(*self._still_valid(operation.fence))
        elif operation.verb == "write":
            self._receive(operation.fence, stream)
        else:
            self._send(operation.fence, stream)

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
        if granted is not None and not granted.issuperset(blocks.tolist()):
            raise BadMessage("a block is outside the grant")
        return blocks

    def _receive(self, token: FenceToken, stream: ByteStream) -> None:
        refused = False
        for batch in stream.batches(self._batch_bytes):
            mark = self._connection.take_mark()
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
        """Returns False if the fence is dead: the peer was told, and the batch is discarded."""
        try:
            with self._inside(token, "write"):
                self._backend.receive(batch)
        except Fenced as exc:
            self._answer(Status.FENCED, str(exc))
            self._backend.discard(batch.total)
            return False
        return True

    def _send(self, token: FenceToken, stream: ByteStream) -> None:
        for batch in stream.batches(self._batch_bytes):
            try:
                with self._inside(token, "read"):
                    self._connection.mark(BATCH)
                    self._backend.send(batch)
            except Fenced as exc:
                self._connection.mark(ANSWER)
                self._answer(Status.FENCED, str(exc))
                return
        self._connection.mark(ANSWER)
        self._answer(Status.DONE)

    def _still_valid(self, token: FenceToken) -> tuple[Status, str]:
        try:
            with self._inside(token, "check"):
                return Status.DONE, ""
        except Fenced as exc:
            return Status.FENCED, str(exc)

    @contextmanager
    def _inside(self, token: FenceToken, verb: str) -> Iterator[None]:
        self._hold.before_batch(verb)
        with self._mutex:
            self.inside = token
        try:
            self._hold.enter(token)
            try:
                self._hold.inside_batch(verb)
                yield
            finally:
                self._hold.leave(token)
        finally:
            with self._mutex:
                self.inside, self._hurried = None, None

    def _answer(self, status: Status, reason: str = "") -> None:
        self._connection.send(encode(Answer(status=status, reason=reason[:512])))

    def _say_goodbye(self) -> None:
        """Between operations the next thing a peer reads is an answer: this one."""
        try:
            self._answer(Status.FENCED, "the owner closed its region")
        except TransferFailed:
            pass


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
    first_head, first_layer = memory.first_head + said.head, memory.first_layer + said.layer
    return part_of(memory, Rect(first_head, said.heads, first_layer, said.layers))
