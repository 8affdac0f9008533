"""What has happened to servers and workers: the marks on the live page.

Changes in the registry are noted whether somebody looks or not: they are rare. What only shows in
the reports of workers is noted while somebody looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pullfill.snapshot import HISTORY_S, UNTOLD, Cluster, Mark
from pullfill.wire import WorkerRecord, WorkerState

MAX_MARKS = 200


@dataclass(slots=True)
class _Event:
    at: float
    kind: str
    who: str
    text: str = ""
    until: float | None = None


class Marks:
    """See the module. clock: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._events: list[_Event] = []
        self._open: dict[tuple[str, str], _Event] = {}

    def on_change(self, old: WorkerRecord | None, new: WorkerRecord | None) -> None:
        """Note a change in the registry (`Directory.subscribe`)."""
        now = self._clock()
        if new is None:
            assert old is not None
            self._end("drain", old.instance_id, now)
            self._end("lost", old.instance_id, now)
            self._add(_Event(now, "left", old.instance_id))
            return
        if old is None:
            self._add(_Event(now, "joined", new.instance_id, new.role))
        elif new.restarts > old.restarts or new.pid != old.pid:
            self._add(_Event(now, "restarted", new.instance_id))
        if new.state is WorkerState.DRAINING:
            self._begin("drain", new.instance_id, now)
        elif old is not None and old.state is WorkerState.DRAINING:
            self._end("drain", new.instance_id, now)

    def seen(self, cluster: Cluster) -> None:
        """Note which workers and servers do not answer."""
        now = self._clock()
        lost = {row.instance_id for row in cluster.workers if row.state == WorkerState.LOST}
        for kind, who in [*self._open]:
            # A worker may also have left after it was asked.
            if kind == "lost" and who not in lost:
                self._end(kind, who, now)
        for who in lost:
            self._begin("lost", who, now, "it does not answer")
        for name, status in cluster.servers.items():
            if status.up:
                self._end("outage", name, now - status.since_s)
            elif status.error != UNTOLD:
                self._begin("outage", name, now - status.since_s, status.error or "")

    def marks(self) -> tuple[Mark, ...]:
        """Return the marks of the history, oldest first. Forget older ones."""
        oldest, lasting = self._clock() - HISTORY_S, {id(each) for each in self._open.values()}
        self._events = [
            event
            for event in self._events
            if id(event) in lasting or (event.until or event.at) >= oldest
        ]
        ordered = sorted(self._events, key=lambda event: event.at)
        return tuple(msgspec.convert(event, Mark, from_attributes=True) for event in ordered)

    # ---------------------------------------------------------------- inside

    def _begin(self, kind: str, who: str, at: float, text: str = "") -> None:
        if (kind, who) not in self._open:
            self._open[kind, who] = event = _Event(at, kind, who, text)
            self._add(event)

    def _end(self, kind: str, who: str, at: float) -> None:
        if (event := self._open.pop((kind, who), None)) is not None:
            event.until = at

    def _add(self, event: _Event) -> None:
        self._events = [*self._events, event][-MAX_MARKS:]
