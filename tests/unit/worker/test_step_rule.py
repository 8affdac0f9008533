"""The step rule: what the next step of an engine computes, and what a prompt costs."""

from __future__ import annotations

import math
import random
import time

import pytest
from msgspec import structs

from pullfill.worker.step_cost import Errors, StepCost
from pullfill.worker.step_meter import Step, StepModel
from pullfill.worker.step_rule import (
    LATE_TURN,
    LEAST_TOKENS,
    LOOK,
    Plan,
    Prompt,
    Streams,
    beside,
    plan,
    quote,
)

# 1000 tokens without others before them take 0.13 s, a step with ten streams 9 ms.
COST = StepCost(0.006, 0.0003, 0.0, 1e-4, 6e-8)
STEP = 1024


def prompt(name: str, left: int, due: float = 1.0, *, at: int = 0, arrival: float = 0.0) -> Prompt:
    return Prompt(name, at, left, due, arrival)


def streams(count: int, itl_s: float = 0.05, spoiled: int = 0) -> Streams:
    return Streams(count + spoiled, 0, {(itl_s, 0): count} if count else {})


def planned(beside: Streams, *prompts: Prompt, turn: int = 1, errors: Errors | None = None) -> Plan:
    return plan(beside, prompts, COST, errors or Errors(), now=0.0, step_tokens=STEP, turn=turn)


def seconds(beside: Streams, *prompts: Prompt, errors: Errors | None = None) -> float:
    """How long the planned step takes."""
    tokens, at = planned(beside, *prompts, errors=errors).tokens, {p.name: p.at for p in prompts}
    work = sum(COST.work(at[name], count) for name, count in tokens.items())
    return COST.base(beside.count, beside.kv_tokens) + work


def priced(beside: Streams, *prompts: Prompt) -> float:
    """What they cost together: each one beside those before it."""
    return sum(
        quote(one, beside, prompts[:at], COST, Errors(), now=0.0, step_tokens=STEP)[0]
        for at, one in enumerate(prompts)
    )


# ---------------------------------------------------------------- how long a step is


def test_what_a_client_puts_first_comes_first_also_if_it_is_due_last() -> None:
    urgent = structs.replace(prompt("urgent", 200, 9.0), priority=-1)
    found = planned(Streams(), prompt("a", 700), urgent, prompt("late", 700, -1.0), turn=LATE_TURN)
    assert found.order[0] == "urgent"
    assert found.tokens["urgent"] == 200


def test_without_streams_a_step_is_full() -> None:
    assert planned(Streams(), prompt("a", 1700), prompt("b", 700, 2.0)).tokens == {"a": STEP}


def test_no_prompt_begins_with_the_last_few_tokens_of_a_step() -> None:
    found = planned(Streams(), prompt("a", STEP - 1), prompt("b", 700, 2.0))
    assert found.tokens == {"a": STEP - 1}


def test_a_prompt_that_a_step_completes_is_not_delayed_by_the_next_one() -> None:
    found = planned(Streams(), prompt("a", 700), prompt("b", 700, 2.0))
    assert found.tokens == {"a": 700}


@pytest.mark.parametrize(("waiting", "taken"), [(2, 2), (3, 2), (20, 12)])
def test_short_prompts_share_a_step_while_that_saves_more_than_it_delays(
    waiting: int, taken: int
) -> None:
    found = planned(Streams(), *(prompt(str(number), 40) for number in range(waiting)))
    assert len(found.tokens) == taken


def test_streams_alone_make_an_empty_plan() -> None:
    found = planned(streams(10))
    assert (found.order, found.total) == ((), 0)


def test_beside_streams_a_step_is_much_shorter_than_their_target() -> None:
    one = prompt("a", 3000, 5.0)
    assert 0.009 < seconds(streams(10), one) <= 0.5 * 0.05
    assert planned(streams(10), one).total < STEP / 4


