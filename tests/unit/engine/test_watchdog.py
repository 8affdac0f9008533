"""When an engine counts as stuck, as lost, and as well again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pullfill.engine.watchdog import EngineWatchdog, Health, Pulse
from tests.support.fakes import FakeClock

STALL_S = 8.0


class Engine:
    """Beats when told to."""

    def __init__(self) -> None:
        self.beat = 1
        self.busy = "a step"
        self.given_up = ""

    def pulse(self) -> Pulse:
        return Pulse(self.beat, self.busy, 3)

    def give_up(self, why: str) -> None:
        assert not self.given_up, "once"
        self.given_up = why


class Rig:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.engine = Engine()
        self.told: list[bool] = []
        self.guard = EngineWatchdog(self.engine, STALL_S, self.told.append, self.clock)
        self.guard.look()

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.clock.advance(1.0)
            self.guard.look()


def test_a_step_that_takes_too_long_is_told_and_then_given_up() -> None:
    rig = Rig()
    rig.wait(STALL_S - 1)
    assert (rig.told, rig.guard.detail()) == ([], {})
    rig.wait(1)
    assert rig.told == [True]
    said = "the engine is stuck in a step for 8 s with 3 requests"
    assert rig.guard.detail() == {"reason": said}
    rig.wait(STALL_S - 1)
    assert not rig.engine.given_up
    rig.wait(1)
    assert rig.engine.given_up == "the engine is stuck in a step for 16 s with 3 requests"
    rig.engine.beat += 1
    rig.wait(3)
    assert rig.told == [True], "given up is given up"


def test_a_step_in_between_makes_it_well_again_and_the_time_starts_anew() -> None:
    rig = Rig()
    rig.wait(STALL_S + 2)
    rig.engine.beat += 1
    rig.wait(1)
    assert rig.told == [True, False]
    assert rig.guard.complaint == ""
    rig.wait(STALL_S - 1)
    assert rig.told == [True, False]
    rig.wait(1)
    assert rig.told == [True, False, True]


def test_an_engine_with_nothing_to_do_is_not_stuck() -> None:
    rig = Rig()
    rig.engine.busy = ""
    rig.wait(5 * STALL_S)
    assert (rig.told, rig.engine.given_up) == ([], "")


def test_a_process_that_was_stopped_does_not_blame_its_engine() -> None:
    rig = Rig()
    rig.clock.advance(3600.0)
    rig.guard.look()
    assert rig.told == []
    rig.wait(STALL_S - 3)
    assert rig.told == [], "the hour counts for two looks"
    rig.wait(3)
    assert rig.told == [True]


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0.0, 3.0)), max_size=60))
def test_stuck_only_after_the_whole_time_without_a_beat(
    looks: list[tuple[bool, bool, float]],
) -> None:
    rig, still = Rig(), 0.0
    for beats, busy, seconds in looks:
        rig.clock.advance(seconds)
        rig.engine.beat += beats
        rig.engine.busy = "a step" if busy else ""
        before = rig.guard.health
        rig.guard.look()
        health = rig.guard.health
        still = 0.0 if beats or not busy else still + seconds
        if before is Health.LOST:
            assert health is Health.LOST
        elif health is Health.STUCK:
            assert still >= STALL_S
        elif health is Health.LOST:
            assert still >= 2 * STALL_S
