"""What a peer and the owner's thread say to each other on a stream connection (docs/wire.md).

A frame is a u32 length and a body. Frames are sealed where there is a cluster key. After the hello,
each operation is: an `Operation` from the peer; then batches, each after one mark byte, through the
backend; then one `Answer` from the owner.

    write   peer: BATCH payload BATCH payload ...          owner: Answer (early if it refuses; what
            the peer still sends is thrown away, and the connection ends)
    read    owner: BATCH payload BATCH payload ... ANSWER Answer
"""

from __future__ import annotations

import contextlib
import enum
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Annotated, Any, cast

from msgspec import Meta

from pullfill.errors import BadMessage, IncompatibleError, PeerUnavailable, TransferFailed
from pullfill.net.channel import FIRST_FRAME, tune
from pullfill.net.handshake import KV_PORT, Acceptance, Introduction, Seal
from pullfill.net.security import ClusterKey
from pullfill.transfer.contract import Direction
from pullfill.wire import AuthChallenge, AuthHello, AuthProof, FenceToken, decode, encode
from pullfill.wire.codec import WIRE_VERSION, Count, Id, Message, Text, Version

BATCH, ANSWER = b"B", b"A"

MIN_BATCH, MAX_BATCH = 64 << 10, 64 << 20
MAX_SETUP = 64 << 10
# Bytes of an operation's frame: four million block ids.
MAX_OPERATION = 16 << 20

Setup = Annotated[bytes, Meta(max_length=MAX_SETUP)]


class StreamHello(Message, tag="stream_hello", frozen=True, kw_only=True):
    """The first frame of a peer (after the proofs, where there is a cluster key).

    instance_id, incarnation, rank, nbytes, page_bytes: the memory that it wants to reach.
    backend: the name of the transport.
    head, heads, layer, layers: the part of that memory that its operations move, counted from the
    memory's own first head and layer.
    """

    v: Version = WIRE_VERSION
    instance_id: Id
    incarnation: Id
    rank: Count
    backend: Id
    nbytes: Count
    page_bytes: Count
    head: Count
    heads: Count
    layer: Count
    layers: Count
    batch_bytes: Annotated[int, Meta(ge=MIN_BATCH, le=MAX_BATCH)]
    setup: Setup = b""


class StreamWelcome(Message, tag="stream_welcome", frozen=True, kw_only=True):
    """The owner accepts; `setup` is its backend's."""

    setup: Setup = b""


class Why(enum.StrEnum):
    """Why the owner refuses a connection."""

    # Another instance or incarnation answers here, or it is full or leaving.
    UNAVAILABLE = "unavailable"
    INCOMPATIBLE = "incompatible"
    # The hello names a memory that is not like ours: its descriptor is wrong.
    WRONG = "wrong"


class StreamGoodbye(Message, tag="stream_goodbye", frozen=True, kw_only=True):
    """The owner refuses the connection.

    reason: for people.
    stale: the instance or incarnation is gone, so none of its grants is valid.
    """

    why: Why
    reason: Text
    stale: bool = False


class Operation(Message, tag="operation", frozen=True, kw_only=True):
    """Move some blocks. No blocks at all is a question: is the token still valid?

    blocks: the owner's ids as raw little-endian u32, ascending (of a write: strictly)."""

    verb: Direction
    fence: FenceToken
    blocks: bytes


class Status(enum.StrEnum):
    DONE = "done"
    FENCED = "fenced"
    # The operation itself is wrong; the owner closes the connection after saying so.
    REFUSED = "refused"


class Answer(Message, tag="answer", frozen=True, kw_only=True):
    """How an operation ended."""

    status: Status
    reason: Text = ""


# How long an operation waits for the other end without progress.
STALL_S = 30.0
_LENGTH = struct.Struct("<I")
_TIMEVAL = struct.Struct("@qq")
_LOOK = socket.MSG_PEEK | socket.MSG_DONTWAIT


