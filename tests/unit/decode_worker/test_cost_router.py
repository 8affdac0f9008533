"""The policy cost from decision to first token, with workers whose speed is known."""

from __future__ import annotations

import random
import time
from statistics import median
from typing import Any

import pytest

from pullfill.decode_worker.cost_choice import Choice
from pullfill.decode_worker.cost_groups import Away
from pullfill.decode_worker.cost_rates import FORGET_S, Queue, span
from pullfill.decode_worker.cost_requests import Outcome, Placed, Targets
from pullfill.decode_worker.cost_router import PROBE_REASON, PROBE_TOKENS, CostRouter
from pullfill.decode_worker.request_trace import Measured
from pullfill.decode_worker.rules import Decision, Situation
from pullfill.wire import RouterConfig, RouterPolicy, StageTimings
from tests.support.fakes import FakeClock

CONFIG = RouterConfig(policy=RouterPolicy.COST)
REMOTE = Decision(True, "long_prompt")
LOCAL_S, REMOTE_S, STEP_S = 0.0003, 0.0002, 0.008
"""Seconds of a prompt token here and at the prefill worker, and of a step."""


class Rig:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.router = CostRouter(1024, clock=self.clock)
        self.serial = 0

    def situation(self, tokens: int, **fields: Any) -> Situation:
        told = {"pullers": ("p",), "pool": 1, "config": CONFIG, **fields}
        return Situation(tokens, 0, prefill_workers=1, queue_available=True, **told)

    def ask(
        self, tokens: int, able: Decision = REMOTE, *, ttft_s: float = 2.0, **fields: Any
    ) -> tuple[str, Decision, str]:
        self.serial += 1
        name = f"r{self.serial}"
        decision = self.router.place(
            name, able, self.situation(tokens, **fields), Targets(ttft_s, 0.05)
        )
        choice, _ = self.router.admitted(name, decision.remote)
        return name, decision, choice

    def step(self, seconds: float, **tokens: int) -> list[tuple[str, Outcome]]:
        step = self.router.scheduled(tokens, sum(tokens.values()))
        self.clock.advance(seconds)
        return self.router.stepped(step, seconds)

    def bring(self, name: str, tokens: int, each_s: float = REMOTE_S) -> Outcome:
        """A prefill worker computes it, and a step makes its first token."""
        seconds = tokens * each_s
        self.clock.advance(seconds)
        stages = StageTimings(prefill_ms=seconds * 1e3)
        self.router.committed(Measured(name, "p", "shm", stages, 0, self.clock.monotonic()))
        self.router.settled(name, True)
        ((_, outcome),) = self.step(STEP_S, **{name: 1})
        return outcome

    def compute(self, name: str, tokens: int, each_s: float = LOCAL_S) -> Outcome:
        found: list[tuple[str, Outcome]] = []
        while tokens > 0:
            now, tokens = min(tokens, 512), tokens - 512
            found = self.step(STEP_S + now * each_s, **{name: now})
        return found[0][1]

    def teach(self) -> None:
        """Both ways are measured, and nothing runs."""
        for _ in range(8):
            name, _, _ = self.ask(1000, able=REMOTE)
            if self.router._away.get(name):
                self.bring(name, 1000)
            else:
                self.compute(name, 1000)
            self.step(STEP_S, **{name: 1})
            self.router.finished(name)
            name, _, _ = self.ask(400, able=Decision(False, "queue_full"))
            self.compute(name, 400)
            self.router.finished(name)

    def streams(self, count: int) -> list[str]:
        names = []
        for _ in range(count):
            name, _, _ = self.ask(16, able=Decision(False, "queue_full"))
            self.compute(name, 16)
            names.append(name)
        return names


@pytest.fixture
def rig() -> Rig:
    made = Rig()
    made.teach()
    return made


# ------------------------------------------------------------------ the decision


def test_an_unmeasured_prefill_worker_is_tried_with_one_prompt_at_a_time() -> None:
    rig = Rig()
    first, second = rig.ask(PROBE_TOKENS + 1), rig.ask(300)
    assert first[1] == Decision(True, PROBE_REASON)
    # Meanwhile length decides, as without this policy.
    assert second[1] == Decision(False, "short_prompt")
    assert rig.ask(600)[1] == Decision(True, "long_prompt")
    assert Rig().ask(PROBE_TOKENS)[1].reason == "short_prompt"


def test_old_rates_are_measured_again(rig: Rig) -> None:
    rig.clock.advance(FORGET_S + 1)
    assert rig.ask(300)[1].reason == PROBE_REASON


def test_an_idle_engine_takes_what_would_wait_in_the_queue(rig: Rig) -> None:
    assert rig.ask(2000)[1].remote
    for _ in range(5):
        rig.ask(2000)
    assert rig.router._here
    assert rig.router._away


