"""The owner's side of the stream transports: a port, and a thread for each peer that copies.

Life: made over the memories of all ranks and their fence → `start` listens → a thread serves one
peer until it leaves, or asks for nothing in REST_S → a thread watches all that rest → `close` ends
all. Owns the listening socket and the threads; borrows the memories and the backends' kinds.

So a fleet of many workers costs a thread for each peer of the last second, and two files for each
connection.

The thread that moves the bytes is ours. It holds the fence meanwhile, through a hold (an open file
description) of its own. So the fence file proves a revoke here too. A revoke may find that one of
our threads holds the fence and waits for a peer that says nothing. Then `interrupt` ends that
receive, and the next `try_revoke` proves. A stopped or dead peer keeps nothing in quarantine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time

from pullfill.errors import AuthFailed, BadMessage, NotNow, PullfillError, TransferFailed
from pullfill.net import this_host as machine
from pullfill.net.security import ClusterKey
from pullfill.runtime.metrics import AUTH_REFUSED, KV_CONNECTIONS, KV_REFUSED, STALE_REFUSED
from pullfill.transfer.stream import hello
from pullfill.transfer.stream.serving import Offer, ServedPeer
from pullfill.transfer.stream.socket_connection import STALL_S, SocketConnection
from pullfill.wire import FenceToken

log = logging.getLogger(__name__)

FILES_EACH = 2
"""File descriptors of one connection: its socket and its fence hold."""
FILES_SPARED = 256
"""File descriptors that KV connections must leave for the rest of the process."""
MAX_STRANGERS = 64
"""Connections, at most, that have not sent their hello yet."""
STRANGERS_S = 1.0
"""A further connection waits until one of them has sent its hello, or has been silent for so long.
A silent one is ended, so it keeps nobody out. A fleet that connects at the same time is served one
after the other."""
REST_S = 1.0
"""A peer that asks for nothing in this time gives its thread back until it asks again."""
PATIENCE_S = 0.02
"""A batch of a peer that is alive ends within this time. A revoke interrupts one that takes longer.
This decides when a connection is given up. It proves nothing."""


class StreamServer:
    """Serves every rank's memory on one port. Thread-safe."""

    def __init__(
        self, offer: Offer, *, key: ClusterKey | None = None, stall_s: float = STALL_S
    ) -> None:
        self._offer = offer
        self._key = key
        self._stall_s = stall_s
        self._mutex = threading.Lock()
        self._fewer_strangers = threading.Condition(self._mutex)
        self._peers: set[ServedPeer] = set()
        self._strangers: dict[SocketConnection, float] = {}  # and when each came, in this order
        self._threads: set[threading.Thread] = set()
        self._resting: dict[int, tuple[ServedPeer, SocketConnection, str]] = {}
        self._epoll: select.epoll
        self._bell = -1
        self._watching: threading.Thread | None = None
        self._closed = False
        self._accepting: threading.Thread | None = None
        self._listening: socket.socket | None = None
        self._said = 0.0
        self.address = ""

    def start(self, host: str, port: int = 0) -> None:
        """Listen. Raises ConfigError when the address cannot be had."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listening = socket.create_server((host, port), family=family, backlog=4096)
        except (OSError, OverflowError) as exc:
            raise NotNow(f"cannot listen for KV on {host}:{port}: {exc}") from exc
        self._epoll, self._bell = select.epoll(), os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self.address = f"tcp://{host}:{self._listening.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._watching = threading.Thread(target=self._watch, name="kv-resting", daemon=True)
        self._accepting.start()
        self._watching.start()

    @property
    def connections(self) -> int:
        """How many peers have sent their hello."""
        return len(self._peers)

    def interrupt(self, token: FenceToken) -> None:
        """A revoke of `token` was not proved: end our batches under it that take too long. Never
        blocks."""
        now = time.monotonic()
        with self._mutex:
            inside = [peer for peer in self._peers if peer.inside == token]
        for peer in inside:
            peer.hurry(token, now, PATIENCE_S)

    def close(self) -> None:
        """Tell every peer and end every thread. Idempotent. The fence refuses new batches already,
        or is about to; what is under way is interrupted."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            self._fewer_strangers.notify_all()
        if self._listening is not None:
            with contextlib.suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)
        if self._accepting is not None:
            self._accepting.join(5.0)  # then every thread that there is has been started
        with self._mutex:
            peers, strangers = list(self._peers), list(self._strangers)
        for peer in peers:
            peer.end()
        for connection in strangers:
            connection.interrupt()
        if self._watching is not None:
            os.eventfd_write(self._bell, 1)
            self._watching.join(5.0)  # those that rest have a thread again: it says goodbye
            self._epoll.close()
            os.close(self._bell)
        with self._mutex:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(5.0)

    # ------------------------------------------------------------------ threads

    def _accept(self) -> None:
        listening = self._listening
        assert listening is not None
        with listening:
            while not self._closed:
                try:
                    sock, address = listening.accept()
                except OSError as exc:
                    if self._closed:
                        return
                    KV_REFUSED.labels("open_files").inc()
                    self._complain(f"cannot accept KV connections: {exc}")
                    time.sleep(0.05)  # no descriptor left: others may be given back
                    continue
                self._begin(sock, str(address[0]))

    def _begin(self, sock: socket.socket, host: str) -> None:
        try:
            connection = SocketConnection(sock, hello.HELLO_S)
        except OSError as exc:
            self._complain(f"refused a KV connection from {host}: {exc}")
            sock.close()
            return
        try:
            with self._mutex:
                self._check_room()
                self._strangers[connection] = time.monotonic()
        except TransferFailed as exc:
            self._complain(f"refused a KV connection from {host}: {exc}")
            connection.close()
        else:
            self._give_thread(None, connection, host)

    def _give_thread(
        self, peer: ServedPeer | None, connection: SocketConnection, host: str
    ) -> None:
        thread = threading.Thread(
            target=self._serve, args=(peer, connection, host), name=f"kv-{host}", daemon=True
        )
        with self._mutex:
            self._threads.add(thread)
        try:
            thread.start()  # waits until it runs, so not under the mutex
        except RuntimeError as exc:
            KV_REFUSED.labels("threads").inc()
            self._complain(f"ended a KV connection from {host}: {exc}")
            try:
                self._end(peer, connection, thread)
            except Exception:
                log.exception("a KV connection from %s could not be closed", host)

    def _watch(self) -> None:
        """Watch the peers that rest. One that sends something, or closes, gets a thread again."""
        while True:
            for fd, _ in self._epoll.poll():
                if fd != self._bell:
                    with self._mutex:
                        self._epoll.unregister(fd)
                        resting = self._resting.pop(fd)
                    self._give_thread(*resting)
            with self._mutex:
                if self._closed and not self._resting:
                    return

    def _rest(self, peer: ServedPeer, connection: SocketConnection, host: str) -> bool:
        """Let the thread of `_watch` wait for the peer's next message, so that the caller can end.

        Returns False if the server is closing. Then the caller must wait for the message itself."""
        with self._mutex:
            if not self._closed:
                self._epoll.register(connection.fd, select.EPOLLIN)
                self._resting[connection.fd] = peer, connection, host
                self._threads.discard(threading.current_thread())
            return not self._closed

    def _check_room(self) -> None:
        """Raise TransferFailed if there is no room for another connection. The caller holds the
        mutex."""
        held = len(self._peers) + len(self._strangers)
        most = (machine.open_files() - FILES_SPARED) // FILES_EACH
        if held >= most:
            KV_REFUSED.labels("open_files").inc()
            raise TransferFailed(
                f"{held} KV connections are all that the limit of {machine.open_files()} open "
                "files allows: raise it (ulimit -n) and restart this worker"
            )
        while len(self._strangers) >= MAX_STRANGERS and not self._closed:
            oldest, came = next(iter(self._strangers.items()))
            left = came + STRANGERS_S - time.monotonic()
            if left > 0:
                self._fewer_strangers.wait(left)
                continue
            KV_REFUSED.labels("strangers").inc()
            self._complain(
                f"{MAX_STRANGERS} KV connections have sent no hello: ending the oldest one to let "
                "others in. Check who connects to the KV port"
            )
            del self._strangers[oldest]
            oldest.interrupt()  # its thread ends it
        if self._closed:
            raise TransferFailed("this worker leaves")

    def _end(
        self, peer: ServedPeer | None, connection: SocketConnection, thread: threading.Thread
    ) -> None:
        if peer is not None:
            peer.close()
        connection.close()
        with self._mutex:
            self._strangers.pop(connection, None)
            self._fewer_strangers.notify_all()
            if peer is not None:
                self._peers.discard(peer)
                KV_CONNECTIONS.dec()
            self._threads.discard(thread)

    def _serve(self, peer: ServedPeer | None, connection: SocketConnection, host: str) -> None:
        """Serve a peer, or a stranger who becomes one, until it leaves or rests."""
        try:
            if peer is None:
                peer = self._admit(connection)
                peer.start()
            while peer.run(REST_S):
                if self._rest(peer, connection, host):
                    return
        except AuthFailed as exc:
            AUTH_REFUSED.labels("kv").inc()
            self._complain(f"refused a KV connection from {host}: {exc}")
        except BadMessage as exc:
            STALE_REFUSED.labels("message").inc()
            self._complain(f"closed a KV connection from {host}: {exc}")
        except PullfillError as exc:
            log.debug("KV connection from %s: %s", host, exc)
        except Exception:
            log.exception("a KV connection from %s failed", host)
        self._end(peer, connection, threading.current_thread())

    def _admit(self, connection: SocketConnection) -> ServedPeer:
        """Shake hands. Whoever is refused is told why."""
        try:
            said = hello.accept(connection, self._key)
            peer = ServedPeer(self._offer, connection, said)
        except (PullfillError, OSError) as exc:
            if not isinstance(exc, TransferFailed):
                hello.refuse(connection, exc)
            raise
        connection.set_stall(self._stall_s)
        with self._mutex:
            self._strangers.pop(connection, None)
            self._fewer_strangers.notify_all()
            self._peers.add(peer)
            KV_CONNECTIONS.inc()
            leaving = self._closed
        if leaving:
            peer.end()
        return peer

    def _complain(self, text: str) -> None:
        """Log a warning, at most one a second: strangers can come as often as they like."""
        now = time.monotonic()
        if now - self._said >= 1.0:
            self._said = now
            log.warning("%s", text)
