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
NATS = "nats"
_SAME_S = 5.0
"""The same connection is told as a little older or younger each time."""


@dataclass(slots=True)
class _Event:
    at: float
    kind: str
    who: str
    text: str = ""
    until: float | None = None


@dataclass(slots=True, frozen=True)
class _Connection:
    """A worker's connection to NATS. since: when it began.

    process: its pid, and its roles if it is elastic: each role has a connection of its own."""

    process: tuple[int, object]
    since: float


class Marks:
    """See the module. started_at: when this frontend started. clock: seconds since 1970."""

    def __init__(self, started_at: float, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._started_at = started_at
        self._events: list[_Event] = []
        self._open: dict[tuple[str, str], _Event] = {}
        self._up_since: dict[str, float] = {}
        self._connections: dict[str, _Connection] = {}

    def on_change(self, old: WorkerRecord | None, new: WorkerRecord | None) -> None:
        """Note a change in the registry (`Directory.subscribe`)."""
        now = self._clock()
        if new is None:
            assert old is not None
            self._end("drain", old.instance_id, now)
            self._end("lost", old.instance_id, now)
            self._connections.pop(old.instance_id, None)
            self._add(_Event(now, "left", old.instance_id))
        elif old is None:
            self._connections.pop(new.instance_id, None)
            self._add(_Event(now, "joined", new.instance_id, new.role))
        elif new.restarts > old.restarts or new.pid != old.pid:
            self._add(_Event(now, "restarted", new.instance_id))
        if new is not None and new.state is WorkerState.DRAINING:
            self._begin("drain", new.instance_id, now)
        elif new is not None and old is not None and old.state is WorkerState.DRAINING:
            self._end("drain", new.instance_id, now)

    def seen(self, reports: Reports, servers: Mapping[str, ServerStatus]) -> None:
        """Note what the reports of all workers show."""
        now = self._clock()
        here = {record.instance_id for record, _ in reports}
        # A worker that is both has two records, and maybe only one of them drains.
        drain = {r.instance_id for r, _ in reports if r.state is WorkerState.DRAINING}
        # A worker may have left after it was asked, and before its report was noted here.
        for kind, who in [*self._open]:
            if kind != "outage" and who not in (drain if kind == "drain" else here):
                self._end(kind, who, now)
        for record, report in reports:
            if record.instance_id in drain:
                self._begin("drain", record.instance_id, now)
            if report is None:
                self._begin("lost", record.instance_id, now, "it does not answer")
            else:
                self._end("lost", record.instance_id, now)
        self._reconnected(reports, now)
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

    def _reconnected(self, reports: Reports, now: float) -> None:
        """Mark an outage of NATS that nobody saw.

        There was one if the worker with the oldest connection had an older one before. That the
        oldest connection is a younger one now says nothing: the worker that had it may have left.
        A worker that does not answer this time counts with the connection that it had."""
        before, self._connections = self._connections, {}
        for record, report in reports:
            who = record.instance_id
            nats = None if report is None else report.servers.get(NATS)
            if report is None and who in before:
                self._connections[who] = before[who]
            elif report is not None and nats is not None and nats.up:
                process = (record.pid, report.load.get("elastic"))
                self._connections[who] = _Connection(process, now - nats.since_s)
        if not self._connections or ("outage", NATS) in self._open:
            return
        who, oldest = min(self._connections.items(), key=lambda item: item[1].since)
        known = before.get(who, oldest)
        if known.process == oldest.process and oldest.since > known.since + _SAME_S:
            self._came_back(NATS, oldest.since)

    def _server(self, name: str, status: ServerStatus, now: float) -> None:
        since = now - status.since_s
        if not status.up:
            self._begin("outage", name, since, status.error or "")
            return
        before = self._up_since.get(name, self._started_at)
        self._up_since[name] = since
        if ("outage", name) in self._open:
            self._end("outage", name, since)
        elif name != NATS and since > max(before + _SAME_S, self._started_at + 3 * _SAME_S):
            self._came_back(name, since)

    def _came_back(self, name: str, since: float) -> None:
        """The server was away while nobody looked. When that began is not known."""
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
