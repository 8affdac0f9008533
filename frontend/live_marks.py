"""What has happened to servers and workers: the marks on the live page.

Changes in the registry are noted whether somebody looks or not: they are rare. What only shows in
the reports of workers is noted while somebody looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pullfill.cluster_status import Reports
from pullfill.live_view import HISTORY_S, Mark
from pullfill.wire import ServerStatus, WorkerRecord, WorkerState

MAX_MARKS = 200
_SAME_S = 5.0
"""Two workers tell the time since which a server answers a little differently."""


@dataclass(slots=True)
class _Event:
    at: float
    kind: str
    who: str
    text: str = ""
    until: float | None = None


class Marks:
    """See the module. started_at: when this frontend started. clock: seconds since 1970."""

    def __init__(self, started_at: float, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._started_at = started_at
        self._events: list[_Event] = []
        self._open: dict[tuple[str, str], _Event] = {}
        self._up_since: dict[str, float] = {}

    def on_change(self, old: WorkerRecord | None, new: WorkerRecord | None) -> None:
        """Note a change in the registry (`Directory.subscribe`)."""
        now = self._clock()
        if new is None:
            assert old is not None
            self._end("drain", old.instance_id, now)
            self._end("lost", old.instance_id, now)
            self._add(_Event(now, "left", old.instance_id))
        elif old is None:
            self._add(_Event(now, "joined", new.instance_id, new.role))
        elif new.restarts > old.restarts or new.pid != old.pid:
            self._add(_Event(now, "restarted", new.instance_id))
        self._drains(new, now)

    def seen(self, reports: Reports, servers: Mapping[str, ServerStatus]) -> None:
        """Note what the reports of all workers show."""
        now = self._clock()
        here = {record.instance_id for record, _ in reports}
        # A worker may have left after it was asked, and before its report was noted here.
        for kind, who in [*self._open]:
            if kind != "outage" and who not in here:
                self._end(kind, who, now)
        for record, report in reports:
            self._drains(record, now)
            if report is None:
                self._begin("lost", record.instance_id, now, "it does not answer")
            else:
                self._end("lost", record.instance_id, now)
        for name, status in servers.items():
            self._server(name, status, now)

    def marks(self) -> tuple[Mark, ...]:
        """Return the marks of the history, oldest first. Forget older ones."""
        oldest = self._clock() - HISTORY_S
        self._forget(e for e in self._events if not _lasts(e, self._open) and _end_of(e) < oldest)
        return tuple(
            Mark(at=e.at, kind=e.kind, who=e.who, text=e.text, until=e.until)
            for e in sorted(self._events, key=lambda e: e.at)
        )

    # ---------------------------------------------------------------- inside

    def _drains(self, record: WorkerRecord | None, now: float) -> None:
        if record is not None and record.state is WorkerState.DRAINING:
            self._begin("drain", record.instance_id, now)

    def _server(self, name: str, status: ServerStatus, now: float) -> None:
        since = now - status.since_s
        if not status.up:
            self._begin("outage", name, since, status.error or "")
            return
        before = self._up_since.get(name, self._started_at)
        self._up_since[name] = since
        if ("outage", name) in self._open:
            self._end("outage", name, since)
        elif since > before + _SAME_S and since > self._started_at + 3 * _SAME_S:
            # It was away while nobody looked. When that began is not known.
            self._add(_Event(since, "outage", name, "answers again", since))

    def _begin(self, kind: str, who: str, at: float, text: str = "") -> None:
        if (kind, who) not in self._open:
            self._open[kind, who] = event = _Event(at, kind, who, text)
            self._add(event)

    def _end(self, kind: str, who: str, at: float) -> None:
        if (event := self._open.pop((kind, who), None)) is not None:
            event.until = at

    def _add(self, event: _Event) -> None:
        self._events.append(event)
        self._forget(self._events[:-MAX_MARKS])

    def _forget(self, events: Iterable[_Event]) -> None:
        gone = {id(event) for event in events}
        if gone:
            self._events = [event for event in self._events if id(event) not in gone]


def _lasts(event: _Event, still: Mapping[tuple[str, str], _Event]) -> bool:
    return still.get((event.kind, event.who)) is event


def _end_of(event: _Event) -> float:
    return event.at if event.until is None else event.until
