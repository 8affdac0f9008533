"""CURVE between frontends and decode workers. ZMQ encrypts everything on such a connection.

Both ends derive their key pairs from the cluster key. A decode worker lets in only the one client
key that follows from it (`decode_worker/curve_auth.py`).
"""

from __future__ import annotations

from typing import Any

import zmq
from zmq.utils import z85

from pullfill.net.security import ClusterKey

NO_DETAIL = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
HANDSHAKE_FAILED = int(
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def pair(key: ClusterKey, role: str) -> tuple[bytes, bytes]:
    """(public, secret) of `frontend` or `decode`, in Z85."""
    secret = z85.encode(key.derive(f"curve {role}"))
    return zmq.curve_public(secret), secret


def present(socket: Any, key: ClusterKey) -> None:
    """The frontend's end, before connect: encrypt, and talk only to a holder of `key`."""
    socket.curve_publickey, socket.curve_secretkey = pair(key, "frontend")
    socket.curve_serverkey = pair(key, "decode")[0]


def serve(socket: Any, key: ClusterKey, domain: bytes) -> bytes:
    """The decode worker's end, before bind. Returns the 32 bytes of the one client key to let in.

    The answer on `inproc://zeromq.zap.01` about `domain` must follow it (RFC 27)."""
    socket.curve_publickey, socket.curve_secretkey = pair(key, "decode")
    socket.curve_server = True
    socket.zap_domain = domain
    client: bytes = z85.decode(pair(key, "frontend")[0])
    return client
