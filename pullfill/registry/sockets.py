"""The sockets of one process's session with etcd: keep-alive on them, and none left at the end.

When aiohttp closes an encrypted connection, it tells the server and waits for the answer, up to
half a minute. It forgets such a connection, so closing the session does not end it. So this
connector remembers every socket that it made.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import aiohttp

END_S = 0.5


class EtcdConnector(aiohttp.TCPConnector):
    """As many connections as are asked for. The session that owns it closes it."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        super().__init__(limit=0, socket_factory=self._make, ssl=True if tls is None else tls)
        self._sockets: WeakSet[socket.socket] = WeakSet()

    async def close(self, *, abort_ssl: bool = False) -> None:
        """Close all sockets. Takes a few turns of the loop, END_S at most."""
        await super().close(abort_ssl=abort_ssl)
        for sock in self.open_sockets():
            with suppress(OSError):  # not connected yet, or just gone
                sock.shutdown(socket.SHUT_RDWR)  # its transport reads the end and closes it
        give_up = time.monotonic() + END_S
        while self.open_sockets() and time.monotonic() < give_up:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)

    def open_sockets(self) -> list[socket.socket]:
        return [sock for sock in self._sockets if sock.fileno() >= 0]

    def _make(self, address: Any) -> socket.socket:
        """Make a socket whose kernel notices a vanished server in about 20 s."""
        family, kind, proto, _, _ = address
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._sockets.add(sock)
        return sock
