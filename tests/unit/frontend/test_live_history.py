"""The history of the live page: steps, percentiles, marks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pullfill.frontend.live.history import MAX_MARKS, Marks, Series
from pullfill.snapshot import HISTORY_S, STEP_S, Cluster, Ended, WorkerPoint, WorkerRow
from pullfill.wire import ServerStatus, WorkerRecord, WorkerState
from tests.support.workers import record

NOW = 10_000.0


def ended(at: float | None = NOW, **fields: Any) -> Ended:
    return Ended(**({"id": "r", "at": at, "path": "remote", "reason": "long"} | fields))


def test_requests_count_in_the_step_in_which_they_ended() -> None:
    series = Series()
    series.ended(ended(NOW - STEP_S, ttft_ms=10.0, itl_ms=2.0, good=True))
    series.ended(ended(NOW - STEP_S + 1, ttft_ms=30.0, good=False, path="local", reason="short"))
    series.ended(ended(None))
    before, now = series.points(NOW + 1, 2)
    assert (before.done, before.good, now.done) == (2, 1, 0)
    assert before.decisions == {"remote long": 1, "local short": 1}
    assert (before.ttft_ms, before.itl_ms) == ((10.0, 30.0), (2.0, 2.0))
    assert (before.seconds, now.seconds) == (STEP_S, 1.0)
    assert (before.backlog_s, before.tokens_per_s) == (None, None), "nobody looked"


def test_what_was_seen_is_in_its_step_until_it_is_older_than_the_history() -> None:
    series = Series()
    for second in range(1, 5):
        series.sampled(NOW + second, 1.0, 7.0, 0.5, {"d": WorkerPoint(0.25, 3, 1, 7.0)})
    (point,) = series.points(NOW + 4, 1)
    assert point.tokens_per_s == pytest.approx(7.0)
    assert point.backlog_s == 0.5
    assert point.workers == {"d": WorkerPoint(0.25, 3, 1, 7.0)}
    assert series.points(NOW + HISTORY_S + STEP_S) == ()
    assert series.points(NOW) == (), "not only left out"


def test_the_figures_are_of_the_last_minute() -> None:
    series = Series()
    for row in (ended(NOW - 61, ttft_ms=9e9), ended(NOW - 30, ttft_ms=5.0, good=True)):
        series.ended(row)
    now = series.now(NOW, 12.0)
    assert now.ttft_ms == (5.0, 5.0)
    assert now.itl_ms is None
    assert now.done_per_s == now.good_per_s == 1 / 60
    assert now.tokens_per_s == 12.0


# --------------------------------------------------------------------------- marks


READY = record("decode-1", role="decode", pid=1)
DRAINING = msgspec.structs.replace(READY, state=WorkerState.DRAINING)
AWAY = ServerStatus(up=False, since_s=3.0, error="nats://h:1: refused")


class Rig:
    """Marks with a clock of their own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.marks = Marks(lambda: self.now)

    def change(self, old: WorkerRecord | None, new: WorkerRecord | None, after_s: float) -> None:
        self.marks.on_change(old, new)
        self.now += after_s

    def seen(self, *states: WorkerState, **servers: ServerStatus) -> None:
        """A look at decode-1, if it has a state, and at servers."""
        row = (WorkerRow(instance_id="decode-1", role="decode", state=state) for state in states)
        self.marks.seen(Cluster(workers=tuple(row), servers=servers))

    def told(self) -> list[tuple[str, str, float, float | None]]:
        return [(m.kind, m.who, m.at, m.until) for m in self.marks.marks()]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_changes_in_the_registry_are_marks(rig: Rig) -> None:
    again = msgspec.structs.replace(READY, pid=2)
    rig.change(None, READY, 1)
    rig.change(READY, again, 1)
    rig.change(again, msgspec.structs.replace(DRAINING, pid=2), 7)
    rig.change(DRAINING, None, 0)
    assert rig.told() == [
        ("joined", "decode-1", 1000.0, None),
        ("restarted", "decode-1", 1001.0, None),
        ("drain", "decode-1", 1002.0, 1009.0),
        ("left", "decode-1", 1009.0, None),
    ]


def test_an_outage_lasts_until_the_server_answers(rig: Rig) -> None:
    rig.seen(nats=AWAY)
    rig.now += 4
    rig.seen(nats=msgspec.structs.replace(AWAY, since_s=7.0))
    assert rig.told() == [("outage", "nats", 997.0, None)], "once, and it is not over"
    rig.now += 2
    rig.seen(nats=ServerStatus(up=True, since_s=0.5))
    assert rig.told() == [("outage", "nats", 997.0, 1005.5)]
    assert rig.marks.marks()[0].text == "nats://h:1: refused"


def test_a_drain_or_a_loss_may_end(rig: Rig) -> None:
    """As of a worker whose engine was stuck."""
    rig.seen(WorkerState.LOST)
    rig.change(READY, DRAINING, 3)
    rig.change(DRAINING, READY, 0)
    rig.seen(WorkerState.READY)
    times = ("decode-1", 1000.0, 1003.0)
    assert rig.told() == [("drain", *times), ("lost", *times)]


def test_a_report_that_is_late_marks_nobody_who_has_left(rig: Rig) -> None:
    rig.change(DRAINING, None, 0)
    rig.seen(WorkerState.LOST)  # was asked before it left
    rig.now += 1
    rig.seen()
    assert [(kind, until) for kind, _, _, until in rig.told()] == [("left", None), ("lost", 1001.0)]


def test_marks_are_bounded_and_what_lasts_is_kept(rig: Rig) -> None:
    rig.seen(nats=AWAY)
    rig.now += HISTORY_S + 1
    for _ in range(2 * MAX_MARKS):
        rig.change(None, READY, 0)
    assert len(rig.marks.marks()) == MAX_MARKS + 1
    rig.now += HISTORY_S + 1
    assert [kind for kind, *_ in rig.told()] == ["outage"]