def test_a_short_prompt_is_computed_at_once() -> None:
    assert planned(streams(10), prompt("a", 40)).tokens == {"a": 40}


def test_steps_become_longer_if_more_prompts_would_be_late_than_streams() -> None:
    many = [prompt(str(n), 1000, 1.0 + 0.14 * n) for n in range(12)]
    assert seconds(streams(2), *many) > 1.5 * seconds(streams(2), many[0])


def test_what_steps_took_decides_how_long_they_may_be() -> None:
    sure, wild = Errors(), Errors()
    for number in range(400):
        sure.stepped(0.02, 0.02)
        wild.stepped(0.02, 0.02 * (3.0 if number % 5 == 0 else 1.0))
    beside, one = streams(4), prompt("a", 3000)
    found = [seconds(beside, one, errors=errors) for errors in (wild, sure)]
    assert found[0] < 0.05 / 3 < found[1] < 0.05


def test_late_prompts_make_no_step_longer() -> None:
    """Else many of them would outvote the streams, and nobody would be in time."""
    late = [prompt(str(number), 700, -9.0, arrival=-10.0) for number in range(20)]
    alone_s = seconds(streams(10), prompt("a", 3000, 5.0))
    assert seconds(streams(10), prompt("a", 3000, 5.0), *late) <= alone_s
    assert 0.009 < seconds(streams(10), *late) <= alone_s


def test_late_prompts_alone_leave_time_for_one_that_comes_meanwhile() -> None:
    found = plan(Streams(), [prompt("late", 9000, -1.0, arrival=-2.0)], COST, Errors(), now=0.0,
                 step_tokens=8192)  # fmt: skip
    assert 0.2 < COST.work(0, found.total) < 0.4, "a third of its target"


def test_streams_that_have_missed_their_target_have_no_vote() -> None:
    found = planned(streams(0, spoiled=10), prompt("a", 3000))
    assert found.total == STEP


def test_beside_lost_streams_a_new_prompt_could_still_be_in_time() -> None:
    assert 0.03 < seconds(streams(0, spoiled=10), prompt("a", 3000, 0.15)) < 0.15 / 2
    assert planned(Streams(), prompt("a", 3000, 1.0)).total == STEP, "nobody waits for tokens"


def test_beside_streams_that_can_spare_a_gap_a_prompt_gets_a_step_of_its_own() -> None:
    soon = prompt("a", 700, 0.1)
    assert planned(Streams(4, 0, {(0.05, 1): 4}), soon).total == 700
    assert planned(Streams(4, 0, {(0.05, 0): 4}), soon).total < 500
    mixed = planned(Streams(5, 0, {(0.05, 1): 3, (0.05, 0): 2}), soon)
    assert mixed.total < 500, "two would miss their target for one prompt"


def test_no_more_gaps_are_spent_than_streams_can_spare() -> None:
    long = prompt("a", 2 * STEP, COST.work(0, 2 * STEP) + 0.05)
    assert planned(Streams(1, 0, {(0.05, 3): 1}), long).total == STEP
    assert planned(Streams(1, 0, {(0.05, 2): 1}), long).total < STEP


def test_a_gap_is_not_spent_on_a_prompt_that_has_time() -> None:
    assert planned(Streams(10, 0, {(0.05, 4): 10}), prompt("a", 700, 9.0)).total < 500


def test_the_smallest_target_counts_if_all_can_be_kept() -> None:
    both = Streams(10, 0, {(0.03, 0): 5, (0.2, 0): 5})
    assert seconds(both, prompt("a", 3000, 5.0)) < 0.03


def test_a_deep_prompt_gets_fewer_tokens_for_the_same_time() -> None:
    beside = streams(2, 0.1)
    new, deep = prompt("a", 3000, 5.0), prompt("a", 3000, 5.0, at=4000)
    assert LEAST_TOKENS < planned(beside, deep).total < planned(beside, new).total / 2
    assert seconds(beside, deep) == pytest.approx(seconds(beside, new), rel=0.05)


