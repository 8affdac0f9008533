"""The rows of the live page."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from pullfill.frontend.live.rows import ended_of, flows_of, minute_of, predicted_of
from pullfill.frontend.request_log import RequestRecord
from pullfill.snapshot import FAILED, Explained, Flow, HeldJob, Now, OpenJob, Report, Stage
from pullfill.wire import ExplainRecord, PredictedMs
from tests.support.said import blank
from tests.support.workers import record as worker_record

RECORD = blank(ExplainRecord, request_id="w", path="remote")
TARGETS = (100.0, 10.0)


def request(record: ExplainRecord = RECORD, **fields: Any) -> Explained:
    known = {"first_token_ms": 50.0, "arrived_at": 7.0, "answer_ms": 130.0, "answer_tokens": 11}
    return RequestRecord("cmpl-1", told=record, **(known | fields)).explained()


def test_a_failed_request_says_why() -> None:
    row = ended_of(request(answer_ms=2000.0, error="no worker"), TARGETS)
    assert (row.at, row.path, row.reason, row.good) == (9.0, FAILED, "no worker", False)
    assert row.total_ms is None


def test_the_figures_are_the_median_and_the_95th_percentile() -> None:
    rows = [ended_of(request(first_token_ms=float(n), answer_ms=n + 30.0), TARGETS)
            for n in range(1, 121)]  # fmt: skip
    assert minute_of(rows) == Now(
        ttft_ms=(61.0, 114.0), itl_ms=(3.0, 3.0), done_per_s=2.0, good_per_s=100 / 60
    )
    assert minute_of([]) == Now()


def test_the_prediction_is_that_of_the_choice() -> None:
    predicted = PredictedMs(remote=1.0, local=2.0)
    choices = {"remote": 1.0, "local": 2.0, None: 1.0}
    for choice, expected in choices.items():
        found = msgspec.structs.replace(RECORD, choice=choice, predicted_ms=predicted)
        assert predicted_of(found) == expected
    assert predicted_of(RECORD) is None


NOW = 100.0
DECODE, PREFILL = worker_record("d", role="decode"), worker_record("p", role="prefill")


def flight(name: str = "r", arrived: float = NOW - 3, **fields: Any) -> Any:
    record = RequestRecord(
        name, route_ms=500.0, arrived=arrived, submitted=arrived + 0.5, prompt_tokens=3,
        first_token_ms=fields.pop("first_token_ms", None),
    )  # fmt: skip
    worker = SimpleNamespace(instance_id="d")
    known = {"wire_id": f"{name}-wire", "record": record, "worker": worker, "tokens": []}
    return SimpleNamespace(**(known | fields))


def one(job: OpenJob | None = None, held: HeldJob | None = None, **fields: Any) -> Flow:
    reports = [
        (DECODE, Report(jobs=(job,) if job else ())),
        (PREFILL, Report(held=(held,) if held else ())),
    ]
    (flow,), hidden = flows_of([flight(**fields)], reports, NOW)
    assert hidden == 0
    assert (flow.id, flow.own, flow.age_s) == ("r", True, 3.0)
    return flow


def job(state: str = "queued", **fields: Any) -> OpenJob:
    return OpenJob(job_id="j", request_id="r-wire", state=state, **fields)


def test_without_a_job_a_request_is_at_the_frontend_or_at_its_decode_worker() -> None:
    assert one(worker=None).stage is Stage.ROUTE
    assert one(worker=None).stage_s == 2.5
    flow = one()
    assert (flow.stage, flow.stage_s, flow.decode, flow.tokens) == (Stage.PROMPT, 2.0, "d", 3)


def test_with_a_token_its_answer_is_under_way_whatever_an_old_report_says() -> None:
    flow = one(job(), tokens=[5, 6], first_token_ms=1000.0)
    assert (flow.stage, flow.made, flow.stage_s) == (Stage.DECODE, 2, 2.0)


def test_a_job_moves_from_the_queue_to_prefill_and_to_kv() -> None:
    flow = one(job(open_s=1.5, stage_s=1.5))
    assert (flow.stage, flow.stage_s, flow.queue_s) == (Stage.QUEUE, 1.5, 1.5)
    granted = job("granted", open_s=2.0, stage_s=0.5, queue_s=1.5, attempt=1, written=0.25)
    flow = one(granted, HeldJob(job_id="j", computed=0.75))
    assert (flow.stage, flow.prefill, flow.done) == (Stage.PREFILL, "p", 0.75)
    assert (flow.queue_s, flow.prefill_s, flow.attempt) == (1.5, 0.5, 1)
    flow = one(granted, HeldJob(job_id="j", computed=1.0, kv_s=0.125))
    assert (flow.stage, flow.stage_s, flow.done, flow.prefill_s) == (Stage.KV, 0.125, 0.25, 0.375)
    assert one(granted).stage is Stage.PREFILL, "its prefill worker does not answer"
    assert [one(job(state)).stage for state in ("quarantined", "reading")] == [
        Stage.QUEUE, Stage.KV,
    ]  # fmt: skip


def test_jobs_of_other_frontends_are_shown_the_oldest_first() -> None:
    other = OpenJob(job_id="o", request_id="theirs", state="queued", tokens=70, open_s=9.0)
    flights = [flight("b", NOW - 2), flight("a", NOW - 1)]
    flows, hidden = flows_of(flights, [(DECODE, Report(jobs=(other,))), (PREFILL, None)], NOW)
    assert [(flow.id, flow.own, flow.age_s) for flow in flows] == [
        ("theirs", False, 9.0),
        ("b", True, 2.0),
        ("a", True, 1.0),
    ]
    assert (flows[0].tokens, flows[0].decode, hidden) == (70, "d", 0)


def test_of_many_those_on_their_way_are_shown() -> None:
    streaming = [flight(f"s{n}", NOW - 90 + n, tokens=[1]) for n in range(5)]
    waiting = [flight(f"w{n}", NOW - 9 + n) for n in range(2)]
    old = OpenJob(job_id="j", request_id="s4-wire", state="granted", open_s=80.0)
    reports = [(DECODE, Report(jobs=(old,)))]
    flows, hidden = flows_of([*streaming, *waiting], reports, NOW, 4)
    assert [flow.id for flow in flows] == ["s0", "s1", "w0", "w1"]
    assert hidden == 3, "the job of s4 is ours"
    assert flows_of([*streaming, *waiting], [], NOW, 1)[1] == 6
