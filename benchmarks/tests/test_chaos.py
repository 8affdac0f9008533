"""The arithmetic of the fault benchmarks: rates, recovery, slopes, tables. No cluster."""

from __future__ import annotations

import pytest

from benchmarks import chaos_report, report
from benchmarks.chaos_load import Ask, Work
from benchmarks.chaos_scenarios import (
    FRONTEND_GONE,
    ONLY_DECODE_BACK,
    PREFILL_BACK,
    Run,
    Scenario,
    back_after,
    longest_gap,
)


def steady(rate: float, begin: float, end: float) -> list[float]:
    """`rate` events per second, evenly."""
    return [begin + i / rate for i in range(int((end - begin) * rate))]


class TestRates:
    def test_a_second_that_ended_before_the_fault_does_not_count(self) -> None:
        """Full rate until the kill, silence for three seconds, full rate again."""
        times = steady(100, 0, 5) + steady(100, 8, 20)
        found = back_after(times, 5.0, 100, 20.0)
        assert found == pytest.approx(2.8, abs=0.06)  # from 7.8 on, 80 of 100 in a second

    def test_never_back(self) -> None:
        times = steady(100, 0, 5) + steady(70, 5, 20)
        assert back_after(times, 5.0, 100, 20.0) is None
        assert back_after(times, 5.0, 80, 20.0) == 0

    def test_the_longest_gap_may_be_at_either_end(self) -> None:
        assert longest_gap([1.0, 1.5], 0.0, 4.0) == 2.5
        assert longest_gap([], 0.0, 4.0) == 4.0


def ask(began: float, ended: float, *, error: str = "", url: str = "a") -> Ask:
    at = [] if error else [began + 0.1]
    return Ask(0, url, began, "id", [7] * len(at), at, error, False, ended)


def run_of(scenario: Scenario, asks: list[Ask], **seen: object) -> Run:
    run = Run(scenario, asks, [], 0.0, max(a.ended for a in asks))
    run.times = steady(100, 0, run.ended)
    run.wanted = 100.0
    for name, value in seen.items():
        setattr(run, name, value)
    return run


class TestRows:
    def rows(self, run: Run) -> dict[str, report.Row]:
        return {r.metric.partition(": ")[2]: r for r in chaos_report.report_rows("1P1D", run)}

    def test_a_good_run_misses_nothing(self) -> None:
        asks = [ask(t, t + 1) for t in range(20)]
        run = run_of(PREFILL_BACK, asks, killed=10.0, noticed_s=0.01, freed_s=0.02, restarted_s=6.0)
        rows = self.rows(run)
        assert all(r.ok for r in rows.values())
        assert rows["throughput back after"].value == 0
        assert {run.rate(p) for p in ("before", "during", "after")} == {100}

    def test_what_was_open_at_a_killed_frontend_may_fail_and_nothing_else(self) -> None:
        own, other = ask(3, 4.1, error="broke", url="b"), ask(3, 4.2, error="broke")
        run = run_of(FRONTEND_GONE, [ask(0, 9), own], killed=4.0, noticed_s=0.1, excused=[own])
        assert self.rows(run)["failed"].ok
        assert self.rows(run)["of them failed"].value == 1
        run.asks.append(other)
        assert not self.rows(run)["failed"].ok

    def test_in_an_outage_errors_must_come_soon(self) -> None:
        slow = ask(3, 10, error="503")
        run = run_of(ONLY_DECODE_BACK, [ask(0, 20), slow], killed=6.0, excused=[slow])
        assert self.rows(run)["slowest error"].value == 4
        assert all(r.ok for r in self.rows(run).values())
        slow.ended = 11.5
        assert not self.rows(run)["slowest error"].ok

    def test_never_back_and_never_free_are_misses(self) -> None:
        run = run_of(PREFILL_BACK, [ask(t, t + 1) for t in range(20)], killed=10.0, noticed_s=0.1)
        run.times = steady(100, 0, 10)
        rows = self.rows(run)
        assert not rows["throughput back after"].ok
        assert not rows["its blocks free after"].ok


class TestWork:
    work = Work([[1], [2]], [[7, 8, 9], [4, 5, 6]], 3)

    @pytest.mark.parametrize(
        ("tokens", "error", "cut", "right"),
        [
            ([7, 8, 9], "", False, True),
            ([7, 8, 0], "", False, False),
            ([7, 8], "", False, False),
            ([7, 8, 9, 9], "", False, False),
            ([7, 8], "broke", False, True),
            ([7, 0], "broke", False, False),
            ([], "", True, True),
            ([8], "", True, False),
        ],
    )
    def test_only_an_unfinished_answer_may_be_short(
        self, tokens: list[int], error: str, cut: bool, right: bool
    ) -> None:
        one = Ask(0, "u", 0.0, "id", tokens, [], error, cut, 1.0)
        assert (self.work.wrong([one]) == []) is right
