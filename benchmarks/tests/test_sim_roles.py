"""The simulation of role switches: the planner follows a square wave, and seldom moves."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache

import pytest

from benchmarks.sim import roles as sim
from pullfill.deploy.planner import DECODE, PREFILL, PlanSettings

WAVE = sim.Wave(half_s=200.0, periods=1)


@cache
def planned(wave: sim.Wave, seed: int) -> sim.Result:
    """A run with the usual settings that begins with one prefill worker."""
    return sim.run(wave, 1, PlanSettings(), seed)


@pytest.mark.long
def test_a_square_wave_that_fits_no_split() -> None:
    """Goodput is better than that of every static split. Each half costs the moves it needs."""
    wave = sim.Wave(half_s=200.0)
    static = {n: sim.run(wave, n, None, 1).good for n in range(1, sim.WORKERS)}
    found = sim.run(wave, max(static, key=lambda n: static[n]), PlanSettings(), 1)
    assert found.good >= max(static.values())
    assert [to for _, to in found.moves] == 2 * [PREFILL] + 2 * [DECODE] + 2 * [PREFILL]


def test_each_move_comes_soon_after_the_wave_turns() -> None:
    found = planned(WAVE, 2)
    assert [to for _, to in found.moves] == 2 * [PREFILL]
    assert all(WAVE.half_s < at < WAVE.half_s + 60.0 for at, _ in found.moves)


@pytest.mark.parametrize(("half_s", "periods"), [(10.0, 15), (30.0, 5), (60.0, 5)])
def test_a_fast_wave_is_not_followed(half_s: float, periods: int) -> None:
    wave = sim.Wave(half_s=half_s, periods=periods)
    found = planned(wave, 1)
    changes = sum(one != other for (_, one), (_, other) in itertools.pairwise(found.moves))
    assert changes <= wave.seconds / PlanSettings().reverse_s
    assert len(found.moves) <= 4 * wave.periods


def test_without_pauses_it_would_oscillate() -> None:
    """So the test above could fail."""
    wave = sim.Wave(half_s=30.0, periods=5)
    wild = replace(PlanSettings(), settle_s=0.0, cool_down_s=0.0, reverse_s=0.0, band=0.0)
    assert len(sim.run(wave, 1, wild, 1).moves) > 2 * len(planned(wave, 1).moves)


def test_every_request_is_answered_and_the_same_seed_gives_the_same_result() -> None:
    asks: list[sim.Request] = []

    class Kept(sim.Wave):
        def requests(self, rng: random.Random) -> list[sim.Request]:
            asks.extend(super().requests(rng))
            return asks

    first = sim.run(Kept(half_s=100.0, periods=1), 1, PlanSettings(), 3)
    assert {to for _, to in first.moves} == {PREFILL}
    assert [ask for ask in asks if ask.made != ask.output] == []
    assert first == planned(sim.Wave(half_s=100.0, periods=1), 3)
