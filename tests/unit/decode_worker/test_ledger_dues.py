"""The ledger's timer and counters: right, and no dearer because thousands of jobs wait."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pullfill.decode_worker.ledger import Entry, JobState, Ledger, NakDelivery, Settle
from pullfill.errors import Outcome
from pullfill.testing.loopback import LoopbackFences
from pullfill.wire import RefuseReason
from tests.support import said
from tests.support.fakes import FakeClock
from tests.support.handoff_model import HandoffModel, granted

MANY = 2_000


class Looks:
    """Counts how often any entry's due time is looked at."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        real = Entry.due.fget  # type: ignore[attr-defined]

        def due(entry: Entry) -> float:
            self.count += 1
            return float(real(entry))

        patch.setattr(Entry, "due", property(due))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def ledger(clock: FakeClock) -> Ledger:
    return Ledger(LoopbackFences(64, 8), incarnation="i", clock=clock)


def fill(ledger: Ledger, count: int, start: int = 0, **timing: Any) -> None:
    for number in range(start, start + count):
        timing = {"timeout_s": 60.0, "claim_timeout_s": 30.0, **timing}
        ledger.open(Entry(f"j{number}", f"r{number}", (1, 2, 3), first_target=1, **timing))


def test_a_tick_looks_at_few_of_many_waiting_jobs(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(ledger, MANY)
    looks = Looks(monkeypatch)
    assert ledger.tick() == pytest.approx(30.0)
    fill(ledger, 1, start=MANY)
    assert ledger.tick() == pytest.approx(30.0)
    assert looks.count < 30


def test_a_decision_looks_at_no_job(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for these sums on the engine thread, while thousands of jobs wait."""
    fill(ledger, MANY, tokens=48)
    granted = said.grant(ledger, "j0", "i", "w1").grant
    assert granted is not None
    said.progress(ledger, "j0", granted.attempt, "i", "w1", 1)
    monkeypatch.setattr(ledger, "_jobs", None)
    assert ledger.queued() == (MANY - 1, 48 * (MANY - 1))
    assert ledger.uncomputed() == 48 * (MANY - 1) + 24
    assert ledger.unwritten() == 1
    counts = ledger.counts()
    assert (counts[JobState.QUEUED], counts[JobState.GRANTED]) == (MANY - 1, 1)


def test_bound_blocks_are_counted_and_come_back(ledger: Ledger) -> None:
    fill(ledger, 5)
    assert ledger.target_blocks == 10
    ledger.cancel("r0")
    ledger.cancel("r0")
    assert ledger.target_blocks == 8
    ledger.give_up_all(Outcome.TIMEOUT)
    assert (ledger.target_blocks, ledger.open_jobs, ledger.tick()) == (0, 0, None)


def test_a_job_that_moves_has_its_time_counted_from_then(ledger: Ledger, clock: FakeClock) -> None:
    fill(ledger, 1, timeout_s=100.0, stall_s=30.0)
    assert said.grant(ledger, "j0", "i", "w").grant is not None
    said.progress(ledger, "j0", 1, "i", "w", 1)
    assert ledger.tick() == pytest.approx(100.0), "never less than it had"
    for moved in range(1, 20):
        clock.advance(29.0)
        said.progress(ledger, "j0", 1, "i", "w", 0)
        assert ledger.tick() == pytest.approx(max(30.0, 100.0 - 29.0 * moved))
    assert ledger.unwritten() == 1
    clock.advance(31.0)
    ledger.tick()
    assert ledger.take_events() == [Settle("r0", Outcome.TIMEOUT)]
    assert ledger.unwritten() == 0


@pytest.mark.parametrize(
    "words",
    [("j0", 2, "i", "w"), ("j0", 1, "old", "w"), ("j0", 1, "i", "other"), ("j", 1, "i", "w")],
)
def test_only_the_writer_of_the_current_attempt_gets_more_time(
    ledger: Ledger, clock: FakeClock, words: tuple[str, int, str, str]
) -> None:
    fill(ledger, 1)
    assert said.grant(ledger, "j0", "i", "w").grant is not None
    clock.advance(50.0)
    said.progress(ledger, *words, 1)
    assert ledger.tick() == pytest.approx(10.0)
    assert ledger.unwritten() == 2


def test_another_attempt_has_everything_to_write_again(ledger: Ledger) -> None:
    fill(ledger, 1)
    said.grant(ledger, "j0", "i", "w")
    said.progress(ledger, "j0", 1, "i", "w", 2)
    assert ledger.unwritten() == 0
    said.gave_up(ledger, "j0", 1, "i", "w", "why", retry=True)
    assert said.grant(ledger, "j0", "i", "other").grant is not None
    assert ledger.unwritten() == 2


def test_each_job_expires_at_its_own_time(ledger: Ledger, clock: FakeClock) -> None:
    fill(ledger, 1, claim_timeout_s=9.0)
    fill(ledger, 1, start=1, claim_timeout_s=3.0)
    fill(ledger, 1, start=2, claim_timeout_s=6.0)
    ends = []
    while (pause := ledger.tick()) is not None:
        clock.advance(pause)
        ledger.tick()
        ends += [(round(clock.monotonic()), e.request_id) for e in ledger.take_events()]  # type: ignore[union-attr]
    begin = ends[0][0] - 3
    assert [(at - begin, request) for at, request in ends] == [(3, "r1"), (6, "r2"), (9, "r0")]


def test_a_claim_moves_the_due_time_and_a_return_to_the_queue_moves_it_back(
    ledger: Ledger, clock: FakeClock
) -> None:
    fill(ledger, 1)
    clock.advance(20.0)
    grant = said.grant(ledger, "j0", "i", "w1").grant
    assert grant is not None
    assert ledger.tick() == pytest.approx(40.0), "the whole, not the wait for a claim"
    clock.advance(5.0)
    said.gave_up(ledger, "j0", grant.attempt, "i", "w1", "busy", retry=True)
    assert ledger.tick() == pytest.approx(30.0), "its wait for a claim begins anew"
    clock.advance(30.5)
    ledger.tick()
    assert ledger.open_jobs == 0


def test_the_heap_forgets_what_ended_long_before_it_was_due(ledger: Ledger) -> None:
    for number in range(MANY):
        fill(ledger, 1, start=number)
        ledger.cancel(f"r{number}")
    assert len(ledger._dues) < MANY


def test_an_open_wakes_the_timer_only_where_it_must(clock: FakeClock) -> None:
    woken: list[str] = []
    ledger = Ledger(
        LoopbackFences(64, 8), incarnation="i", clock=clock, on_action=lambda: woken.append("")
    )
    ledger.tell_opens = False  # somebody is there to claim
    fill(ledger, 1)
    assert len(woken) == 1, "it slept without end"
    ledger.tick()
    fill(ledger, 5, start=1)
    assert len(woken) == 1, "due after what it waits for"
    fill(ledger, 1, start=6, claim_timeout_s=5.0)
    assert len(woken) == 2, "due before"
    ledger.tell_opens = True
    fill(ledger, 1, start=7)
    assert len(woken) == 3, "nobody may be there to claim it"


def test_an_overdue_tick_that_fails_is_tried_again(
    ledger: Ledger, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine thread does it when the other thread hangs: it must not end by it."""
    fill(ledger, 1, timeout_s=5.0, claim_timeout_s=5.0)
    ledger.tick()
    clock.advance(5.5)
    ledger.tick_overdue()
    assert ledger.open_jobs == 1, "not overdue yet: the other thread's work"
    clock.advance(2.0)
    with monkeypatch.context() as broken:
        broken.setattr(type(ledger), "tick", lambda _: 1 / 0)
        ledger.tick_overdue()
    ledger.tick_overdue()
    assert ledger.open_jobs == 0


def test_a_dead_writer_without_a_delivery_costs_the_claim_timeout_at_most(
    ledger: Ledger, clock: FakeClock
) -> None:
    """Without an ack subject there is no delivery to hand back."""
    fill(ledger, 1, claim_timeout_s=5.0)
    ledger.published("j0", object())
    assert said.grant(ledger, "j0", "i", "dead", "").grant is not None
    ledger.writer_lost("dead", others_alive=True)
    assert not any(isinstance(action, NakDelivery) for action in ledger.take_actions())
    assert not [e for e in ledger.take_events() if isinstance(e, Settle)], "another may claim it"
    clock.advance(5.0)
    ledger.tick()
    (settled,) = [e for e in ledger.take_events() if isinstance(e, Settle)]
    assert (settled.loaded, settled.outcome) == (False, Outcome.CLAIM_TIMEOUT)


def test_a_job_that_has_ended_keeps_no_inputs(ledger: Ledger) -> None:
    """They have up to 8 MiB each, and the timer remembers hundreds of jobs until their deadline."""
    fill(ledger, 3)
    for number in range(3):
        ledger.set_digest(f"j{number}", b"d", b"inputs")
        grant = said.grant(ledger, f"j{number}", "i", "w").grant
        assert grant is not None
        assert grant.features == b"inputs"
    assert said.commit(ledger, "j0", 1, "i", "w", 2) is None
    ledger.cancel("r1")
    kept = {entry.job_id: entry.features for _, _, entry in ledger._dues}
    assert kept == {"j0": b"", "j1": b"", "j2": b"inputs"}


def test_open_jobs_bind_their_targets_until_the_writer_is_quiet() -> None:
    model = HandoffModel()
    job, grant = granted(model, targets=3, hits=2)
    assert model.ledger.target_blocks == 3
    assert model.begin_batch(grant)
    model.abort(job)
    assert model.ledger.target_blocks == 3
    model.end_batch(grant)
    model.tick()
    assert model.ledger.target_blocks == 0


def test_opening_a_job_wakes_the_timer_that_gives_it_up() -> None:
    """With nothing open the asyncio thread sleeps without end; a job that nobody ever claims
    causes no other wake-up."""
    woken: list[str] = []
    ledger = Ledger(
        LoopbackFences(8, 2),
        incarnation="i0",
        clock=FakeClock(),
        on_action=lambda: woken.append("action"),
    )
    assert ledger.tick() is None
    ledger.open(Entry("j", "r", (1, 2), first_target=0, timeout_s=5.0))
    assert woken == ["action"]
    assert ledger.tick() == pytest.approx(5.0)


def test_asking_a_stopped_writer_for_proof_gets_rarer_but_never_stops() -> None:
    model = HandoffModel()
    _, grant = granted(model)
    assert model.begin_batch(grant)
    model.gave_up(grant, retry=False)
    first = model.tick()
    later = model.tick(60.0)
    assert first is not None
    assert later is not None
    assert first < 0.01 < later <= 0.1
    model.drain()


def test_uncomputed_tokens_shrink_with_the_blocks_that_are_written(ledger: Ledger) -> None:
    blocks = (1, 2, 3, 4)
    ledger.open(
        Entry("j", "r", blocks, first_target=0, tokens=100, timeout_s=60.0, claim_timeout_s=9.0)
    )
    assert ledger.uncomputed() == 100
    said.grant(ledger, "j", "i", "w")
    said.progress(ledger, "j", 1, "i", "w", 1)
    assert ledger.uncomputed() == 75
    ledger.cancel("r")
    assert ledger.uncomputed() == 0


def test_a_hedged_job_goes_local_before_its_claim_timeout(ledger: Ledger, clock: FakeClock) -> None:
    """And its waiting is no sign that nobody claims: its patience was its own."""
    for number in range(4):
        fill(ledger, 1, start=number, hedge_s=0.5)
    assert ledger.tick() == pytest.approx(0.5)
    clock.advance(0.5)
    ledger.tick()
    settled = [event for event in ledger.take_events() if isinstance(event, Settle)]
    assert [(e.loaded, e.outcome) for e in settled] == [(False, Outcome.HEDGED)] * 4
    assert not ledger.claims.stalled
    assert said.grant(ledger, "j0", "i", "w").refused is RefuseReason.CLOSED


def test_a_claim_ends_the_hedge(ledger: Ledger, clock: FakeClock) -> None:
    fill(ledger, 1, hedge_s=0.5)
    assert said.grant(ledger, "j0", "i", "w").grant is not None
    clock.advance(0.6)
    ledger.tick()
    assert not ledger.take_events(), "the prefill worker has won"
    said.gave_up(ledger, "j0", 1, "i", "w", "cause", retry=True)
    ledger.tick()
    (event,) = ledger.take_events()
    assert isinstance(event, Settle)
    assert event.outcome is Outcome.HEDGED, "there is no time for another one"


def test_the_claim_timeout_comes_first_if_it_is_shorter(ledger: Ledger, clock: FakeClock) -> None:
    fill(ledger, 1, hedge_s=20.0, claim_timeout_s=10.0)
    clock.advance(10.0)
    ledger.tick()
    (event,) = ledger.take_events()
    assert isinstance(event, Settle)
    assert event.outcome is Outcome.CLAIM_TIMEOUT


def test_a_job_that_is_published_later_waits_for_claims_only_then(
    ledger: Ledger, clock: FakeClock
) -> None:
    """Long steps and slow loads of a prefix are no sign that nobody claims."""
    woken: list[int] = []
    ledger._on_action = lambda: woken.append(1)
    fill(ledger, 1, claim_timeout_s=10.0, later=True)
    assert ledger.tick() == pytest.approx(60.0)
    clock.advance(11.0)
    ledger.tick()
    assert not ledger.take_events()
    woken.clear()
    ledger.set_digest("j0", b"d")
    assert woken, "or the timer would sleep until the old deadline"
    assert ledger.tick() == pytest.approx(10.0)
    ledger.set_digest("j0", b"d")
    clock.advance(9.0)
    ledger.tick()
    assert not ledger.take_events()
    clock.advance(1.0)
    ledger.tick()
    (event,) = ledger.take_events()
    assert isinstance(event, Settle)
    assert event.outcome is Outcome.CLAIM_TIMEOUT


@pytest.mark.parametrize("hedge_s", [math.inf, 5.0])
def test_a_job_that_was_never_published_says_nothing_of_claims(
    ledger: Ledger, clock: FakeClock, hedge_s: float
) -> None:
    fill(ledger, 4, claim_timeout_s=1.0, hedge_s=hedge_s, later=True)
    clock.advance(min(hedge_s, 60.0))
    ledger.tick()
    settled = {event.outcome for event in ledger.take_events() if isinstance(event, Settle)}
    assert settled == {Outcome.HEDGED if hedge_s < 60 else Outcome.TIMEOUT}
    assert not ledger.claims.stalled


def test_a_job_that_waits_again_until_its_deadline_was_not_hedged(
    ledger: Ledger, clock: FakeClock
) -> None:
    fill(ledger, 1, timeout_s=12.0, claim_timeout_s=10.0)
    said.grant(ledger, "j0", "i", "w")
    clock.advance(5.0)
    said.gave_up(ledger, "j0", 1, "i", "w", "cause", retry=True)
    clock.advance(7.0)
    ledger.tick()
    (event,) = ledger.take_events()
    assert isinstance(event, Settle)
    assert event.outcome is Outcome.CLAIM_TIMEOUT


def test_with_the_last_worker_gone_nobody_waits_for_its_deadline() -> None:
    """Unclaimed jobs and jobs that wait for another attempt are given up too."""
    model = HandoffModel()
    queued = model.open(1)
    again, grant = granted(model)
    assert queued is not None
    model.publish(queued)
    assert model.begin_batch(grant)
    model.lose("a", others_alive=True)
    model.lose("b", others_alive=False)
    model.step()
    assert queued.reports == [False]
    assert again.reports == [False]
    assert not set(again.job.blocks) & model.pool.free
    model.drain()
