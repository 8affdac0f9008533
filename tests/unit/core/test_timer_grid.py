"""The grid of a process's periodic timers."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pullfill.runtime import timer_grid

TOLERANCE = 1e-6


@given(st.floats(0.0, 1e6), st.floats(0.0, 0.2))
def test_who_is_late_stays_on_the_grid(now: float, late_s: float) -> None:
    when = timer_grid.at(now, 1.0)
    assert timer_grid.at(when + late_s, 1.0) == pytest.approx(when + 1.0, abs=TOLERANCE)


def test_seconds_halves_and_doubles_fall_together() -> None:
    """Exactly, to the last bit: a loop runs timers of the same time in one wake-up."""
    seconds = {timer_grid.at(1000.0 + n, 1.0) for n in range(8)}
    halves = {timer_grid.at(1000.0 + n / 2, 0.5) for n in range(20)}
    assert seconds <= halves
    assert {timer_grid.at(1000.0 + 2 * n, 2.0) for n in range(3)} <= seconds
    assert timer_grid.before(1005.0, 1.0) in seconds


def test_a_forked_process_has_moments_of_its_own() -> None:
    """Otherwise a fleet that starts together would reach its servers at the same times."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, repr(timer_grid.at(1000.0, 1.0)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    told = float(os.read(read, 100))
    os.close(read)
    os.close(write)
    assert told != timer_grid.at(1000.0, 1.0)