# ---------------------------------------------------------------- which prompts come first


def test_what_is_due_first_comes_first() -> None:
    found = planned(streams(4), prompt("later", 100, 0.9), prompt("soon", 100, 0.4))
    assert found.order == ("soon", "later")


def test_the_prompt_that_makes_others_late_is_put_off() -> None:
    short = [prompt(str(n), 300, 0.5, arrival=n) for n in range(3)]
    found = planned(streams(4), prompt("long", 6000, 0.4, arrival=-1.0), *short)
    assert found.order[-1] == "long"


def test_late_prompts_come_by_arrival_and_one_of_them_first_now_and_then() -> None:
    late = [prompt("b", 500, -1.0, arrival=-2.0), prompt("a", 500, -2.3, arrival=-3.0)]
    new = [prompt("b", 500, -1.0, arrival=-2.0), prompt("a", 500, -2.2, arrival=-3.0)]
    after, first = ("timely", "a", "b"), ("a", "timely", "b")
    for turn, old, order in (
        (1, late, after), (LATE_TURN, new, after), (LATE_TURN, late, first)
    ):  # fmt: skip
        assert planned(streams(4), *old, prompt("timely", 500), turn=turn).order == order


def test_many_late_prompts_hide_none_that_can_be_in_time() -> None:
    late = [prompt(str(n), 500, -1.0 - n, arrival=-2.0 - n) for n in range(2 * LOOK)]
    ahead, one = prompt("ahead", 1500, 0.9), prompt("one", 500)
    assert planned(streams(4), *late, one, ahead).order[:2] == ("ahead", "one")
    alone, behind = (
        quote(one, streams(4), [*others, ahead], COST, Errors(), now=0.0, step_tokens=STEP)[1]
        for others in ((), late)
    )
    assert behind == pytest.approx(alone), "it comes before those that are late already"


def test_a_late_prompt_ends_however_many_come_in_time() -> None:
    left, turn = 2000, 0
    while left > 0 and turn < 1000:
        turn += 1
        new = [prompt(f"{turn}/{n}", 500, 1.0) for n in range(4)]
        old = prompt("old", left, -5.0, at=2000 - left, arrival=-6.0)
        found = plan(streams(4), [*new, old], COST, Errors(), now=0.0, step_tokens=STEP, turn=turn)
        left -= found.tokens.get("old", 0)
    assert left <= 0


