"""The history of the live page: steps, percentiles, tokens."""

from __future__ import annotations

from typing import Any

import pytest

from pullfill.frontend.live.history import MAX_VALUES, Series, TokenMeter, percentiles
from pullfill.snapshot import HISTORY_S, STEP_S, Ended, WorkerPoint

NOW = 10_000.0


def ended(at: float | None = NOW, **fields: Any) -> Ended:
    return Ended(**({"id": "r", "at": at, "path": "remote", "reason": "long"} | fields))


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], None), ([3.0], (3.0, 3.0)), ([5.0, 1.0, 3.0], (3.0, 5.0)), (range(101), (50, 95))],
)
def test_percentiles_are_by_nearest_rank(values: Any, expected: Any) -> None:
    assert percentiles(list(values)) == expected


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
    assert before.backlog_s is None, "nobody looked"


def test_tokens_of_the_past_are_spread_over_the_time_of_their_answer() -> None:
    series = Series()
    series.ended(ended(NOW + 1, made=300, ttft_ms=0.0, total_ms=2 * STEP_S * 1e3))
    rates = [point.tokens_per_s for point in series.points(NOW + STEP_S - 0.001, 3)]
    assert rates == pytest.approx([20.0, 20.0, 20.0], rel=1e-3)


def test_samples_count_more_than_what_was_spread() -> None:
    series = Series()
    series.ended(ended(NOW + 4, made=1000))
    for second in range(1, 5):
        series.sampled(NOW + second, 1.0, 7.0, 0.5, {"d": WorkerPoint(0.25, 3, 1, 7.0)})
    (point,) = series.points(NOW + 4, 1)
    assert point.tokens_per_s == pytest.approx(7.0)
    assert point.backlog_s == 0.5
    assert point.workers == {"d": WorkerPoint(0.25, 3, 1, 7.0)}


def test_a_look_across_two_steps_counts_in_both() -> None:
    series = Series()
    series.sampled(NOW - 1, 4.0, 40.0, None, {})
    series.sampled(NOW + 1, 2.0, 40.0, None, {})
    before, now = series.points(NOW + 1, 2)
    assert now.tokens_per_s == pytest.approx(20.0)
    assert before.tokens_per_s == pytest.approx((40 + 20) / (4 + 1))


def test_looks_that_are_many_steps_apart_count_no_token_twice() -> None:
    series = Series()
    series.sampled(NOW + 2, 20.0, 200.0, None, {})
    assert [point.tokens_per_s for point in series.points(NOW + 2, 2)] == pytest.approx([10.0] * 2)


def test_what_is_older_than_the_history_is_forgotten() -> None:
    series = Series()
    series.ended(ended(NOW))
    assert len(series.points(NOW)) == 1
    assert series.points(NOW + HISTORY_S + STEP_S) == ()
    assert series.points(NOW) == (), "not only left out"


def test_the_figures_are_of_the_last_minute() -> None:
    series = Series()
    rows = [ended(NOW - 61, ttft_ms=9e9), ended(NOW - 30, ttft_ms=5.0, good=True), ended(None)]
    series.recent(rows)
    now = series.now(NOW, 12.0)
    assert now.ttft_ms == (5.0, 5.0)
    assert now.itl_ms is None
    assert (now.done_per_s, now.good_per_s) == (1 / 60, 1 / 60)
    assert now.tokens_per_s == 12.0


def test_more_requests_than_are_remembered_are_counted_over_the_time_that_they_took() -> None:
    series = Series()
    rows = [ended(NOW - 30 + n / 100, good=n % 2 == 0) for n in range(3000)]  # 100 in a second
    series.recent(rows)
    now = series.now(NOW, 0.0)
    assert now.done_per_s == pytest.approx(100.0, rel=0.01)
    assert now.good_per_s == pytest.approx(50.0, rel=0.01)
    series.recent([ended(NOW)] * 4 * MAX_VALUES)
    assert series.now(NOW, 0.0).done_per_s > 2048, "all at once"


def test_tokens_between_two_looks_are_those_under_way_and_those_that_ended() -> None:
    meter = TokenMeter()
    assert meter.look(5.0, [("a", 100)], [ended(decode="a", made=999)]) == (0.0, {})
    seconds, tokens = meter.look(7.0, [("a", 20), ("b", 3)], [ended(decode="a", made=110)])
    assert (seconds, tokens) == (2.0, {"a": 30, "b": 3})
    _, tokens = meter.look(8.0, [], [])
    assert tokens["a"] == 0, "an answer that was cancelled counts nothing back"
    meter.reset()
    assert meter.look(99.0, [("a", 5)], []) == (0.0, {})
