"""The next step of an engine without a decode side. With one: decode_worker/test_meter.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine.requests import OWN_CLIENT
from pullfill.wire import RouterConfig, RouterPolicy
from pullfill.worker.step_meter import StepMeter, StepModel
from tests.support.fakes import FakeChunks, FakeClock, FakeRequest


class Rig:
    """The meter of a prefill worker. turns: ids of the requests whose prompts may be computed.
    None: all may."""

    def __init__(self) -> None:
        self.chunks, self.clock, self.model = FakeChunks(streams=0), FakeClock(), None
        self.turns: set[str] | None = None
        view: Any = SimpleNamespace(chunks=self.chunks, hit=lambda _: 0)
        self.model = StepModel(self.clock)
        self.meter = StepMeter(
            view, self.model, lambda: RouterConfig(policy=RouterPolicy.COST),
            lambda name: self.turns is None or name in self.turns, self.clock,
        )  # fmt: skip

    def job(self, name: str, tokens: int, ttft_ms: float | None = None, **fields: Any) -> None:
        extra = {"ttft_ms": ttft_ms} if ttft_ms else None
        params = SimpleNamespace(extra_args=extra)
        self.chunks.waiting.append(
            FakeRequest(
                name, list(range(tokens)), client_index=OWN_CLIENT, sampling_params=params, **fields
            )
        )

    def planned(self) -> tuple[list[str], int, int]:
        """Return the order of the prompts, the most tokens of one, and those of the step."""
        self.meter.before_step()
        order, each, total = self.chunks.told.pop()
        return sorted(order, key=order.__getitem__), each, total


def test_jobs_are_ordered_by_priority_then_by_the_targets_that_they_tell() -> None:
    rig = Rig()
    rig.job("calm", 300, 9000)
    rig.job("usual", 300)
    rig.job("urgent", 300, 500)
    rig.job("first", 300, 9000, priority=-1)
    assert rig.planned()[0] == ["first", "urgent", "usual", "calm"]


def test_a_prompt_without_a_turn_gets_no_part_of_the_step() -> None:
    rig = Rig()
    rig.job("runs", 5000, num_computed_tokens=1000)
    rig.job("urgent", 100, 300)
    rig.turns = {"runs"}
    assert rig.planned() == (["runs"], 1024, 1024)


def test_without_chunked_prefill_prompts_are_only_ordered() -> None:
    rig = Rig()
    rig.chunks.able = False
    rig.job("calm", 300, 9000)
    rig.job("urgent", 300, 500)
    assert rig.planned() == (["urgent", "calm"], 0, 1024)


def test_the_speed_is_learned_from_steps_that_only_compute_prompts() -> None:
    rig = Rig()
    for tokens in [1000, 500, 1000, 300] * 10:
        rig.meter.before_step()
        rig.meter.scheduled(SimpleNamespace(num_scheduled_tokens={"job": tokens}))
        rig.clock.advance(tokens * 4e-4)
        rig.meter.after_step(0)
    assert rig.model.cost.work(0, 1000) == pytest.approx(0.4, rel=0.1)
