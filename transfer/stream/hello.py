"""Opening a stream connection: who are you, which memory, which backend. Blocking, bounded in time.

Where there is a cluster key both ends prove that they hold it, bound to fresh nonces, before the
peer says hello; from then on every frame is sealed. The payload itself is not: whoever can change
bytes on the path can change KV (digests in the commit tell, `--kv-digest`).
"""

from __future__ import annotations

import hmac
import secrets
from typing import Any

from pullfill.errors import (
    AuthFailed,
    BadMessage,
    IncompatibleError,
    PeerUnavailable,
    TransferFailed,
)
from pullfill.net.channel import FIRST_FRAME, Handshake
from pullfill.net.security import ClusterKey
from pullfill.transfer.stream.messages import StreamGoodbye, StreamHello, StreamWelcome, Why
from pullfill.transfer.stream.socket_connection import SocketConnection
from pullfill.wire import AuthChallenge, AuthHello, AuthProof, decode, encode

HELLO_S = 5.0
"""A frame of the opening may take so long, and all of it twice that: whoever connects and says
nothing, or next to nothing, is soon gone."""
_PURPOSE = "kv port"


class StalePeer(PeerUnavailable):
    """The instance or incarnation is not there any more: none of its grants is valid."""


def accept(link: SocketConnection, key: ClusterKey | None) -> StreamHello:
    """The owner's end: the peer's hello, once it has proved that it holds `key`. Raises AuthFailed
    (its text may be told to the peer), BadMessage, TransferFailed."""
    link.limit(2 * HELLO_S)
    first: Any = decode(link.receive(2 * FIRST_FRAME), AuthHello | StreamHello)  # type: ignore[arg-type]
    if key is None:
        if isinstance(first, StreamHello):
            return first
        raise AuthFailed("the decode worker has no cluster key: set [cluster] key_file there too")
    if not isinstance(first, AuthHello):
        raise AuthFailed(
            "the prefill worker shows no cluster key: it needs our [cluster] key_file "
            f"({key.fingerprint})"
        )
    nonce = secrets.token_bytes(32)
    shake = Handshake(key, first.nonce, nonce, _PURPOSE)
    link.send(encode(AuthChallenge(nonce=nonce, proof=shake.proof("decode"))))
    reply = decode(link.receive(FIRST_FRAME), AuthProof)
    if not hmac.compare_digest(reply.proof, shake.proof("prefill")):
        raise AuthFailed(
            f"the prefill worker has another cluster key than ours ({key.fingerprint}): check its "
            "[cluster] key_file"
        )
    link.seal(incoming=shake.key_of("prefill"), outgoing=shake.key_of("decode"))
    return decode(link.receive(2 * FIRST_FRAME), StreamHello)


def introduce(link: SocketConnection, key: ClusterKey | None, hello: StreamHello) -> StreamWelcome:
    """The peer's end. Raises AuthFailed, PeerUnavailable (StalePeer), IncompatibleError,
    BadMessage, TransferFailed. Never falls back to a plain connection."""
    link.limit(2 * HELLO_S)
    if key is not None:
        _prove(link, key)
    link.send(encode(hello))
    answer = _hear(link, StreamWelcome)
    assert isinstance(answer, StreamWelcome)
    return answer


def _prove(link: SocketConnection, key: ClusterKey) -> None:
    nonce = secrets.token_bytes(32)
    link.send(encode(AuthHello(nonce=nonce)))
    challenge = _hear(link, AuthChallenge)
    assert isinstance(challenge, AuthChallenge)
    shake = Handshake(key, nonce, challenge.nonce, _PURPOSE)
    if not hmac.compare_digest(challenge.proof, shake.proof("decode")):
        raise AuthFailed(
            f"the decode worker has another cluster key than ours ({key.fingerprint}): check "
            "[cluster] key_file on both"
        )
    link.send(encode(AuthProof(proof=shake.proof("prefill"))))
    link.seal(incoming=shake.key_of("decode"), outgoing=shake.key_of("prefill"))


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