class SocketConnection:
    """Owns `sock`, which is blocking and has receive and send timeouts.

    One thread at a time uses a connection, and the last one closes it. `interrupt` may come from
    any thread. Every call that sends or receives raises TransferFailed when the peer is gone or
    makes no progress for `stall_s`. An idle connection waits without a limit of its own: the kernel
    ends it if the other host is gone."""

    def __init__(self, sock: socket.socket, stall_s: float = STALL_S) -> None:
        self._sock = sock
        self._mutex = threading.Lock()
        self._in: Seal | None = None
        self._out: Seal | None = None
        sock.settimeout(None)
        tune(sock)
        self.set_stall(stall_s)

    def set_stall(self, stall_s: float) -> None:
        """From now on a call may wait so long for progress. Ends `limit`."""
        self.stall_s = stall_s
        self._until: float | None = None
        self._set_timeout(stall_s)

    def limit(self, seconds: float) -> None:
        """All that is received from now on must be there in time, even if bytes keep coming."""
        self._until = time.monotonic() + seconds

    def _set_timeout(self, stall_s: float) -> None:
        spec = _TIMEVAL.pack(int(stall_s), int(stall_s % 1 * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, spec)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, spec)

    def seal(self, *, incoming: bytes, outgoing: bytes) -> None:
        """Seal frames in both directions, from the next one on."""
        self._in, self._out = Seal(incoming), Seal(outgoing)

    @property
    def fd(self) -> int:
        return self._sock.fileno()

    # ------------------------------------------------------------------ frames

    def send(self, body: bytes) -> None:
        """Send one frame, sealed if there is a cluster key."""
        if self._out is not None:
            body = self._out.add(body)
        with as_failures():
            self._sock.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, limit: int = 1 << 20) -> bytes:
        """The next frame, of at most `limit` bytes. Also raises BadMessage, AuthFailed."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > limit:
            raise BadMessage(f"a frame of {length} bytes (at most {limit})")
        body = bytes(self._exactly(length))
        return body if self._in is None else self._in.remove(body)

    def _exactly(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view, got = memoryview(data), 0
        with as_failures():
            while got < nbytes:
                if self._until is not None:
                    left = self._until - time.monotonic()
                    if left <= 0:
                        raise TransferFailed("the opening takes too long")
                    self._set_timeout(max(0.001, min(left, self.stall_s)))  # 0: no limit
                more = self._sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
                if not more:
                    raise TransferFailed("the connection is closed")
                got += more
        return data

    # ------------------------------------------------------------------ marks

    def mark(self, mark: bytes) -> None:
        """Send one byte."""
        with as_failures():
            self._sock.sendall(mark)

    def take_mark(self) -> bytes:
        """The next byte from the peer."""
        return bytes(self._exactly(1))

    def input_waits(self) -> bool:
        """Whether there is something to read. Also when the peer left."""
        try:
            self._sock.recv(1, _LOOK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def wait_for_input(self) -> bool:
        """Wait until the peer says something. False: it left, or `interrupt`."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        poll.poll()
        try:
            return bool(self._sock.recv(1, _LOOK))
        except OSError:
            return False

    # ------------------------------------------------------------------ the end

    def interrupt(self, how: int = socket.SHUT_RDWR) -> None:
        """End calls under way soon. Received bytes may still be read. Any thread, any time."""
        with self._mutex, contextlib.suppress(OSError):
            self._sock.shutdown(how)

    def linger(self, seconds: float = 1.0) -> None:
        """Send nothing more, and throw away what the peer still sends. Never raises."""
        # If a socket is closed with bytes unread, the kernel resets the connection, and our last
        # frame may be lost.
        give_up = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            self.set_stall(seconds)
            scratch = bytearray(64 << 10)
            while time.monotonic() < give_up and self._sock.recv_into(scratch):
                pass

    def close(self) -> None:
        """No call is under way. Idempotent."""
        with self._mutex:
            self._sock.close()


@contextlib.contextmanager
def as_failures() -> Iterator[None]:
    """Turn errors of the socket into TransferFailed."""
    try:
        yield
    except BlockingIOError:
        raise TransferFailed("the peer makes no progress") from None
    except OSError as exc:
        raise TransferFailed(f"the connection broke: {exc.strerror or exc}") from exc


# A frame of the opening may take so long, and all of it twice that: whoever connects and says
# nothing, or next to nothing, is soon gone.
HELLO_S = 5.0


class StalePeer(PeerUnavailable):
    """The instance or incarnation is not there any more: none of its grants is valid."""


# With a cluster key both ends first prove that they hold it (net/handshake.py), and then seal every
# frame. The payload itself is not sealed: somebody on the path can change KV.
def accept(link: SocketConnection, key: ClusterKey | None) -> StreamHello:
    """The owner's end. Returns the peer's hello, once the peer has proved that it holds `key`.

    Raises AuthFailed (its text may be told to the peer), BadMessage, TransferFailed."""
    link.set_stall(HELLO_S)
    link.limit(2 * HELLO_S)
    first: Any = decode(link.receive(2 * FIRST_FRAME), AuthHello | StreamHello)  # type: ignore[arg-type]
    shake = Acceptance(key, KV_PORT)
    if (challenge := shake.challenge(first)) is None:
        return cast(StreamHello, first)
    link.send(encode(challenge))
    incoming, outgoing = shake.check(decode(link.receive(FIRST_FRAME), AuthProof))
    link.seal(incoming=incoming, outgoing=outgoing)
    return decode(link.receive(2 * FIRST_FRAME), StreamHello)


def introduce(link: SocketConnection, key: ClusterKey | None, hello: StreamHello) -> StreamWelcome:
    """The peer's end. Returns the owner's welcome. Never falls back to a plain connection.

    Raises AuthFailed, PeerUnavailable (StalePeer), IncompatibleError, BadMessage and
    TransferFailed."""
    link.set_stall(HELLO_S)
    link.limit(2 * HELLO_S)
    if key is not None:
        shake = Introduction(key, KV_PORT)
        link.send(encode(shake.hello))
        proof, incoming, outgoing = shake.answer(_hear(link, AuthChallenge))
        link.send(encode(proof))
        link.seal(incoming=incoming, outgoing=outgoing)
    link.send(encode(hello))
    return cast(StreamWelcome, _hear(link, StreamWelcome))


def _hear(link: SocketConnection, kind: Any) -> Any:
    message: Any = decode(link.receive(2 * FIRST_FRAME), kind | StreamGoodbye)
    if not isinstance(message, StreamGoodbye):
        return message
    if message.why is Why.INCOMPATIBLE:
        raise IncompatibleError(f"refused: {message.reason}", field="endpoints")
    if message.why is Why.WRONG:
        raise BadMessage(f"refused: {message.reason}")
    raise (StalePeer if message.stale else PeerUnavailable)(f"refused: {message.reason}")


def refuse(link: SocketConnection, exc: Exception) -> None:
    """Tell the peer why it is not let in, if it still listens. Never raises."""
    why = Why.UNAVAILABLE
    if isinstance(exc, IncompatibleError):
        why = Why.INCOMPATIBLE
    elif isinstance(exc, BadMessage):
        why = Why.WRONG
    goodbye = StreamGoodbye(why=why, reason=str(exc)[:512], stale=isinstance(exc, StalePeer))
    with contextlib.suppress(TransferFailed, BadMessage):
        link.send(encode(goodbye))