def test_a_prompt_beside_streams_goes_away_or_into_chunks(rig: Rig) -> None:
    rig.streams(4)
    assert rig.ask(2000)[2] == Choice.REMOTE
    choices = {rig.ask(2000)[2] for _ in range(8)}
    assert choices == {Choice.REMOTE, Choice.CHUNKED}


def test_a_prompt_that_must_stay_keeps_its_reason_and_spares_the_streams(rig: Rig) -> None:
    rig.streams(4)
    assert rig.ask(2000, Decision(False, "queue_full"))[1:] == (
        Decision(False, "queue_full"), Choice.CHUNKED
    )  # fmt: skip


def test_other_policies_decide_themselves() -> None:
    rig = Rig()
    rig.teach()
    config = RouterConfig()
    for able in (REMOTE, Decision(False, "short_prompt")):
        told = rig.router.place("x", able, rig.situation(300, config=config), Targets(1, 0.05))
        assert told == able


# ------------------------------------------------------------------ chunks


def test_a_step_is_limited_only_while_streams_run(rig: Rig) -> None:
    assert rig.router.chunk() == (0, 0)
    names = rig.streams(4)
    tokens, prompts = rig.router.chunk()
    assert (STEP_S + tokens * LOCAL_S, prompts) == (pytest.approx(0.04, rel=0.15), 0)
    for name in names:
        rig.router.finished(name)
    assert rig.router.chunk() == (0, 0)


def test_a_prompt_at_once_goes_on_in_chunks_when_streams_begin(rig: Rig) -> None:
    name, _, choice = rig.ask(2000, Decision(False, "queue_full"))
    assert choice == Choice.AT_ONCE
    rig.step(STEP_S + 512 * LOCAL_S, **{name: 512})
    rig.streams(3)
    assert rig.router.chunk()[0] < 200
    assert rig.router._requests[name].choice is Choice.CHUNKED


# ------------------------------------------------------------------ looking back


def test_predictions_come_true(rig: Rig) -> None:
    errors: list[float] = []
    rig.router.watch = errors.append
    for tokens in (300, 1500, 800, 2500, 600):
        name, decision, _ = rig.ask(tokens)
        (rig.bring if decision.remote else rig.compute)(name, tokens)
        rig.router.finished(name)
    assert len(errors) == 5
    assert median(errors) < 0.1


def test_regret_is_what_another_choice_would_have_saved(rig: Rig) -> None:
    name, decision, _ = rig.ask(1000)
    assert decision.remote
    outcome = rig.bring(name, 1000, each_s=10 * REMOTE_S)
    assert outcome.first_token_ms == pytest.approx(2008, rel=0.01)
    # Here it would have taken about 0.3 s.
    assert outcome.regret_ms == pytest.approx(1690, rel=0.05)


def test_a_slow_prefill_worker_is_left_and_tried_again_later(rig: Rig) -> None:
    for _ in range(6):
        name, decision, _ = rig.ask(1000)
        if decision.remote:
            rig.bring(name, 1000, each_s=20 * REMOTE_S)
        else:
            rig.compute(name, 1000)
        rig.router.finished(name)
    assert not rig.ask(1000)[1].remote
    rig.router.finished(f"r{rig.serial}")
    rig.clock.advance(FORGET_S + 1)
    name, decision, _ = rig.ask(1000)
    assert decision.reason == PROBE_REASON


def test_a_remote_prefill_that_failed_is_computed_here_and_judges_nobody(rig: Rig) -> None:
    name, decision, _ = rig.ask(1000)
    assert decision.remote
    rig.router.settled(name, False)
    assert rig.compute(name, 1000).regret_ms is None
    assert not rig.router._away


def test_nothing_is_left_of_requests_that_are_over(rig: Rig) -> None:
    names = [*rig.streams(3), *(rig.ask(2000)[0] for _ in range(4))]
    rig.router.settled(names[-1], True)
    for name in [*names, "never seen"]:
        rig.router.finished(name)
    router = rig.router
    left = [router._requests, router._proposed, router._here, router._away, router._loaded]
    assert not any(left)
    assert not router._itl


def test_first_tokens_of_one_step_are_told_in_the_order_of_the_commits(rig: Rig) -> None:
    """Not in that of hashes, which differs from process to process. Each one changes the rates."""
    names = []
    for _ in range(12):
        name, _, _ = rig.ask(1000)
        rig.router.admitted(name, True)
        rig.router.settled(name, True)
        names.append(name)
    assert [name for name, _ in rig.step(STEP_S, **dict.fromkeys(names, 1))] == names


def test_steps_with_work_that_nobody_announced_teach_nothing(rig: Rig) -> None:
    before = rig.router.rates.base(1)
    for _ in range(20):
        rig.step(9.0, unknown=500)
    assert rig.router.rates.base(1) == before


