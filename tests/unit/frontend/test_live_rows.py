"""The rows of the live page."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pullfill.frontend.live.history import Series
from pullfill.frontend.live.rows import ended_of, predicted_of
from pullfill.frontend.request_log import RequestRecord
from pullfill.snapshot import FAILED
from pullfill.wire import ExplainRecord, PredictedMs, Timings

RECORD = ExplainRecord(
    request_id="w",
    path="remote",
    reason="long_prompt",
    prompt_tokens=90,
    prefix_hit_tokens=0,
    remote_tokens=89,
    decode_instance="d",
    prefill_instance="p",
    timings_ms=Timings(queue=5.0, prefill=9.0, claim=1.0),
)
TARGETS = (100.0, 10.0)


def request(record: ExplainRecord = RECORD, **fields: Any) -> RequestRecord:
    known = {"first_token_ms": 50.0, "arrived_at": 7.0, "answer_ms": 130.0, "answer_tokens": 11}
    return RequestRecord("cmpl-1", told=record, **(known | fields))


def test_a_row_has_the_mean_time_between_tokens_and_what_is_known_of_the_stages() -> None:
    row = ended_of(request(), TARGETS)
    assert (row.id, row.at, row.ttft_ms, row.itl_ms) == ("cmpl-1", 7.13, 50.0, 8.0)
    assert (row.good, row.made, row.prompt) == (True, 11, 90)
    assert row.stages == {"queue": 5.0, "prefill": 9.0}
    assert (row.decode, row.prefill) == ("d", "p")


@pytest.mark.parametrize(
    ("fields", "good"),
    [
        ({"targets_ms": (49.0, None)}, False),
        ({"targets_ms": (None, 7.9)}, False),
        ({"targets_ms": (None, 8.1)}, True),
        ({"first_token_ms": 101.0}, False),
        ({"answer_tokens": 1}, True),
        ({"targets_ms": ("nonsense", None)}, True),
        ({"answer_ms": None}, None),
    ],
)
def test_goodput_is_by_the_requests_own_targets_if_it_names_some(
    fields: dict[str, Any], good: bool | None
) -> None:
    assert ended_of(request(**fields), TARGETS).good is good


def test_a_cancelled_request_has_no_end() -> None:
    row = ended_of(request(answer_ms=None), TARGETS)
    assert (row.at, row.itl_ms, row.total_ms) == (None, None, None)


def test_a_failed_request_says_why_and_counts_for_no_figure() -> None:
    row = ended_of(request(answer_ms=None, error="no worker", failed_at=9.0), TARGETS)
    assert (row.at, row.path, row.reason, row.good) == (9.0, FAILED, "no worker", False)
    series = Series()
    series.ended(row)
    series.recent([row])
    assert not series.points(10.0)
    assert series.now(10.0, 0.0).done_per_s == 0


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("remote", 1.0), ("local", 2.0), ("local_chunked", 3.0), (None, 1.0)],
)
def test_the_prediction_is_that_of_the_choice(choice: str | None, expected: float) -> None:
    predicted = PredictedMs(remote=1.0, local=2.0, local_chunked=3.0)
    found = msgspec.structs.replace(RECORD, choice=choice, predicted_ms=predicted)
    assert predicted_of(found) == expected
    assert predicted_of(RECORD) is None