@pytest.mark.parametrize("seed", range(20))
def test_every_plan_keeps_its_limits(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [
        prompt(str(n), rng.randint(1, 5000), rng.uniform(-1, 5), at=rng.randint(0, 4000))
        for n in range(rng.randint(1, 90))
    ]
    slack = rng.randint(0, 2)
    keep = {(rng.uniform(0.002, 0.2), slack): 1}
    beside = Streams(rng.randint(0, 60), rng.randint(0, 90_000), keep)
    found = plan(beside, prompts, COST, Errors(), now=0.0, step_tokens=STEP, turn=seed)
    lefts = {one.name: one.left for one in prompts}
    assert sorted(found.order) == sorted(lefts)
    assert 0 < found.total <= STEP
    assert all(0 < count <= lefts[name] for name, count in found.tokens.items())
    # What gets tokens is in front: vLLM walks its requests in this order.
    assert tuple(found.tokens) == found.order[: len(found.tokens)]


# ---------------------------------------------------------------- what a prompt costs


def test_a_prompt_costs_more_beside_streams_and_behind_others() -> None:
    one, others = prompt("a", 800), [prompt(str(n), 800, 0.9) for n in range(6)]
    alone = priced(Streams(), one)
    assert priced(streams(20), one) > alone
    assert priced(Streams(), *others, one) - priced(Streams(), *others) > alone


def test_a_prompt_that_will_be_late_costs_a_miss() -> None:
    in_time, late = prompt("a", 3000, 1.2), prompt("a", 3000, 0.8)
    ahead = prompt("b", 2000, 0.45)
    more = [priced(Streams(), ahead, one) - priced(Streams(), ahead) for one in (in_time, late)]
    assert more[1] > more[0] + 0.1


def test_a_prompt_too_long_for_its_target_is_to_go_where_it_is_done_first() -> None:
    def cost(*others: Prompt) -> tuple[float, float]:
        one = prompt("long", 5000)
        return quote(one, Streams(), others, COST, Errors(), now=0.0, step_tokens=STEP)

    (alone, first_s), (behind, later_s) = cost(), cost(prompt("a", 3000))
    assert first_s < later_s
    assert 0.0 < alone < behind < 0.5


def test_a_job_costs_streams_something_also_if_it_is_late_beside_them() -> None:
    for ttft_s, late in ((2.0, False), (0.2, True), (0.05, True)):
        seconds, harm = beside(1024, ttft_s, streams(10), COST, Errors(), step_tokens=STEP)
        assert (seconds > ttft_s) == late
        assert harm > 0.001


def test_a_plan_and_a_price_take_little_time() -> None:
    prompts = [prompt(str(n), 700, 0.2 * n) for n in range(8)]
    took = []
    for _ in range(200):
        begin = time.perf_counter()
        priced(streams(32), *prompts)
        took.append(time.perf_counter() - begin)
    # It takes 25 us. The bound is for a busy machine.
    assert sorted(took)[20] < 1e-3


# ---------------------------------------------------------------- what steps take


def test_fill_is_the_inverse_of_work() -> None:
    for at, tokens in ((0, 100), (4000, 100), (0, 5000)):
        assert COST.fill(at, COST.work(at, tokens) + 1e-9) == tokens
    assert COST.fill(0, 0.0) == 0
    assert COST.fill(0, math.inf) > 1 << 20
    assert StepCost().fill(0, 1.0) > 1 << 20


def ran(fit: StepModel, streams: int, kv: int, parts: list[tuple[int, int]], took_s: float) -> None:
    fit.learn(Step(streams, kv, tuple(parts), {}), took_s)


def run_steps(fit: StepModel, rng: random.Random, true: StepCost, steps: int) -> None:
    for _ in range(steps):
        count = rng.randint(1, 30)
        parts = [(rng.randint(0, 3000), rng.randint(50, 600))] if rng.random() < 0.3 else []
        seconds = true.base(count, 500 * count) + sum(true.work(*part) for part in parts)
        ran(fit, count, 500 * count, parts, seconds * rng.lognormvariate(0, 0.05))


def test_costs_are_learned() -> None:
    fit, rng = StepModel(), random.Random(1)
    true = StepCost(0.006, 0.0003, 1e-7, 8e-5, 6e-8)
    run_steps(fit, rng, true, 1500)
    for count, at, tokens in ((2, 0, 400), (25, 2500, 200)):
        base = true.base(count, 500 * count)
        assert fit.cost.base(count, 500 * count) == pytest.approx(base, rel=0.1)
        assert fit.cost.work(at, tokens) == pytest.approx(true.work(at, tokens), rel=0.1)


def test_what_streams_cost_is_not_forgotten_while_their_number_stays() -> None:
    fit, rng = StepModel(), random.Random(1)
    run_steps(fit, rng, COST, 600)
    for _ in range(600):
        ran(fit, 4, 2000, [], COST.base(4, 0) * rng.lognormvariate(0, 0.05))
    assert fit.cost.base(30, 15_000) == pytest.approx(COST.base(30, 0), rel=0.15)


def test_an_engine_that_becomes_slower_is_noticed_within_a_hundred_steps() -> None:
    fit, rng = StepModel(), random.Random(1)
    run_steps(fit, rng, COST, 800)
    slow = StepCost(*(3 * getattr(COST, name) for name in COST.__struct_fields__))
    for _ in range(100):
        ran(fit, 8, 4000, [], slow.base(8, 0))
    assert fit.cost.base(8, 4000) == pytest.approx(slow.base(8, 0), rel=0.1)


def test_prompts_cost_something_where_no_step_is_without_them() -> None:
    """Steps are faster than assumed, so what is assumed of streams alone is more than all takes."""
    fit, rng = StepModel(), random.Random(1)
    gpu = StepCost(0.003, 0.00003, 0.0, 5e-6, 1e-10)
    for _ in range(2000):
        tokens = rng.randint(50, 1000)
        ran(fit, 30, 0, [(0, tokens)], gpu.base(30, 0) + gpu.work(0, tokens))
    assert fit.cost.work(0, 1000) == pytest.approx(gpu.work(0, 1000), rel=0.5)
    step_s = fit.cost.base(30, 0) + fit.cost.work(0, 500)
    assert step_s == pytest.approx(gpu.base(30, 0) + gpu.work(0, 500), rel=0.2)


def test_small_chunks_beside_streams_do_not_make_prompts_dear() -> None:
    """Else the next chunk would be smaller still, and no step without one would tell better."""
    fit, gpu = StepModel(), StepCost(0.018, 0.0, 1.5e-8, 5.7e-5, 8e-9)
    for _ in range(20):
        ran(fit, 0, 0, [(0, 1000)] * 4, gpu.base(0, 0) + 4 * gpu.work(0, 1000))
    for number in range(1500):
        at = 32 * number % 992
        ran(fit, 6, 6000, [(at, 32)], gpu.base(6, 6000) + gpu.work(at, 32))
    assert fit.cost.work(0, 1000) == pytest.approx(gpu.work(0, 1000), rel=0.3)
    assert fit.cost.base(6, 6000) == pytest.approx(gpu.base(6, 6000), rel=0.2)


def test_prompts_beside_the_first_streams_are_not_taken_for_dear() -> None:
    """A worker that takes prompts for dear computes none, and so would never learn better."""
    fit, rng = StepModel(), random.Random(1)
    gpu = StepCost(0.018, 0.0, 1.5e-8, 5.7e-5, 8e-9)
    ran(fit, 0, 0, [(0, 1000)], gpu.base(0, 0) + gpu.work(0, 1000))
    for number in range(60):
        streams, tokens = 1 + number // 6, rng.randint(60, 250)
        step_s = gpu.base(streams, 1000 * streams) + gpu.work(0, tokens)
        ran(fit, streams, 1000 * streams, [(0, tokens)], step_s)
    for _ in range(4000):
        ran(fit, 110, 170_000, [], gpu.base(110, 170_000))
    assert fit.cost.work(0, 1000) == pytest.approx(gpu.work(0, 1000), rel=0.25)


def test_prompts_do_not_become_cheap_while_there_are_none() -> None:
    fit, rng = StepModel(), random.Random(1)
    run_steps(fit, rng, COST, 1500)
    for _ in range(3000):  # the engine is half as fast, and computes no prompts
        count = rng.randint(1, 30)
        ran(fit, count, 500 * count, [], 2 * COST.base(count, 500 * count))
    assert fit.cost.work(0, 300) > 0.9 * COST.work(0, 300)


def test_a_pause_spoils_nothing() -> None:
    fit, rng = StepModel(), random.Random(1)
    run_steps(fit, rng, COST, 800)
    ran(fit, 8, 4000, [], 5.0)
    assert fit.cost.base(8, 4000) == pytest.approx(COST.base(8, 0), rel=0.2)


def test_errors_tell_how_often_steps_take_longer() -> None:
    errors = Errors()
    for number in range(800):
        errors.stepped(0.02, 0.02 * (2.0 if number % 10 == 0 else 1.0))
    assert errors.beyond(1.5) == pytest.approx(0.1, abs=0.02)
    assert errors.beyond(0.5) > 0.99
    # What was never seen is unlikely, and less so the farther off it is.
    assert 0 < errors.beyond(10.0) < errors.beyond(2.5) < 0.01
