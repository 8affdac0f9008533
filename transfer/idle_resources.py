"""Gives back what backends hold and have not used for a while (a communicator, an agent).

A `Reaper` has one thread while it watches something. It asks every watched thing at intervals. The
thing decides itself, and must never block for long.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

log = logging.getLogger(__name__)


class Idle(Protocol):
    """Something that can be idle."""

    def release_if_idle(self, now: float) -> None:
        """Give back what was not used for long enough at `now` (monotonic), but nothing that is in
        use at this moment. Any thread."""
        ...


class Reaper:
    """Thread-safe. Keeps a reference to what it watches until `forget`."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._changed = threading.Condition()
        self._watched: set[Idle] = set()
        self._thread: threading.Thread | None = None

    def watch(self, thing: Idle) -> None:
        """Ask `thing` from now on. Idempotent."""
        with self._changed:
            self._watched.add(thing)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kv-idle", daemon=True)
                self._thread.start()

    def forget(self, thing: Idle) -> None:
        """Idempotent. A call to `thing` may still be under way."""
        with self._changed:
            self._watched.discard(thing)
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
            for thing in watched:
                try:
                    thing.release_if_idle(now)
                except Exception:
                    log.exception("could not give back what is idle")
