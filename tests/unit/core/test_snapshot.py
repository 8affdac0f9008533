"""What workers report of servers and queue, put together; and that it is told in time."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pullfill.runtime.health import ServerHealth
from pullfill.snapshot import LOST, NOT_CLAIMED, NOT_LINKED, UNTOLD, Report, cluster_of, read_report
from pullfill.wire import ServerStatus, WorkerRecord
from tests.support.fakes import FakeClock
from tests.support.workers import record

UP = {"up": True, "since_s": 50.0, "error": None}
AWAY = {"up": False, "since_s": 12.4, "error": "nats://h:1: refused"}
ETCD = ServerStatus(up=True, since_s=1.0)


def said(nats: dict[str, Any] | None = UP, **more: Any) -> Report:
    body = {"load": {}, "servers": {"nats": nats, "etcd": UP} if nats else {}, **more}
    report = read_report(json.dumps(body).encode())
    assert report is not None
    return report


def decode(report: Report | None) -> tuple[WorkerRecord, Report | None]:
    return record("decode-1"), report


def prefill(report: Report | None) -> tuple[WorkerRecord, Report | None]:
    return record("prefill-1"), report


LINKED = {"prefill_workers": ["prefill-1"]}
QUEUE = {"depth_jobs": 7, "depth_tokens": 9, "in_flight": 5, "oldest_age_s": 2.0, "age_s": 0.3}


def test_a_whole_cluster_has_no_reasons() -> None:
    reports = [decode(said(load=LINKED, queue=QUEUE)), prefill(said())]
    assert cluster_of(reports, ETCD).reasons() == []
    status = msgspec.to_builtins(cluster_of(reports, ETCD))
    assert status["queue"] == QUEUE
    assert status["servers"]["nats"] == UP
    assert [row["troubles"] for row in status["workers"]] == [(), ()]


@pytest.mark.essential
def test_nats_that_no_worker_reaches_is_named_once_and_no_figure_is_repeated() -> None:
    reports = [decode(said(AWAY, load=LINKED, queue=None)), prefill(said(AWAY | {"since_s": 11.0}))]
    assert cluster_of(reports, ETCD).reasons() == [
        "NATS unreachable for 12 s: nats://h:1: refused"
    ], "the worker that noticed first tells the time"
    assert cluster_of(reports, ETCD).queue is None


@pytest.mark.parametrize(
    ("linked", "told", "reason"),
    [
        ({"prefill_workers": []}, said(), f"prefill-1: {NOT_LINKED}"),
        ({"prefill_workers": []}, None, f"prefill-1: {LOST}"),  # cut off from us, too
        (LINKED, None, ""),  # a decode worker reaches it
        (None, said(), ""),  # nobody knows
        (LINKED | {"claims_stalled": True}, said(), f"decode-1: {NOT_CLAIMED}"),
        (LINKED | {"claims_stalled": False}, said(), ""),
    ],
)
def test_workers_that_are_cut_off_are_named(
    linked: dict[str, Any] | None, told: Report | None, reason: str
) -> None:
    reports = [decode(None if linked is None else said(load=linked)), prefill(told)]
    assert cluster_of(reports, ETCD).reasons() == [*filter(None, [reason])]


def test_a_worker_that_is_both_has_a_row_for_each_role_and_all_its_troubles_in_each() -> None:
    checks = [{"prefill_instance": "p", "result": "failed", "advice": "wrong KV"}]
    both = said(AWAY, load={"self_checks": checks, "prefill_workers": []})
    reports = [(record("w-1", role=role), both) for role in ("decode", "prefill")]
    rows = cluster_of(reports, ETCD).workers
    assert [(row.instance_id, row.role) for row in rows] == [
        ("w-1", "decode"),
        ("w-1", "prefill"),
    ]
    outage = "NATS unreachable for 12 s: nats://h:1: refused"
    assert [row.troubles for row in rows] == [(outage, "wrong KV")] * 2


def test_without_a_report_the_servers_are_unknown_not_up() -> None:
    cluster = cluster_of([decode(None)], ETCD)
    assert cluster.servers["nats"].up is False
    assert cluster.outages() == cluster.reasons() == [f"NATS {UNTOLD}"]
    assert cluster_of([], ETCD).outages() == [], "stock servers alone need no NATS"
    assert (cluster.workers[0].state, cluster.workers[0].age_s) == ("lost", None)


class TestHealth:
    def test_it_is_up_when_every_part_is(self) -> None:
        clock = FakeClock()
        health = ServerHealth("nats", "nats://h:1", clock)
        turns: list[bool] = []
        health.subscribe(lambda: turns.append(health.up))
        health.ok()
        for _ in range(2):
            health.failed("no answer", "jetstream")
        assert (health.error("pulls"), health.error("pulls", "jetstream")) == (
            "", "nats://h:1: no answer",
        )  # fmt: skip
        health.failed("no answer for 0.7 s")
        clock.advance(5.0)
        health.ok()
        assert not health.up, "an answered PING does not make JetStream answer"
        assert health.status().since_s == 5.0
        health.ok("jetstream")
        assert (turns, health.outage()) == ([True, False, False, False, True], "")
