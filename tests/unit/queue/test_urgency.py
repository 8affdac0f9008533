"""Who is next: shares between urgencies, short jobs first within one, nobody left out."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pullfill.errors import BadMessage
from pullfill.queue.urgency import (
    LANES,
    PATIENCE,
    QUANTUM,
    SIZES,
    WEIGHT,
    Lane,
    Turns,
    Urgency,
    lane_of,
    parse_lane,
    urgency_of,
)

TIGHT, NORMAL, LOOSE = Urgency


def served(turns: Turns, jobs: dict[Lane, int], count: int) -> list[Lane]:
    """The lanes of the next jobs, while every lane of `jobs` always holds one of that length."""
    found = []
    for _ in range(count):
        for lane in jobs:
            turns.fill(lane)
        lane = turns.next()
        assert lane is not None
        turns.took(lane.urgency, jobs[lane], lane)
        found.append(lane)
    return found


@pytest.mark.parametrize(
    ("ttft_ms", "urgency"),
    [(None, NORMAL), (1, TIGHT), (500, TIGHT), (501, NORMAL), (4999, NORMAL), (5000, LOOSE)],
)
def test_the_target_says_how_urgent_a_request_is(ttft_ms: float | None, urgency: Urgency) -> None:
    assert urgency_of(ttft_ms, 500.0, 5000.0) is urgency


@pytest.mark.parametrize(("tokens", "size"), [(0, 0), (1024, 0), (1025, 1), (16384, 2), (16385, 3)])
def test_the_length_says_which_lane(tokens: int, size: int) -> None:
    assert lane_of(LOOSE, tokens) == (LOOSE, size)


def test_labels_are_read_back() -> None:
    assert [parse_lane(lane.label) for lane in LANES] == list(LANES)
    for label in ("", "tight", "tight-9", "prefill"):
        with pytest.raises(BadMessage):
            parse_lane(label)


def test_without_jobs_there_is_no_turn() -> None:
    turns = Turns()
    assert not turns
    assert turns.next() is None
    turns.fill(LANES[0])
    turns.empty(LANES[0])
    turns.empty(LANES[1])
    assert turns.next() is None


def test_the_urgent_come_first_and_then_each_has_its_share() -> None:
    lanes = {Lane(urgency, 0): 1024 for urgency in Urgency}
    order = "".join(lane.urgency.label[0] for lane in served(Turns(), lanes, 28))
    assert order == "ttttttttnnnnllttttttttnnnnll"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9000), min_size=12, max_size=12))
def test_shares_are_by_tokens_whatever_the_lengths(lengths: list[int]) -> None:
    lanes = {lane: min(n, SIZES[lane.size]) if lane.size < 3 else n + SIZES[-1]
             for lane, n in zip(LANES, lengths, strict=True)}  # fmt: skip
    tokens = Counter[Urgency]()
    for lane in served(Turns(), lanes, 3000):
        tokens[lane.urgency] += lanes[lane]
    longest = max(lanes.values())
    rounds = [tokens[urgency] / (weight * QUANTUM) for urgency, weight in WEIGHT.items()]
    assert max(rounds) - min(rounds) <= 2 + 2 * longest / QUANTUM, "one job and one round each"


def test_nobody_saves_up_more_than_a_round() -> None:
    turns, loose, tight = Turns(), Lane(LOOSE, 0), Lane(TIGHT, 0)
    served(turns, {loose: 1000}, 500)
    first = served(turns, {loose: 1000, tight: 1000}, 20)
    assert first[:9] == [tight] * 9, "the other has saved nothing"
    assert 1 <= first.count(loose) <= 3, "and itself one round: then it is the other's turn"


def test_what_was_taken_while_nobody_waited_is_owed_to_nobody() -> None:
    turns = Turns()
    for _ in range(100):
        turns.took(TIGHT, 10_000)
    turns.fill(Lane(NORMAL, 0))
    turns.fill(Lane(TIGHT, 0))
    assert turns.urgent


def test_a_job_that_costs_many_rounds_is_charged_for_them_at_once() -> None:
    turns, loose = Turns(), Lane(LOOSE, 0)
    turns.fill(loose)
    turns.took(LOOSE, 5_000_000 * QUANTUM - 1)
    began = time.process_time()
    assert turns.next() == loose
    assert time.process_time() - began < 0.5
    assert turns._credit[LOOSE] == 1, "as many rounds as it needs, and no more"


def test_an_urgent_job_comes_next_while_its_urgency_has_credit() -> None:
    turns, loose, tight = Turns(), Lane(LOOSE, 3), Lane(TIGHT, 0)
    served(turns, {loose: 100_000}, 5)
    assert served(turns, {loose: 100_000, tight: 100}, 1) == [tight]


def test_short_jobs_come_first_but_pass_a_long_one_only_so_often() -> None:
    short, long = Lane(NORMAL, 0), Lane(NORMAL, 2)
    order = served(Turns(), {short: 1000, long: 10_000}, 200)
    assert order[0] == short
    gaps = [gap for gap in "".join("s" if lane == short else "L" for lane in order).split("L")]
    most = -(-PATIENCE * SIZES[1] // 1000)
    assert {len(gap) for gap in gaps[:-1]} == {most}, "PATIENCE times its length passes it"


def test_every_lane_gets_its_turn() -> None:
    lengths = {lane: [500, 2000, 8000, 30_000][lane.size] for lane in LANES}
    assert set(served(Turns(), lengths, 2000)) == set(LANES)
