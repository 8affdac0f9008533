"""A rate follows the newest observations and survives outliers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pullfill.rate import FORGET_S, Rate, Share
from tests.support.fakes import FakeClock

PLACES = [(1.0, 0.5), (4.0, 10.0), (2.0, 2.0), (8.0, 40.0), (0.5, 0.1)]


def fitted(a: float, b: float, rounds: int = 8) -> Rate:
    rate = Rate()
    for number in range(rounds):
        for x1, x2 in PLACES:
            rate.observe(x1, x2, a * x1 + b * x2, float(number))
    return rate


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_pause_among_the_first_observations_is_soon_forgotten(bad: int) -> None:
    """A process that was stopped for 20 s in its second read kept all prompts local for minutes."""
    rate = Rate()
    for number in range(4):
        rate.observe(10.0, 0.0, 20.0 if number == bad else 0.01, float(number))
    assert rate.of(10.0) < 0.05


@given(st.floats(0.01, 10), st.floats(0, 10))
def test_it_finds_both_numbers(a: float, b: float) -> None:
    rate = fitted(a, b)
    for x1, x2 in PLACES:
        assert rate.of(x1, x2) == pytest.approx(a * x1 + b * x2, rel=0.05)


def test_after_a_pause_one_observation_is_enough() -> None:
    """With time alone, since there was nothing in between."""
    rate = fitted(1.0, 0.1, rounds=50)
    assert rate.fresh(49.0 + FORGET_S)
    assert not rate.fresh(51.0 + FORGET_S)
    rate.observe(4.0, 10.0, 10.0, 50.0 + 5 * FORGET_S)
    assert rate.of(4.0, 10.0) == pytest.approx(10.0, rel=0.1)


def test_one_pause_of_the_machine_is_clipped_and_a_second_one_is_a_change() -> None:
    rate = fitted(1.0, 0.0, rounds=50)
    rate.observe(1.0, 0.5, 1000.0, 50.0)
    assert rate.of(1.0, 0.5) < 2.0
    rate.observe(1.0, 0.5, 1000.0, 51.0)
    assert rate.of(1.0, 0.5) > 20.0


def test_a_fast_outlier_before_a_pause_is_no_change() -> None:
    """Small writes vary by more than a factor of four. One before a pause kept prompts local."""
    rate = fitted(1.0, 0.0, rounds=50)
    rate.observe(1.0, 0.5, 0.01, 50.0)
    rate.observe(1.0, 0.5, 1000.0, 51.0)
    assert rate.of(1.0, 0.5) < 2.0


def test_a_share_is_right_from_the_beginning_and_fades() -> None:
    clock = FakeClock()
    share = Share(clock)
    assert share.share() == 0.0
    for seconds in (1.0, 60.0):
        for _ in range(int(seconds * 10)):
            clock.advance(0.1)
            share.add(0.04)
        assert share.share() == pytest.approx(0.4, rel=0.05)
    clock.advance(60.0)
    assert share.share() < 0.01
    share.add(20.0)
    assert share.share() > 1.0