# ------------------------------------------------------------------ the queue


def placed(tokens: int, decided: float, compute_s: float, workers: int = 1) -> Placed:
    queue = Queue(("p",), workers, 0, (0.0, 0.0))
    return Placed(
        Targets(1, 1), decided, Choice.REMOTE, tokens, 0, (), 0.0, queue, compute_s=compute_s
    )


def test_our_own_jobs_progress_as_predicted() -> None:
    away = Away()
    for name in "ab":
        away.add(name, placed(1024, 10.0, 2.0), 10.0)
    now = Situation(1024, 0, pullers=("p",), pool=1, ahead_jobs=2, ahead_tokens=2048)
    assert away.queue(now, 10.0).ahead[0] == pytest.approx(8.0)
    assert away.queue(now, 11.0).ahead[0] == pytest.approx(6.0)
    away.pop("a", 12.0)
    assert away.queue(now, 13.0).ahead[0] == pytest.approx(4.0 * 0.5 + 4.0), "one is another's"


def test_sums_are_exact_whatever_comes_and_goes() -> None:
    rng, clock = random.Random(5), 10.0
    away, now = Away(), Situation(1, 0, pullers=("p",), pool=3)
    known: list[str] = []
    for number in range(3000):
        if known and rng.random() < 0.5:
            away.pop(known.pop(rng.randrange(len(known))), clock)
        else:
            one = placed(rng.randrange(1, 131_072), clock, rng.uniform(0.0, 9.0), workers=3)
            one.start = rng.randrange(131_072)
            away.add(f"r{number}", one, clock)
            known.append(f"r{number}")
    while known:
        away.pop(known.pop(), clock)
    assert away.queue(now, clock).ahead == (0.0, 0.0)
    assert away.streams({}).count == 0


@pytest.mark.parametrize("aborted", [True, False])
def test_the_next_job_begins_when_one_is_over(rig: Rig, aborted: bool) -> None:
    router = rig.router
    rig.streams(4)
    names = [name for name, decision, _ in (rig.ask(2500) for _ in range(4)) if decision.remote]
    assert [bool(router._requests[name].began) for name in names[:2]] == [True, False]
    if aborted:
        router.finished(names[0])
    else:
        router.settled(names[0], True)
    assert router._requests[names[1]].began == rig.clock.monotonic()


def test_jobs_of_others_count_as_they_are_told() -> None:
    now = Situation(1024, 0, pullers=("p",), pool=1, ahead_jobs=3, ahead_tokens=3072)
    found = Away().queue(now, 10.0)
    assert (found.jobs, found.ahead[0]) == (3, pytest.approx(12.0))


# ------------------------------------------------------------------ its price


def test_a_decision_does_not_look_at_every_stream(rig: Rig) -> None:
    """Compared within one run: ten times the streams, about the same time."""

    def price() -> float:
        times = []
        for _ in range(50):
            begin = time.perf_counter()
            rig.router.place("x", REMOTE, rig.situation(500), Targets(1, 0.05))
            times.append(time.perf_counter() - begin)
        return min(times)

    rig.streams(10)
    few = price()
    rig.streams(100)
    assert price() < 3 * few


def test_nor_at_every_prompt_that_is_away_or_here(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of them may wait, and after an outage all of those are computed here."""
    router, names = rig.router, []
    for _ in range(600):
        name, _, _ = rig.ask(1000)
        router.admitted(name, True)
        names.append(name)
    for name in names[300:]:
        router.settled(name, False)
    assert min(len(router._away), len(router._here)) > 250
    looks = []

    def looked(start: int, tokens: int) -> tuple[float, float]:
        looks.append(tokens)
        return span(start, tokens)

    monkeypatch.setattr("pullfill.decode_worker.cost_groups.span", looked)
    router.place("x", REMOTE, rig.situation(500), Targets(1, 0.05))
    router.scheduled({names[-1]: 256, "stream": 1}, 257)
    assert len(looks) < 8


def test_when_a_remote_prompt_must_begin_here(rig: Rig) -> None:
    """Its target less what computing it here takes. Nothing, if that is too late already."""
    name, decision, _ = rig.ask(4000, ttft_s=2.0)
    assert decision.remote
    left = rig.router.begin_here_in(name)
    assert left == pytest.approx(2.0 - 4000 * LOCAL_S - 4 * STEP_S, abs=0.1)
    late, decision, _ = rig.ask(4000, ttft_s=1.0)
    assert decision.remote
    assert rig.router.begin_here_in(late) is None
    here, _, _ = rig.ask(400, able=Decision(False, "queue_full"))
    assert rig.router.begin_here_in(here) is None
