"""What is asked in the serving benchmark, and the numbers made of answers, by hand."""

from __future__ import annotations

import math

import pytest

from benchmarks.serving import stats, workloads
from benchmarks.serving.contract import Answer, Ask, Kind
from benchmarks.serving.workloads import Longs, Prompts, Workload

VOCABULARY = range(5, 300)


def prompts(*seed: object) -> Prompts:
    return Prompts(VOCABULARY, *seed)


def answer(*token_s: float, due: float = 0.0, kind: Kind = Kind.SHORT, error: str = "") -> Answer:
    asked = Ask(kind, (1, 2, 3), len(token_s), "lane")
    return Answer(asked, due, due, list(token_s), list(range(len(token_s))), error=error)


ALL = {
    "interference": lambda p: workloads.interference(p, 10.0, Longs()),
    "control": lambda p: workloads.interference(p, 10.0, None),
    "chat": lambda p: workloads.chat(p, 2, 3),
    "warm-up": lambda p: workloads.warm_up(p, (256, 512)),
}


class TestWorkloads:
    @pytest.mark.parametrize("name", ALL)
    def test_a_seed_fixes_everything_and_no_two_prompts_begin_alike(self, name: str) -> None:
        made: Workload = ALL[name](prompts(name, 1))
        assert made == ALL[name](prompts(name, 1))
        other: Workload = ALL[name](prompts(name, 2))
        beginnings = [a.prompt[:16] for w in (made, other) for a in w.asks]
        assert len(set(beginnings)) == len(beginnings)
        assert all(token in VOCABULARY for a in made.asks for token in a.prompt)


class TestGaps:
    def test_tokens_that_came_together_are_one_arrival(self) -> None:
        lumpy = answer(1.0, 2.0, 2.0, 2.0, 2.5)
        assert stats.gaps([lumpy]) == [1.0, 0.5]

    def test_a_stall_at_the_end_of_the_window_is_kept_and_what_began_later_is_not(self) -> None:
        assert stats.timed_gaps([answer(9.0, 9.5, 12.0, 12.5)], 10.0) == [(9.5, 0.5), (12.0, 2.5)]

    def test_time_in_long_gaps_counts_by_length(self) -> None:
        assert stats.stalled([0.25, 0.25, 0.5], 0.3) == 0.5
        assert stats.stalled([0.25], 0.3) == 0.0
        assert math.isnan(stats.stalled([], 0.3))


class TestRates:
    def test_ttft_is_from_when_it_was_due(self) -> None:
        late = Answer(Ask(Kind.LONG, (1,), 1, "l"), sent_s=5.0, due_s=3.0, token_s=[6.0])
        assert stats.ttft(late) == 3.0
        assert stats.ttfts([late, answer(1.0)], Kind.LONG) == [3.0]
        assert stats.ttfts([answer(1.0, error="no")]) == []
