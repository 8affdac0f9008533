"""What a decode worker tells the planner: long prompts that want a prefill worker, and pressure."""

from __future__ import annotations

from typing import Any

import pytest

from pullfill.decode_worker.demand import WINDOW_S, DemandMeter
from pullfill.decode_worker.rules import Decision, Situation
from pullfill.snapshot import Demand
from pullfill.wire import Load, RouterConfig
from tests.support.fakes import FakeClock

CONFIG = RouterConfig(max_local_prefill_length=512)
RATE = 1000.0
LOAD = Load(tokens_per_s=RATE)


class Rig:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.meter = DemandMeter(self.clock)

    def prompt(
        self,
        reason: str,
        *,
        tokens: int = 3001,
        remote: bool = False,
        workers: int = 0,
        config: RouterConfig = CONFIG,
        here_s: float = 0.0,
    ) -> None:
        now = Situation(tokens, 0, prefill_workers=workers, config=config)
        self.meter.decided(now, Decision(remote, reason), here_s)

    def figures(self, **told: Any) -> Demand:
        asked = {
            "open_tokens": 0, "queued_tokens": 0, "pulling": [], "connected": False,
            "own_rate": 0.0, "kv": 0.0, "seats": 0.0,
        }  # fmt: skip
        return self.meter.figures(**(asked | told))


def test_without_a_prefill_worker_long_prompts_are_a_backlog() -> None:
    rig = Rig()
    rig.prompt("no_prefill_worker")
    rig.prompt("short_prompt", tokens=100)
    rig.prompt("prompt_logprobs")
    told = rig.figures(own_rate=RATE)
    assert told.backlog_s == pytest.approx(3.0)
    assert (told.prompts, told.missed) == (1, 1)
    rig.clock.advance(WINDOW_S)
    assert rig.figures(own_rate=RATE).backlog_s == 0


def test_the_backlog_of_the_time_without_one_is_gone_with_the_first_prefill_worker() -> None:
    rig = Rig()
    rig.prompt("self_check_pending")
    assert rig.figures(own_rate=RATE).backlog_s > 0
    told = rig.figures(pulling=[LOAD], connected=True)
    assert told.backlog_s == 0, "it may be busy"
    assert told.prefill_demand == pytest.approx(3.0 / WINDOW_S), "an autoscaler keeps the worker"


def test_what_waits_here_is_told_at_the_pace_of_this_worker() -> None:
    assert Rig().figures(queued_tokens=3000, own_rate=500.0, pulling=[LOAD]).queued_s == 6.0
    assert Rig().figures(queued_tokens=3000, pulling=[LOAD]).queued_s == 3.0, "it has not measured"


@pytest.mark.parametrize(
    ("reason", "told", "wants"),
    [
        ("long_prompt", {"remote": True, "workers": 1}, True),
        ("cost_remote", {"remote": True, "workers": 1, "tokens": 200}, True),
        ("queue_wait", {"workers": 1}, True),
        ("cost_local", {"workers": 1}, True),
        ("cost_local", {"workers": 1, "tokens": 200}, False),
        ("no_prefill_worker", {"tokens": 200}, False),
        ("draining", {"workers": 1}, False),
    ],
)
def test_which_prompts_want_a_prefill_worker(
    reason: str, told: dict[str, Any], wants: bool
) -> None:
    rig = Rig()
    rig.prompt(reason, **told)
    assert rig.figures().prompts == wants
    assert (rig.figures().prefill_demand > 0) == wants


def test_fallbacks_are_missed() -> None:
    rig = Rig()
    rig.prompt("long_prompt", remote=True, workers=1)
    assert rig.figures().missed == 0
    rig.meter.fell_back()
    assert rig.figures().missed == 1


def test_short_prompts_take_time_from_the_streams() -> None:
    rig = Rig()
    rig.prompt("short_prompt", tokens=100, here_s=WINDOW_S / 2)
    assert rig.figures().pressure == pytest.approx(0.5)
    rig.meter.stepped(WINDOW_S / 2, 0.02, 0.05)
    assert rig.figures().pressure == pytest.approx(0.5)
    rig.meter.stepped(WINDOW_S / 2, 0.04, 0.05)
    assert rig.figures().pressure == pytest.approx(2 * 0.6)
