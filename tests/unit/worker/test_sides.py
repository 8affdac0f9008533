"""When a worker with both sides pulls prefill jobs."""

from __future__ import annotations

from pullfill.worker.sides import Slack
from tests.support.fakes import FakeClock


def test_a_worker_pulls_while_its_streams_leave_time() -> None:
    requests, clock = 0, FakeClock()
    slack = Slack(lambda: requests, lambda: 0.05, clock, calm_s=1.0)
    assert not slack.look(0.06), "it has no streams"
    requests = 1
    assert not slack.look(None), "one that always has streams would never measure a step"
    assert not slack.look(0.04)
    assert slack.look(0.06)
    requests = 0
    clock.advance(0.5)
    assert slack.look(0.06), "a moment between two requests"
    clock.advance(0.5)
    assert not slack.look(0.06)
