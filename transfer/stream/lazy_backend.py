"""A backend that makes something costly with its first batch: a communicator, an agent.

It keeps this resource while batches come. It gives it back after any fault, and when it was idle
for a while.
"""

from __future__ import annotations

import itertools
import logging
import select
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from pullfill.errors import TransferFailed
from pullfill.transfer.stream.backend_contract import Backend
from pullfill.transfer.stream.socket_connection import SocketConnection

log = logging.getLogger(__name__)

IDLE_S = 60.0
"""A resource that is idle for so long is given back."""


class _Resource(Protocol):
    def close(self) -> None: ...


R = TypeVar("R", bound=_Resource)


class LazyBackend(Backend, Generic[R]):
    """Keeps `resource`. Every call on the backend holds `_held`."""

    def __init__(self, reaper: Reaper, idle_s: float, setup: bytes = b"") -> None:
        self.setup = setup
        self.resource: R | None = None
        self._reaper = reaper
        self._idle_s = idle_s
        self._held = threading.Lock()
        self._stop = threading.Event()
        self._connection: SocketConnection | None = None
        self._used = 0.0

    def start(self, connection: SocketConnection, theirs: bytes) -> None:
        self._connection = connection

    def interrupt(self) -> None:
        self._stop.set()

    def close(self) -> None:
        self._reaper.forget(self)
        with self._held:
            self._drop()

    def release_if_idle(self, now: float) -> None:
        """Give the resource back if it was not used for `idle_s` before `now` (monotonic). Never
        waits: during a call the resource is in use. Any thread."""
        if not self._held.acquire(blocking=False):
            return
        try:
            if self.resource is not None and now - self._used > self._idle_s:
                log.debug("giving back an idle %s", type(self.resource).__name__)
                self._drop()
        finally:
            self._held.release()

    def _keep(self, resource: R) -> R:
        """Keep what was just made."""
        self.resource, self._used = resource, time.monotonic()
        self._reaper.watch(self)
        return resource

    def _drop(self) -> None:
        resource, self.resource = self.resource, None
        if resource is not None:
            resource.close()

    def _watch(self, look_every: int = 1) -> Callable[[], None]:
        """A function to call again and again during a wait. It raises TransferFailed after an
        interrupt, when the peer has left, and when the stall time is over.

        look_every: look at the connection and the clock once in so many calls."""
        assert self._connection is not None
        stall_s, poll = self._connection.stall_s, select.poll()
        poll.register(self._connection.fd, select.POLLRDHUP)
        until = time.monotonic() + stall_s
        calls = itertools.count(1)

        def watch() -> None:
            if self._stop.is_set():
                raise TransferFailed("interrupted")
            if next(calls) % look_every:
                return
            if poll.poll(0):
                raise TransferFailed("the peer is gone")
            if time.monotonic() > until:
                raise TransferFailed(f"the peer makes no progress for {stall_s:g} s")

        return watch


class Reaper:
    """Asks backends at intervals to give back what is idle. Thread-safe.

    Its thread is there only while something is watched."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._changed = threading.Condition()
        self._watched: set[LazyBackend[Any]] = set()
        self._thread: threading.Thread | None = None

    def watch(self, backend: LazyBackend[Any]) -> None:
        """Ask this backend from now on, until `forget`. Idempotent."""
        with self._changed:
            self._watched.add(backend)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kv-idle", daemon=True)
                thread.start()  # raises RuntimeError if there is no room for one
                self._thread = thread

    def forget(self, backend: LazyBackend[Any]) -> None:
        """Idempotent. A call to the backend may still be under way."""
        with self._changed:
            self._watched.discard(backend)
            if not self._watched:
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._watched, self._every_s)
                if not self._watched:
                    self._thread = None
                    return
                watched = list(self._watched)
            now = time.monotonic()
            for backend in watched:
                try:
                    backend.release_if_idle(now)
                except Exception:
                    log.exception("could not give back what is idle")
