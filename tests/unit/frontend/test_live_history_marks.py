"""What the live page marks: who joined, drained, was lost, and which server was away."""

from __future__ import annotations

import msgspec

from pullfill.frontend.live.history import MAX_MARKS, Marks
from pullfill.snapshot import HISTORY_S, Cluster, WorkerRow
from pullfill.wire import ServerStatus, WorkerRecord, WorkerState
from tests.support.workers import record

READY = record("decode-1", role="decode", pid=1)
LOST = msgspec.structs.replace(READY, state=WorkerState.LOST)
UP = ServerStatus(up=True, since_s=999.0)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def seen(*rows: WorkerRecord, **nats: ServerStatus) -> Cluster:
    """The cluster of workers that do not answer, and NATS."""
    workers = tuple(
        WorkerRow(instance_id=row.instance_id, role=row.role, state=row.state) for row in rows
    )
    return Cluster(workers=workers, servers=nats)


def told(marks: Marks) -> list[tuple[str, str, float, float | None]]:
    return [(m.kind, m.who, m.at, m.until) for m in marks.marks()]


def test_changes_in_the_registry_are_marks() -> None:
    clock = Clock()
    marks = Marks(clock)
    marks.on_change(None, READY)
    clock.now += 1
    again = msgspec.structs.replace(READY, pid=2)
    marks.on_change(READY, again)
    clock.now += 1
    draining = msgspec.structs.replace(again, state=WorkerState.DRAINING)
    marks.on_change(again, draining)
    clock.now += 7
    marks.on_change(draining, None)
    assert told(marks) == [
        ("joined", "decode-1", 1000.0, None),
        ("restarted", "decode-1", 1001.0, None),
        ("drain", "decode-1", 1002.0, 1009.0),
        ("left", "decode-1", 1009.0, None),
    ]


def test_an_outage_lasts_until_the_server_answers() -> None:
    clock = Clock()
    marks = Marks(clock)
    marks.seen(seen(nats=UP))
    away = ServerStatus(up=False, since_s=3.0, error="nats://h:1: refused")
    marks.seen(seen(nats=away))
    clock.now += 4
    marks.seen(seen(nats=msgspec.structs.replace(away, since_s=7.0)))
    assert told(marks) == [("outage", "nats", 997.0, None)], "once, and it is not over"
    clock.now += 2
    marks.seen(seen(nats=ServerStatus(up=True, since_s=0.5)))
    assert told(marks) == [("outage", "nats", 997.0, 1005.5)]
    assert marks.marks()[0].text == "nats://h:1: refused"


def test_a_worker_that_is_ready_again_drains_no_more() -> None:
    """As one whose engine was stuck."""
    clock = Clock()
    marks = Marks(clock)
    draining = msgspec.structs.replace(READY, state=WorkerState.DRAINING)
    marks.on_change(READY, draining)
    clock.now += 3
    marks.on_change(draining, READY)
    assert told(marks) == [("drain", "decode-1", 1000.0, 1003.0)]


def test_a_worker_that_does_not_answer_is_lost_until_it_does() -> None:
    clock = Clock()
    marks = Marks(clock)
    marks.seen(seen(LOST))
    clock.now += 3
    marks.seen(seen(READY))
    assert told(marks) == [("lost", "decode-1", 1000.0, 1003.0)]


def test_a_report_that_is_late_marks_nobody_who_has_left() -> None:
    clock = Clock()
    marks = Marks(clock)
    draining = msgspec.structs.replace(READY, state=WorkerState.DRAINING)
    marks.on_change(None, READY)
    marks.on_change(draining, None)
    marks.seen(seen(LOST))  # was asked before it left
    clock.now += 1
    marks.seen(seen())
    assert [(kind, until) for kind, _, _, until in told(marks) if kind != "joined"] == [
        ("left", None), ("lost", 1001.0),
    ]  # fmt: skip
    clock.now += HISTORY_S + 1
    assert told(marks) == []


def test_marks_are_bounded_and_what_lasts_is_kept() -> None:
    clock = Clock()
    marks = Marks(clock)
    marks.seen(seen(nats=ServerStatus(up=False, since_s=0.0, error="e")))
    clock.now += HISTORY_S + 1
    assert [kind for kind, *_ in told(marks)] == ["outage"]
    for _ in range(2 * MAX_MARKS):
        marks.on_change(None, READY)
    assert len(marks.marks()) == MAX_MARKS
    clock.now += HISTORY_S + 1
    assert told(marks) == []
