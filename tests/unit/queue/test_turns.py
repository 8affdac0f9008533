"""Who is next: the urgent first, and each urgency its share."""

from __future__ import annotations

import time
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from pullfill.queue.contract import Turns, Urgency

TIGHT, NORMAL, LOOSE = Urgency
QUANTUM, WEIGHT = 2048, {TIGHT: 4, NORMAL: 2, LOOSE: 1}


def served(turns: Turns, jobs: dict[Urgency, int], count: int) -> list[Urgency]:
    """The urgencies of the next jobs, while each of `jobs` always holds one of that length."""
    found = []
    for _ in range(count):
        urgency = next(one for one in turns.order() if one in jobs)
        turns.took(urgency, jobs[urgency])
        found.append(urgency)
    return found


@settings(max_examples=50, deadline=None)
@given(st.tuples(*[st.integers(1, 50_000)] * 3))
def test_shares_are_by_tokens_whatever_the_lengths(lengths: tuple[int, int, int]) -> None:
    jobs = dict(zip(Urgency, lengths, strict=True))
    tokens = Counter[Urgency]()
    for urgency in served(Turns(), jobs, 3000):
        tokens[urgency] += jobs[urgency]
    rounds = [tokens[urgency] / (weight * QUANTUM) for urgency, weight in WEIGHT.items()]
    most = 2 + 2 * max(lengths) / QUANTUM
    assert max(rounds) - min(rounds) <= most, "one job and one round each"


def test_a_job_that_costs_many_rounds_is_charged_for_them_at_once() -> None:
    turns = Turns()
    turns.took(LOOSE, 5_000_000 * QUANTUM)
    began = time.process_time()
    assert served(turns, {LOOSE: 1, TIGHT: 1}, 2) == [TIGHT, TIGHT]
    assert served(turns, {LOOSE: 1}, 2) == [LOOSE, LOOSE]
    assert time.process_time() - began < 0.5
