"""Opens a stream connection: the peer says which memory and backend. Blocking, bounded in time.

With a cluster key both ends first prove that they hold it (`net/handshake.py`), and then seal every
frame. The payload itself is not sealed: somebody on the path can change KV.
"""

from __future__ import annotations

from typing import Any, cast

from pullfill.errors import BadMessage, IncompatibleError, PeerUnavailable, TransferFailed
from pullfill.net.channel import FIRST_FRAME
from pullfill.net.handshake import KV_PORT, Acceptance, Introduction
from pullfill.net.security import ClusterKey
from pullfill.transfer.stream.messages import StreamGoodbye, StreamHello, StreamWelcome, Why
from pullfill.transfer.stream.socket_connection import SocketConnection
from pullfill.wire import AuthChallenge, AuthHello, AuthProof, decode, encode

HELLO_S = 5.0
"""A frame of the opening may take so long, and all of it twice that: whoever connects and says
nothing, or next to nothing, is soon gone."""


class StalePeer(PeerUnavailable):
    """The instance or incarnation is not there any more: none of its grants is valid."""


def accept(link: SocketConnection, key: ClusterKey | None) -> StreamHello:
    """The owner's end. Returns the peer's hello, once the peer has proved that it holds `key`.

    Raises AuthFailed (its text may be told to the peer), BadMessage, TransferFailed."""
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
    try:
        link.send(encode(goodbye))
    except (TransferFailed, BadMessage):
        pass
