"""CURVE between frontends and decode workers. ZMQ encrypts everything on such a connection.

Both ends derive their key pairs from the cluster key. A decode worker lets in only the one client
key that follows from it.
"""

from __future__ import annotations

import hmac
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from pullfill.net.security import ClusterKey
from pullfill.runtime import log

logger = log.get("net.curve")

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_DOMAIN = b"pullfill"
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


class CurveAuth:
    """Lets in only frontends with the cluster key, at the decode worker's ROUTER.

    libzmq asks about each new connection (ZAP). There is no thread for the answers: the engine's
    loop, which serves the ROUTER, also polls `sockets` and calls `look`. One per ZMQ context.

    key: the cluster key. None: only log that a peer that encrypts was refused.
    """

    def __init__(self, socket: Any, key: ClusterKey | None) -> None:
        """Call it before the socket is bound."""
        self._key = key
        self._zap: Any = None
        self._seldom = log.Seldom(60.0)
        if key is not None:
            socket.curve_publickey, socket.curve_secretkey = pair(key, "decode")
            socket.curve_server = True
            socket.zap_domain = _DOMAIN
            # The 32 bytes of the one client key to let in. libzmq asks on _ZAP_ADDRESS (RFC 27).
            self._client: bytes = z85.decode(pair(key, "frontend")[0])
            self._zap = socket.context.socket(zmq.REP)
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.bind(_ZAP_ADDRESS)
        self._socket = socket
        self._monitor = socket.get_monitor_socket(HANDSHAKE_FAILED)

    @property
    def sockets(self) -> list[Any]:
        """Call `look` when one of them can be read."""
        return [s for s in (self._zap, self._monitor) if s is not None]

    def look(self) -> None:
        """Answer libzmq's questions, and log who was refused. Never blocks."""
        while self._zap is not None:
            try:
                request = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._zap.send_multipart(self._answer(request))
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event["event"] & HANDSHAKE_FAILED:
                self._turned_away(event["event"])

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """Answer one question of libzmq (ZAP, RFC 27).

        request: version, id, domain, address, identity, mechanism, key."""
        good = (
            len(request) == 7
            and request[2] == _DOMAIN
            and request[5] == b"CURVE"
            and hmac.compare_digest(request[6], self._client)
        )
        status = (b"200", b"OK") if good else (b"400", b"the client key is not ours")
        request_id = request[1] if len(request) > 1 else b""
        return [b"1.0", request_id, *status, b"", b""]

    def _turned_away(self, event: int) -> None:
        """Count and log a failed handshake.

        event: NO_DETAIL if the peer left during the handshake. That is a port scan, or a frontend
        that saw first that only one side has a key. Any other event is a wrong or missing key."""
        certain = event != NO_DETAIL
        if certain:
            # Here, as frontends import this module, and would export zeroes under workers' names.
            from pullfill.runtime import metrics

            metrics.AUTH_REFUSED.labels("frontend").inc()
        if (more := self._seldom.due(str(certain))) is None:
            return
        if self._key is None:
            why = "it has a cluster key and we have none; set [cluster] key_file here too"
        else:
            why = (
                f"it has no cluster key, or another than ours ({self._key.fingerprint}); check its "
                "[cluster] key_file"
            )
        if certain:
            logger.warning("refused a frontend: %s%s", why, more)
        else:
            logger.info("a peer left during the handshake: a port scan, or perhaps %s%s", why, more)

    def close(self) -> None:
        """Call it before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        if self._zap is not None:
            self._zap.close(0)
