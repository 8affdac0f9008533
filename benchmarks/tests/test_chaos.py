"""Tests the arithmetic of the fault benchmarks, and runs `make soak` for half a minute."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.chaos_load import Ask, Work
from benchmarks.chaos_scenarios import back_after, longest_gap
from benchmarks.chaos_soak import soak


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


@pytest.mark.long
@pytest.mark.timeout(900)
def test_mixed_faults_under_load_fail_and_spoil_nothing(tmp_path: Path) -> None:
    how = {"minutes": 0.5, "every": 6.0, "clients": 3, "pause": 0.3, "seed": 1}
    rows, _ = soak(Namespace(**how, without=[], logs=None), tmp_path)
    assert [row for row in rows if not row.ok] == []
