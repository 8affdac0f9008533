"""The policy cost from prediction to first token, with workers whose speed is known."""

from __future__ import annotations

import time
from collections import Counter
from statistics import median
from typing import Any

import pytest

from pullfill.decode_worker.cost import (
    PROBE_TOKENS,
    CostModel,
    Option,
    Prefill,
    Queue,
    Targets,
)
from pullfill.decode_worker.rules import Decision, Situation, decide
from pullfill.rate import FORGET_S, SHARE_S
from pullfill.wire import RouterConfig, RouterPolicy
from pullfill.worker.step_meter import Step
from pullfill.worker.step_rule import LATER, Prompt
from tests.support.fakes import FakeClock, FakeRequest

CONFIG = RouterConfig(policy=RouterPolicy.COST)
LOCAL_S, REMOTE_S, STEP_S = 0.0003, 0.0002, 0.008
"""Seconds of a prompt token here and at the prefill worker, and of a step."""
STAY = {"queue_jobs": 1000}
"""A queue that is full keeps every prompt here."""


class Rig:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.model = CostModel(1024, clock=self.clock)
        self.serial = 0
        self.at = Counter[str]()  # tokens of each request that are computed
        self.away: dict[str, int] = {}  # tokens of the prompts that are sent away
        self.rate = 0.0  # as prefill workers tell it

    @property
    def queue(self) -> Queue:
        """What one prefill worker has to do."""
        return Queue(1, len(self.away), sum(self.away.values()), self.rate)

    def ask(
        self, tokens: int, *, ttft_s: float = 2.0, itl_s: float = 0.05, **fields: Any
    ) -> tuple[str, Decision, Prefill]:
        """Decide where a prompt is prefilled, and enter it as admitted."""
        self.serial += 1
        name = f"r{self.serial}"
        costs = self.model.predict(self.queue, Targets(ttft_s, itl_s), 0, tokens)
        told = {"prefill_workers": 1, "queue_available": True, "config": CONFIG, **fields}
        decision = decide(FakeRequest(name, [1]), Situation(tokens, 0, costs=costs, **told))
        self.model.admitted(name, costs, decision.remote)
        if decision.remote:
            self.away[name] = tokens
        return name, decision, costs

    def step(self, seconds: float, **tokens: int) -> None:
        parts = tuple((self.at[name], count) for name, count in tokens.items() if count > 8)
        self.at.update(tokens)
        step = Step(len(tokens) - len(parts), 0, parts, tokens)
        self.clock.advance(seconds)
        self.model.stepped(step, seconds)

    def bring(self, name: str, tokens: int, each_s: float = REMOTE_S) -> None:
        """A prefill worker computes it, and a step makes its first token."""
        seconds = tokens * each_s
        self.clock.advance(seconds)
        self.model.settled(name, True)
        del self.away[name]
        self.rate = 1 / REMOTE_S
        self.step(STEP_S, **{name: 1})

    def compute(self, name: str, tokens: int, each_s: float = LOCAL_S) -> None:
        while tokens > 0:
            now, tokens = min(tokens, 512), tokens - 512
            self.step(STEP_S + now * each_s, **{name: now})

    def serve(self, tokens: int, remote_s: float = REMOTE_S, **fields: Any) -> Prefill:
        name, decision, costs = self.ask(tokens, **fields)
        if decision.remote:
            self.bring(name, tokens, remote_s)
        else:
            self.compute(name, tokens)
        self.step(STEP_S, **{name: 1})
        self.model.finished(name)
        return costs

    def streams(self, count: int) -> list[str]:
        names = []
        for _ in range(count):
            name, _, _ = self.ask(16, **STAY)
            self.compute(name, 16)
            names.append(name)
        return names


@pytest.fixture
def rig() -> Rig:
    """Both ways are measured, and nothing runs."""
    made = Rig()
    for _ in range(8):
        made.serve(1000)
        made.serve(400, **STAY)
    return made


# ------------------------------------------------------------------ the decision


def test_an_unmeasured_prefill_worker_is_tried_with_one_prompt_at_a_time() -> None:
    rig = Rig()
    first, second = rig.ask(PROBE_TOKENS + 1), rig.ask(300)
    assert first[1] == Decision(True, "cost_probe")
    # Meanwhile length decides, as without this policy.
    assert second[1] == Decision(False, "short_prompt")
    assert rig.ask(600)[1] == Decision(True, "long_prompt")
    assert Rig().ask(PROBE_TOKENS)[1].reason == "short_prompt"


def test_a_slow_prefill_worker_is_left_and_tried_again_later(rig: Rig) -> None:
    for _ in range(6):
        rig.serve(1000, remote_s=20 * REMOTE_S)
    name, decision, _ = rig.ask(1000)
    assert not decision.remote
    rig.model.finished(name)
    rig.clock.advance(FORGET_S + 1)
    assert rig.ask(300)[1].reason == "cost_probe"


