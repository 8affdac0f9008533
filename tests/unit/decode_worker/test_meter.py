"""Steps are timed from end to end, and the policy decides who sizes the chunks."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.decode_worker.cost import Queue
from pullfill.decode_worker.meter import DecodeMeter
from pullfill.decode_worker.rules import Decision, Situation
from pullfill.engine.front_wire import LoadReport
from pullfill.engine.requests import OWN_CLIENT
from pullfill.rate import SHARE_S
from pullfill.wire import RouterConfig, RouterPolicy
from pullfill.worker.step_cost import StepCost
from tests.support.fakes import FakeChunks, FakeClock, FakeRequest
from tests.support.said import blank


class Rig:
    def __init__(self) -> None:
        self.clock, self.chunks = FakeClock(), FakeChunks()
        self.config = RouterConfig(policy=RouterPolicy.COST)
        chunks: Any = self.chunks
        context: Any = SimpleNamespace(router_config=lambda: self.config)
        view: Any = SimpleNamespace(chunks=chunks, hit=lambda request: 0)
        self.meter = DecodeMeter(context, view, self.clock)

    def step(self, seconds: float, idle_s: float = 0.0, **tokens: int) -> None:
        self.clock.advance(idle_s)
        self.meter.before_step()
        self.meter.scheduled(SimpleNamespace(num_scheduled_tokens=tokens))
        self.clock.advance(seconds)
        self.meter.after_step(0)

    def local(self, name: str, tokens: int, **fields: Any) -> None:
        request = FakeRequest(name, list(range(tokens)), **fields)
        costs = self.meter.predict(request, 0, Queue(), self.config)
        now = Situation(tokens, 0, config=self.config, costs=costs)
        self.meter.admitted(name, now, Decision(False, "queue_full"))


def pressure(rig: Rig) -> float:
    meter = rig.meter.demand
    told = meter.figures(
        open_tokens=0, queued_tokens=0, pulling=[], connected=False, own_rate=0.0, kv=0.1, seats=0.1
    )
    return told.pressure


@pytest.mark.parametrize(("pause_s", "took_s"), [(5.0, 0.01), (0.001, 0.011)])
def test_a_pause_is_part_of_a_step_where_steps_follow_each_other(
    pause_s: float, took_s: float
) -> None:
    """Streams wait for it then: outputs are sent. An engine that was idle kept nobody waiting."""
    rig = Rig()
    for _ in range(30):
        rig.step(0.01, idle_s=pause_s, a=1)
    assert rig.meter.model.base(1) == pytest.approx(took_s, rel=0.03)


def test_a_step_is_timed_alike_where_before_step_comes_within_it() -> None:
    """Stock vLLM does that."""
    rig = Rig()
    plan = SimpleNamespace(num_scheduled_tokens={"a": 1})
    for _ in range(10):
        rig.clock.advance(5.0)
        rig.meter.scheduled(plan)
        rig.clock.advance(0.01)
        rig.meter.before_step()
        rig.meter.after_step(0)
    assert rig.meter.model.base(1) == pytest.approx(0.01, rel=0.02)


def test_steps_that_overlap_are_told_apart() -> None:
    rig = Rig()
    rig.local("r", 300)
    plan = SimpleNamespace(num_scheduled_tokens={"r": 300})
    rig.meter.scheduled(plan)
    rig.meter.after_step(1)
    assert rig.meter.model.streams == 0
    rig.meter.after_step(0)
    assert rig.meter.model.streams == 1


def test_the_target_of_one_request_asks_for_no_workers() -> None:
    """No step may meet it, and it could ask for dozens."""
    rig = Rig()
    for _ in range(20):
        rig.step(0.025, a=1)
    rig.local("r", 300, sampling_params=SimpleNamespace(extra_args={"itl_ms": 1}))
    rig.step(0.1, r=300)
    for _ in range(1200):
        rig.step(0.025, a=1, r=1)
    assert rig.meter.model.streams == 1
    assert pressure(rig) == pytest.approx(0.5, rel=0.05)
    for _ in range(400):  # others slow it down
        rig.step(0.1, a=1, b=1, c=1, r=1)
    assert pressure(rig) > 1


@pytest.mark.parametrize(
    ("waiting", "told"),
    [
        ([], "release"),  # a prompt without others gets a whole step
        # An image that may not be cut is computed beside streams.
        ([FakeRequest("image", [1] * 300, mm_features=[object()])], ({"image": 0}, 0, 1024)),
        # A short prompt is computed in one step, and streams keep their drafts beside it.
        ([FakeRequest("short", [1] * 15)], ({"short": -1}, 32, 2 * 13 + 15)),
    ],
)
def test_what_is_not_cut(waiting: list[FakeRequest], told: Any) -> None:
    rig = Rig()
    rig.chunks.waiting = waiting
    rig.step(0.01, a=1024)
    assert rig.chunks.told == [told]


def test_the_share_of_prompts_is_that_of_own_ones_and_jobs() -> None:
    """What a step takes more than one without them. Streams take none."""
    rig = Rig()
    for _ in range(1000):
        rig.step(0.01, a=1)
    assert rig.meter.model.prompts.share() == 0
    for number in range(750):
        rig.local(own := f"own{number}", 300)
        for name in (own, "job"):
            rig.step(0.03, a=1, **{name: 300})
            rig.step(0.01, a=1)
        rig.meter.finished(own)
    assert rig.meter.model.prompts.share() == pytest.approx(0.5, rel=0.1)
    rig.clock.advance(SHARE_S)
    assert rig.meter.model.prompts.share() == pytest.approx(0.5 / math.e, rel=0.1)
    assert rig.meter.model.prompt_token_s == pytest.approx(0.02 / 300, rel=0.1)


def test_answers_that_ended_tell_their_uncached_tokens_and_their_own() -> None:
    rig = Rig()
    for name in ("first", "second"):
        rig.local(name, 300)
        rig.step(0.03, **{name: 300})
        for _ in range(9):
            rig.step(0.01, **{name: 1})
        rig.meter.finished(name)
    rig.local("gone before its first token", 300)
    rig.meter.finished("gone before its first token")
    assert rig.meter.model.ended == pytest.approx((1.97 * 300, 1.97 * 10, 1.97))


def test_a_step_takes_own_prompts_and_jobs_by_their_due_times() -> None:
    rig = Rig()
    rig.local("own", 300)
    own = FakeRequest("own", list(range(300)))
    job = FakeRequest("job", list(range(400)), client_index=OWN_CLIENT)
    loaded = FakeRequest("loaded", list(range(100)), num_computed_tokens=90)
    rig.chunks.waiting = [own, job, loaded]
    rig.step(0.01, a=1, b=1)
    ((order, each, total),) = rig.chunks.told
    assert (set(order), each, total) == ({"own", "job", "loaded"}, 300, 2 * 13 + 13 + 300 + 1)
    assert order["loaded"] < min(order["own"], order["job"])


def test_what_a_plan_leaves_out_does_not_begin_and_vllm_is_asked_about_it_once() -> None:
    rig = Rig()
    rig.local("a", 300)
    rig.chunks.waiting = [FakeRequest(name, list(range(300))) for name in ("a", "b")]
    rig.step(0.01, c=1)
    assert rig.meter.deferred == {"b": False}
    rig.meter.deferred["b"] = True  # it was asked about
    begun, left = rig.chunks.waiting
    begun.num_computed_tokens = 100
    rig.step(0.01, c=1)
    assert rig.meter.deferred == {"b": True}
    assert [total for _, _, total in rig.chunks.told] == [26 + 300 + 1, 26 + 200]
    rig.chunks.waiting = [left]
    rig.step(0.01, c=1)
    assert rig.meter.deferred == {}


def test_what_vllm_could_not_begin_keeps_no_other_from_beginning() -> None:
    rig = Rig()
    rig.chunks.waiting = [FakeRequest(name, list(range(300))) for name in ("a", "b")]
    rig.step(0.01, c=1)
    assert rig.meter.deferred == {"b": False}
    rig.step(0.01, c=1)
    assert rig.meter.deferred == {}, "all seats of its adapter are taken, for example"


def test_jobs_cost_nothing_once_they_are_not_followed() -> None:
    rig = Rig()
    rig.chunks.waiting = [FakeRequest("job", list(range(3000)), client_index=OWN_CLIENT)]
    took = []
    for config in (rig.config, RouterConfig(policy=RouterPolicy.CONDITIONAL)):
        rig.config = config
        rig.step(0.01, a=1)
        costs = rig.meter.predict(FakeRequest("own", list(range(500))), 0, Queue(), config)
        took.append(costs.local.ttft_s)
    assert took[1] < took[0] / 4


def test_a_report_tells_what_streams_and_prompts_take() -> None:
    cost = StepCost(0.006, 0.0003, 1e-7, 7e-5, 0.0)
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8))
    model = SimpleNamespace(
        cost=cost, requests=5, streams=4, kv_tokens=900, prompt_token_s=0.000125,
        prompts=SimpleNamespace(share=lambda: 0.2567), ended=(900.0, 700.0, 3.0),
        first_tokens=SimpleNamespace(share=lambda: 1234.4),
    )  # fmt: skip
    view = SimpleNamespace(
        load=lambda draining: blank(LoadReport, draining=draining), config=config
    )
    meter: Any = SimpleNamespace(model=model, _view=view)
    assert DecodeMeter.report(meter, draining=True) == blank(
        LoadReport, draining=True, seats=8, requests=5, streams=4, stream_tokens=900,
        prompt_share=0.26, step_s=(0.006, 0.0003, 1e-7), prompt_token_s=0.000125,
        prompt_tokens_per_s=1234.0, ended=(900.0, 700.0, 3.0),
    )  # fmt: skip
