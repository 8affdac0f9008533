"""What the live page marks: who joined, drained, was lost, and which server was away."""

from __future__ import annotations

from typing import Any

import msgspec

from pullfill.cluster_status import Report, nats_of
from pullfill.frontend.live_marks import MAX_MARKS, Marks
from pullfill.live_view import HISTORY_S
from pullfill.wire import ServerStatus, WorkerRecord, WorkerState
from tests.support.workers import record

READY = record("decode-1", role="decode", pid=1)
UP = ServerStatus(up=True, since_s=999.0)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


Told = tuple[WorkerRecord, Report | None]


def connected(name: str, since: float, pid: int = 1, **load: Any) -> Told:
    """A worker that is connected to NATS since then, by the clock as it begins."""
    nats = ServerStatus(up=True, since_s=Clock.now - since)
    return record(name, pid=pid), Report(servers={"nats": nats}, load=load)


def look(marks: Marks, *reports: Told) -> None:
    nats = nats_of(reports)
    marks.seen(reports, {} if nats is None else {"nats": nats})


def told(marks: Marks) -> list[tuple[str, str, float, float | None]]:
    return [(m.kind, m.who, m.at, m.until) for m in marks.marks()]


def test_changes_in_the_registry_are_marks() -> None:
    clock = Clock()
    marks = Marks(0.0, clock)
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
    marks = Marks(0.0, clock)
    marks.seen([], {"nats": UP})
    away = ServerStatus(up=False, since_s=3.0, error="nats://h:1: refused")
    marks.seen([], {"nats": away})
    clock.now += 4
    marks.seen([], {"nats": msgspec.structs.replace(away, since_s=7.0)})
    assert told(marks) == [("outage", "nats", 997.0, None)], "once, and it is not over"
    clock.now += 2
    marks.seen([], {"nats": ServerStatus(up=True, since_s=0.5)})
    assert told(marks) == [("outage", "nats", 997.0, 1005.5)]
    assert marks.marks()[0].text == "nats://h:1: refused"


def test_an_outage_that_nobody_saw_is_known_by_its_end() -> None:
    clock = Clock()
    marks = Marks(0.0, clock)
    marks.seen([], {"etcd": ServerStatus(up=True, since_s=40.0)})
    assert told(marks) == [("outage", "etcd", 960.0, 960.0)]
    fresh = Marks(clock.now - 20, clock)
    fresh.seen([], {"etcd": ServerStatus(up=True, since_s=12.0)})
    assert told(fresh) == [], "it came up when we did"


def test_an_outage_of_nats_that_nobody_saw_is_told_by_workers_that_connect_again() -> None:
    marks = Marks(0.0, Clock())
    look(marks, connected("a", 100.0), connected("b", 200.0))
    look(marks, connected("a", 907.0), connected("b", 905.0))
    assert told(marks) == [("outage", "nats", 905.0, 905.0)]
    look(marks, connected("a", 906.0), connected("b", 905.5))
    assert len(told(marks)) == 1, "once"


def test_workers_that_come_go_or_miss_a_question_are_no_outage_of_nats() -> None:
    marks = Marks(0.0, Clock())
    old, young = connected("a", 100.0), connected("b", 500.0)
    look(marks, old, young)  # long after the frontend started
    look(marks, (old[0], None), young)
    look(marks, old, young)
    look(marks, (old[0], None), connected("b", 900.0))  # a's connection may be as old as before
    look(marks, old, connected("b", 900.0))
    look(marks, connected("b", 900.0))
    look(marks, connected("b", 950.0, pid=2))
    outages = [kind for kind, *_ in told(marks) if kind == "outage"]
    assert outages == []


def test_another_role_of_an_elastic_worker_connects_anew() -> None:
    marks = Marks(0.0, Clock())
    look(marks, connected("a", 100.0, elastic="decode"))
    look(marks, connected("a", 900.0, elastic="prefill"))
    worker = record("a", pid=1)
    for old, new in ((worker, None), (None, worker)) * 2:  # to the other role and back, unseen
        marks.on_change(old, new)
    look(marks, connected("a", 990.0, elastic="prefill"))
    assert {kind for kind, *_ in told(marks)} == {"left", "joined"}


def test_a_seen_outage_of_nats_is_one_mark() -> None:
    marks = Marks(0.0, Clock())
    look(marks, connected("a", 100.0), connected("b", 200.0))
    away = ServerStatus(up=False, since_s=9.0, error="refused")
    look(marks, (record("a", pid=1), None), (record("b", pid=1), Report(servers={"nats": away})))
    look(marks, connected("a", 998.0), connected("b", 999.0))
    assert [found for found in told(marks) if found[0] == "outage"] == [
        ("outage", "nats", 991.0, 998.0)
    ]


def test_a_worker_that_is_ready_again_drains_no_more() -> None:
    """As one whose engine was stuck."""
    clock = Clock()
    marks = Marks(0.0, clock)
    draining = msgspec.structs.replace(READY, state=WorkerState.DRAINING)
    marks.on_change(READY, draining)
    clock.now += 3
    marks.on_change(draining, READY)
    assert told(marks) == [("drain", "decode-1", 1000.0, 1003.0)]
    other = Marks(0.0, clock)  # it began while the worker drained
    other.seen([(draining, Report())], {})
    clock.now += 2
    other.seen([(READY, Report())], {})
    assert told(other) == [("drain", "decode-1", 1003.0, 1005.0)]


def test_one_side_of_a_worker_that_is_both_drains() -> None:
    clock = Clock()
    marks = Marks(0.0, clock)
    draining = msgspec.structs.replace(READY, state=WorkerState.DRAINING)
    pulling = msgspec.structs.replace(READY, role="prefill")
    for _ in range(2):
        marks.seen([(draining, Report()), (pulling, Report())], {})
        marks.on_change(pulling, msgspec.structs.replace(pulling, restarts=0))
    assert told(marks) == [("drain", "decode-1", 1000.0, None)]


def test_a_worker_that_does_not_answer_is_lost_until_it_does() -> None:
    clock = Clock()
    marks = Marks(0.0, clock)
    marks.seen([(READY, None)], {})
    clock.now += 3
    marks.seen([(READY, Report())], {})
    assert told(marks) == [("lost", "decode-1", 1000.0, 1003.0)]


def test_a_report_that_is_late_marks_nobody_who_has_left() -> None:
    clock = Clock()
    marks = Marks(0.0, clock)
    draining = msgspec.structs.replace(READY, state=WorkerState.DRAINING)
    marks.on_change(None, READY)
    marks.on_change(draining, None)
    marks.seen([(draining, None)], {})  # was asked before it left
    clock.now += 1
    marks.seen([], {})
    assert [(kind, until) for kind, _, _, until in told(marks) if kind != "joined"] == [
        ("left", None), ("drain", 1001.0), ("lost", 1001.0),
    ]  # fmt: skip
    clock.now += HISTORY_S + 1
    assert told(marks) == []


def test_marks_are_bounded_and_what_lasts_is_kept() -> None:
    clock = Clock()
    marks = Marks(0.0, clock)
    marks.seen([], {"nats": ServerStatus(up=False, since_s=0.0, error="e")})
    clock.now += HISTORY_S + 1
    assert [kind for kind, *_ in told(marks)] == ["outage"]
    for _ in range(2 * MAX_MARKS):
        marks.on_change(None, READY)
    assert len(marks.marks()) == MAX_MARKS
    clock.now += HISTORY_S + 1
    assert told(marks) == []