def test_what_a_job_takes_beside_its_prompt_does_not_grow_with_the_prompt(rig: Rig) -> None:
    for _ in range(4):
        name = f"short {rig.clock.monotonic()}"
        costs = rig.model.predict(rig.queue, Targets(2.0, 0.05), 0, 30)
        rig.model.admitted(name, costs, True)
        rig.away[name] = 30
        rig.bring(name, 30, 0.9 / 30)  # it waited for something for 0.9 s
        rig.model.finished(name)
    told = remote(rig, rig.queue, 1000)
    assert told.ttft_s < 1000 * REMOTE_S + 0.95


def test_what_a_job_costs_streams_there_counts_as_what_it_costs_here(rig: Rig) -> None:
    def there(harm: float) -> float:
        queue = Queue(1, 0, 0, 1000.0, harm)
        return remote(rig, queue, 2000, ttft_s=9.0).cost

    assert there(0.5) > there(0.0) + 2.0 * 0.5, "for two seconds"
    alone, free = rig.model.pace(1.0)
    rig.streams(4)
    beside, harm = rig.model.pace(1.0)
    assert free == 0.0 < harm
    assert beside < 0.9 * alone, "each part is a step with the streams"
    own = rig.model.predict(rig.queue, Targets(1.0, 0.05), 0, 1024).local
    assert own.ttft_s == pytest.approx(1024 / beside, rel=0.01)
    assert own.cost == pytest.approx(LATER * own.ttft_s + harm * own.ttft_s, rel=0.01)


def remote(rig: Rig, queue: Queue, tokens: int, ttft_s: float = 2.0) -> Option:
    found = rig.model.predict(queue, Targets(ttft_s, 0.05), 0, tokens).remote
    assert found is not None
    return found


def test_a_prompt_that_is_late_anyway_has_no_vote_there_either(rig: Rig) -> None:
    """Else a prompt too long for any engine stayed here, beside the streams."""
    alone_s = rig.model.cost.work(0, 2000)
    slow = Queue(1, 0, 0, 500.0)
    without, having = (remote(rig, slow, 2000, ttft_s) for ttft_s in (0.9 * alone_s, 1.1 * alone_s))
    # Both would be late there. One of them could be in time here.
    assert having.cost * 1.1 == pytest.approx(without.cost * 0.9 + 1.1)


def test_what_is_in_front_is_shared_by_those_who_pull(rig: Rig) -> None:
    def work(queue: Queue) -> object:
        return pytest.approx(rig.model.predict(queue, Targets(9.0, 0.05), 0, 500).work, rel=0.1)

    assert work(Queue(2, 3, 4000, 1000.0)) == 2.0 + 0.5
    assert work(Queue(2, 1, 4000, 1000.0)) == 0.5, "one of them is free"


def sent(rig: Rig, tokens: int, ttft_s: float) -> None:
    rig.serial += 1
    costs = rig.model.predict(Queue(1, 0, 0, 1000.0), Targets(ttft_s, 0.05), 0, tokens)
    rig.model.admitted(f"sent{rig.serial}", costs, True)


def test_jobs_that_are_late_are_not_waited_for(rig: Rig) -> None:
    """The step rule lets those in time past (worker/step_rule.py), so this is what happens."""
    sent(rig, 4000, 1.0)
    late = remote(rig, Queue(1, 1, 4000, 1000.0), 500)
    assert late.ttft_s < 0.6
    sent(rig, 600, 2.0)
    assert 1.0 < remote(rig, Queue(1, 2, 4600, 1000.0), 500).ttft_s < 1.2
    # Another worker has as many, like ours.
    assert 1.5 < remote(rig, Queue(1, 4, 9200, 1000.0), 500, ttft_s=9.0).ttft_s < 1.9


def test_a_job_that_makes_another_late_costs_as_much(rig: Rig) -> None:
    alone = remote(rig, Queue(1, 0, 0, 1000.0), 400, ttft_s=1.2)
    sent(rig, 1500, 1.7)
    before_it = remote(rig, Queue(1, 1, 1500, 1000.0), 400, ttft_s=1.2)
    assert before_it.ttft_s == pytest.approx(alone.ttft_s, abs=0.01)
    assert before_it.cost > 0.7 + alone.cost


def test_a_long_wait_behind_others_is_remembered_for_jobs_with_others_in_front(rig: Rig) -> None:
    """And not for long: else nothing would be sent there that could tell otherwise."""
    free, others = Queue(1, 0, 0, 1000.0), Queue(1, 1, 100, 1000.0)
    before = [remote(rig, queue, 200).ttft_s for queue in (free, others)]
    for number in range(4):
        costs = rig.model.predict(others, Targets(2.0, 0.05), 0, 200)
        rig.model.admitted(f"behind{number}", costs, True)
        rig.clock.advance(1.5)
        rig.model.settled(f"behind{number}", True)
        rig.step(STEP_S, **{f"behind{number}": 1})
        rig.model.finished(f"behind{number}")
    after = [remote(rig, queue, 200).ttft_s for queue in (free, others)]
    assert after[0] == pytest.approx(before[0], abs=0.02)
    assert after[1] > before[1] + 0.8
    rig.clock.advance(3 * SHARE_S)
    assert remote(rig, others, 200).ttft_s < before[1] + 0.1


