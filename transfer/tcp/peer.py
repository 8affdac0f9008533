"""The prefill worker's side of tcp."""

from __future__ import annotations

from pullfill.net.security import ClusterKey
from pullfill.transfer.stream.peer import StreamTransport
from pullfill.transfer.stream.socket_connection import STALL_S
from pullfill.transfer.tcp.backend import TcpKind


class TcpTransport(StreamTransport):
    """PeerTransport to regions of any host whose KV port answers."""

    def __init__(self, key: ClusterKey | None = None, *, stall_s: float = STALL_S) -> None:
        super().__init__(TcpKind(), key, stall_s=stall_s)
