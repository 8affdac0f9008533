"""Tells frontends this worker's load when it changes, at most every LOAD_S. Engine thread."""

from __future__ import annotations

from collections.abc import Callable

from pullfill import wire
from pullfill.decode_worker.request_server import RequestServer
from pullfill.engine import front_wire
from pullfill.engine.front_wire import LOAD_S, LoadReport
from pullfill.engine.load import EngineLoad


class LoadReports:
    """Sends a LoadReport to all frontends.

    wake_after: has the engine's loop take a turn after so many seconds."""

    def __init__(
        self, load: EngineLoad, server: RequestServer, wake_after: Callable[[float], object]
    ) -> None:
        self._load = load
        self._server = server
        self._wake_after = wake_after
        self._told: LoadReport | None = None
        self._mark: tuple[int, ...] = ()
        self._due = 0.0
        self._woken = False

    def current(self) -> LoadReport:
        """Return the load as it is now, for a new frontend."""
        return self._load.read(self._server.draining)

    def look(self, now: float) -> None:
        """Send the load if it has changed. Cheap; called in each turn of the engine's loop.

        now: seconds of a monotonic clock."""
        mark = (*self._load.mark(), self._server.draining)
        if now < self._due:
            if mark != self._mark and not self._woken:
                # The loop may sleep for a second before its next turn.
                self._woken = True
                self._wake_after(self._due - now)
            return
        self._woken = False
        if mark == self._mark and not mark[0]:
            return
        self._mark = mark
        self._due = now + LOAD_S
        report = self.current()
        if report != self._told:
            self._told = report
            self._server.tell(front_wire.LOAD, wire.encode(report))