def test_how_often_remote_prefills_are_late_counts(rig: Rig) -> None:
    def seldom_late() -> float:
        return remote(rig, Queue(1, 0, 0, 1000.0), 100, ttft_s=0.3).cost

    before = seldom_late()
    for number in range(64):
        sent(rig, 100, 0.3)
        rig.clock.advance(0.1 if number % 2 else 0.4)
        name = f"sent{rig.serial}"
        rig.model.settled(name, True)
        rig.step(STEP_S, **{name: 1})
        rig.model.finished(name)
    assert seldom_late() > before + 0.1


# ------------------------------------------------------------------ the next step


def test_many_different_targets_make_a_plan_no_slower(rig: Rig) -> None:
    for number in range(200):
        name, _, _ = rig.ask(16, itl_s=0.3 - number / 1000, **STAY)
        rig.compute(name, 16)
    now = rig.clock.monotonic()
    prompts = [Prompt(str(n), 0, 700, now + 0.2 * n, now) for n in range(64)]
    took = []
    for _ in range(5):
        begin = time.perf_counter()
        rig.model.plan(prompts, (), 1024)
        took.append(time.perf_counter() - begin)
    # It takes 0.5 ms. The bound is for a busy machine.
    assert min(took) < 0.01
    calm = rig.model.plan([Prompt("calm", 0, 3000, now + 30.0, now)], (), 1024)
    step_s = rig.model.base(200) + rig.model.cost.work(0, calm.total)
    assert step_s < 0.101, "the smallest target counts"


# ------------------------------------------------------------------ what is learned


def test_predictions_come_true(rig: Rig) -> None:
    served = [rig.serve(tokens) for tokens in (300, 1500, 800, 2500, 600)]
    assert median(abs(one.option.ttft_s / one.took_s - 1.0) for one in served) < 0.1  # type: ignore[union-attr,operator]


def test_regret_is_what_another_choice_would_have_saved(rig: Rig) -> None:
    served = rig.serve(1000, remote_s=10 * REMOTE_S)
    assert served.took_s == pytest.approx(2.008, rel=0.01)
    # Here it would have taken about 0.3 s.
    assert served.regret_s == pytest.approx(1.690, rel=0.05)


def test_a_remote_prefill_that_failed_is_computed_here_and_judges_nobody(rig: Rig) -> None:
    name, decision, costs = rig.ask(1000)
    assert decision.remote
    rig.model.settled(name, False)
    rig.compute(name, 1000)
    assert costs.regret_s is None


def test_an_engine_that_computes_no_prompt_is_taken_to_be_as_fast_as_the_others() -> None:
    """If it were taken to be slow, it would get no prompt, and its speed would stay unknown."""
    rig = Rig()
    rig.serve(1000)
    rig.model.predict(rig.queue, Targets(2.0, 0.05), 0, 500)
    assert rig.model.cost.work(0, 1000) == pytest.approx(1000 * REMOTE_S, rel=0.1)
    for _ in range(8):
        rig.serve(400, **STAY)
    assert rig.model.cost.work(0, 1000) == pytest.approx(1000 * LOCAL_S, rel=0.1)


def test_a_stream_can_spare_one_of_100_gaps_but_the_last_one() -> None:
    rig = Rig()
    (name,) = rig.streams(1)

    def told(steps: int, seconds: float = STEP_S) -> dict[tuple[float, int], int]:
        for _ in range(steps):
            rig.step(seconds, **{name: 1})
        return dict(rig.model.kept().targets)

    assert told(150) == {(0.05, 0): 1}
    assert told(200) == {(0.05, 2): 1}
    assert told(1, 0.06) == {(0.05, 1): 1}
    assert told(2, 0.06) == {(0.05, 0): 1}
    assert told(1, 0.06) == {}
    assert told(100) == {(0.05, 0): 1}
    assert told(2000) == {(0.05, 4): 1}


def test_nothing_is_left_of_requests_that_are_over() -> None:
    """And sums are exact, whatever comes and goes."""
    rig, fresh = Rig(), Rig()
    names = [*rig.streams(3), *(rig.ask(100 + 7 * n, ttft_s=0.1 * n + 1)[0] for n in range(40))]
    rig.model.settled(names[-1], True)
    rig.model.settled(names[5], False)
    rig.step(1.0, **{name: 33 for name in names[10:20]})
    for name in [*names[::-1], "never seen"]:
        rig.model.finished(name)
    assert rig.model.streams == 0
    queue = Queue(1, 0, 0, 1000.0)
    first, then = (made.model.predict(queue, Targets(1, 1), 0, 500).work for made in (rig, fresh))
    assert first == pytest.approx(then, rel=0.05)
