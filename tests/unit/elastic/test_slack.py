"""When a worker that is both pulls prefill jobs."""

from __future__ import annotations

from pullfill.elastic.slack import CALM_S, Slack
from tests.support.fakes import FakeClock


class Rig:
    def __init__(self) -> None:
        self.requests = 0
        self.step_s: float | None = None
        self.clock = FakeClock()
        self.slack = Slack(lambda: self.requests, lambda: self.step_s, lambda: 0.05, self.clock)


def test_a_worker_that_is_asked_for_nothing_pulls() -> None:
    assert not Rig().slack.look()


def test_the_first_job_is_pulled_to_measure_a_step() -> None:
    """A worker that always has streams would never pull otherwise."""
    rig = Rig()
    rig.requests = 1
    assert not rig.slack.look()


def test_streams_leave_time_for_steps_within_the_target() -> None:
    rig = Rig()
    rig.requests, rig.step_s = 1, 0.04
    assert not rig.slack.look()
    rig.step_s = 0.06
    assert rig.slack.look()


def test_it_stops_at_once_and_begins_again_after_a_calm_time() -> None:
    rig = Rig()
    rig.requests, rig.step_s = 1, 0.06
    assert rig.slack.look()
    rig.requests = 0
    rig.clock.advance(CALM_S / 2)
    assert rig.slack.look(), "a moment between two requests"
    rig.requests = 1
    rig.clock.advance(CALM_S)
    assert rig.slack.look()
    rig.requests = 0
    rig.clock.advance(CALM_S)
    assert not rig.slack.look()
