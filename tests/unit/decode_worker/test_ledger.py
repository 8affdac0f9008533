"""The ledger's transitions, one by one, and faults that it once had.

What holds in any order of events is checked by `test_ledger_model.py`."""

from __future__ import annotations

import errno
import timeit
from collections import Counter
from typing import Any

import pytest

from pullfill.decode_worker.ledger import (
    Entry,
    Hold,
    JobState,
    Ledger,
    NakDelivery,
    Release,
    Settle,
    Sums,
)
from pullfill.errors import Outcome
from pullfill.wire import FenceToken, KvMode, RefuseReason
from tests.support import said
from tests.support.fakes import FakeClock
from tests.support.handoff_model import CLAIM_S, TIMEOUT_S, HandoffModel, Job, granted
from tests.support.loopback import LoopbackFences


def opened(model: HandoffModel, targets: int = 2, hits: int = 0) -> Job:
    """A published job."""
    job = model.open(targets, hits)
    assert job is not None
    model.publish(job)
    return job


def state(model: HandoffModel, job: Job) -> JobState | None:
    entry = model.ledger.find(job.job.job_id)
    return None if entry is None else entry.state


def told(model: HandoffModel) -> list[Any]:
    """The events, and then what follows from them."""
    events = list(model.ledger._events)
    model.step()
    return events


# ------------------------------------------------------------------ queued


def test_queued_claim_grants() -> None:
    model = HandoffModel()
    model.ledger.kv_mode = KvMode.PULL
    job = opened(model, 3, 2)
    model.clock.advance(1.0)
    grant = model.claim(job, "a").grant
    assert grant is not None
    assert (grant.attempt, grant.job_digest, grant.mode) == (1, b"digest", KvMode.PULL)
    assert model.fences.granted(grant.fence, writes=False) is not None
    assert grant.deadline_s == pytest.approx(TIMEOUT_S - 1.0)
    assert state(model, job) is JobState.GRANTED
    model.drain()


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        ("abort", Outcome.CANCELLED),
        ("taken_back", Outcome.OWN_JOB),
        ("deadline", Outcome.CLAIM_TIMEOUT),
        ("publish_failed", Outcome.QUEUE_FULL),
        ("incarnation", Outcome.PREFILL_LOST),
        ("nobody", Outcome.PREFILL_LOST),
    ],
)
def test_queued_closes_without_a_hold(how: str, outcome: Outcome) -> None:
    model = HandoffModel()
    job = model.open(2)
    assert job is not None
    model.publish(job, Outcome.QUEUE_FULL if how == "publish_failed" else None)
    match how:
        case "abort":
            model.abort(job)
        case "taken_back":
            assert model.ledger.give_up(job.job.job_id, outcome, if_queued=True)
            model.act()
        case "deadline":
            assert model.tick(CLAIM_S - 1) == pytest.approx(1.0), "the nearer bound"
            assert told(model) == []
            model.tick(1.0)
        case "incarnation":
            model.ledger.new_incarnation("i1")
            model.act()
        case "nobody":
            model.lose("a", others_alive=False)
    assert told(model) == [Settle(job.request.request_id, outcome)]
    assert (state(model, job), job.freed) == (None, True)
    assert job.cancelled_in_queue == (how != "publish_failed")
    stale = RefuseReason.STALE_INCARNATION
    assert model.claim(job, "a").refused is RefuseReason.CLOSED
    refused = model.claim(job, "a", incarnation="i0").refused
    assert refused is (stale if how == "incarnation" else RefuseReason.CLOSED)


def test_each_wait_for_a_claim_has_its_time_and_the_whole_is_bounded() -> None:
    model = HandoffModel()
    job, grant = granted(model)
    model.tick(CLAIM_S + 2)
    assert state(model, job) is JobState.GRANTED, "the claim's bound is over with the claim"
    model.gave_up(grant, retry=True)
    model.tick(CLAIM_S - 1)
    assert state(model, job) is JobState.QUEUED, "counted anew"
    second = model.claim(job, "b").grant
    assert second is not None
    assert second.deadline_s == pytest.approx(TIMEOUT_S - 2 * CLAIM_S - 1)
    model.tick(second.deadline_s)
    assert told(model) == [Settle(job.request.request_id, Outcome.TIMEOUT)]


# ------------------------------------------------------------------ granted


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        ("abort", Outcome.CANCELLED),
        ("deadline", Outcome.TIMEOUT),
        ("fail", Outcome.PREFILL_FAILED),
        ("wrong_count", Outcome.REJECTED),
        ("alone_lost", Outcome.PREFILL_LOST),
    ],
)
def test_granted_given_up(how: str, outcome: Outcome, busy: bool) -> None:
    """The request is settled at once; its blocks stay held while a batch runs."""
    model = HandoffModel()
    job, grant = granted(model)
    if busy:
        assert model.begin_batch(grant)
    match how:
        case "abort":
            model.abort(job)
        case "deadline":
            model.tick(TIMEOUT_S)
        case "fail":
            model.gave_up(grant, retry=False)
        case "wrong_count":
            assert model.commit(grant, wrong_by=-1) == "wrong_block_count"
        case "alone_lost":
            model.lose("a", others_alive=False)
    settle = Settle(job.request.request_id, outcome)
    hold = Hold(job.job.job_id, job.job.blocks)
    assert told(model) == ([hold, settle] if busy else [settle]), "the hold comes first"
    assert job.freed
    assert model.commit(grant) == "stale"
    if busy:
        assert model.ledger.quarantined_blocks == len(job.blocks)
        assert not set(job.blocks) & model.pool.free
        model.tick(3600.0)
        assert state(model, job) is JobState.QUARANTINED, "time is no proof"
        assert model.claim(job, "b").refused is RefuseReason.CLOSED
        assert model.ledger.sums().targets == job.targets
        model.end_batch(grant)
        model.tick()
        assert told(model) == [Release(job.job.job_id)]
    assert state(model, job) is None
    assert model.ledger.sums() == Sums()
    assert set(job.job.blocks[1:]) <= model.pool.free
    model.drain()


@pytest.mark.essential
def test_commit_of_a_writer_that_still_writes_is_not_believed() -> None:
    model = HandoffModel()
    job, grant = granted(model)
    assert model.begin_batch(grant)
    assert model.commit(grant) == "writer_not_quiet"
    settle = Settle(job.request.request_id, Outcome.REJECTED)
    assert told(model) == [Hold(job.job.job_id, job.job.blocks), settle]
    model.drain()


@pytest.mark.parametrize("busy", [False, True])
def test_the_third_attempt_is_the_last(busy: bool) -> None:
    model = HandoffModel()
    job, _ = granted(model)
    for writer in ("b", "c"):
        model.gave_up(model.grants[-1], retry=True)
        assert model.claim(job, writer).grant is not None
    assert not model.ledger.give_up(job.job.job_id, Outcome.OWN_JOB, if_queued=True), "under way"
    if busy:
        assert model.begin_batch(model.grants[-1])
    model.lose("c", others_alive=True)
    assert model.naks == [], "nobody needs the delivery any more"
    assert job.cancelled_in_queue
    assert told(model)[-1] == Settle(job.request.request_id, Outcome.PREFILL_LOST)
    model.drain()


@pytest.mark.essential
def test_a_prompt_that_may_have_killed_two_prefill_workers_is_sent_to_no_third() -> None:
    """One deadly prompt ended three of them, and then its decode worker."""
    model = HandoffModel()
    job, _ = granted(model)
    model.die("a", others_alive=True)
    assert told(model) == []
    assert len(model.naks) == 1
    assert model.claim(job, "b").grant is not None
    model.die("b", others_alive=True)
    assert told(model) == [Settle(job.request.request_id, Outcome.PREFILL_LOST)]
    assert len(model.naks) == 1, "nobody needs the second delivery"
    assert job.cancelled_in_queue


def test_a_writer_that_gives_up_is_no_loss() -> None:
    model = HandoffModel()
    job, _ = granted(model)
    model.die("a", others_alive=True)
    assert model.claim(job, "b").grant is not None
    model.gave_up(model.grants[-1], retry=True)
    assert told(model) == []
    assert model.claim(job, "c").grant is not None


def test_a_job_in_quarantine_is_held_until_its_writer_is_quiet() -> None:
    model = HandoffModel()
    job, grant = granted(model)
    assert model.begin_batch(grant)
    model.lose("a", others_alive=True)
    for writer in ("a", "b"):
        claimed = model.claim(job, writer)
        assert (claimed.refused, claimed.retry_after_s) == (RefuseReason.HELD, 0.05)
    model.end_batch(grant)
    model.tick(0.05)
    assert model.claim(job, "b").grant is not None


def test_what_a_writer_says_of_an_old_attempt_of_its_own_counts_nothing() -> None:
    model = HandoffModel()
    job, old = granted(model)
    model.gave_up(old, retry=True)
    assert model.claim(job, "a").grant is not None
    assert model.commit(old) == model.ready(old) == "stale"
    assert not said.progress(model.ledger, old.job_id, 1, "i0", "a", 1)
    model.gave_up(old, retry=False)
    assert (state(model, job), told(model)) == (JobState.GRANTED, [])
    assert model.commit(model.grants[-1]) is None


@pytest.mark.parametrize(
    "who", [("i0", "mallory"), ("i9", "a")], ids=["another writer", "another incarnation"]
)
def test_nobody_else_can_speak_for_a_writer(who: tuple[str, str]) -> None:
    model = HandoffModel()
    job, grant = granted(model)
    ledger, name = model.ledger, grant.job_id
    assert said.commit(ledger, name, 1, *who, 2) == said.ready(ledger, name, 1, *who, 2) == "stale"
    assert not said.progress(ledger, name, 1, *who, 1)
    for retry in (True, False):
        said.gave_up(ledger, name, 1, *who, retry=retry)
    assert (state(model, job), told(model)) == (JobState.GRANTED, [])
    assert ledger.sums().unwritten == 2
    assert model.commit(grant) is None


# ------------------------------------------------------------------ pull mode


def test_ready_read_committed() -> None:
    model = HandoffModel()
    job, grant = granted(model, targets=3, hits=2)
    assert model.ready(grant) is None
    assert model.fences.in_use == 0, "the writer is proved quiet before we read"
    assert model.ledger.sums().jobs == Counter([JobState.READING])
    assert model.commit(grant) == "stale"
    assert model.ready(grant) == "stale"
    model.ledger.give_up_all(Outcome.ENGINE_STUCK, but_granted=True)
    (read,) = model.reads
    assert model.end_read(read, good=True) is None
    model.step()
    assert job.reports == [True]
    model.drain()


@pytest.mark.parametrize("others_alive", [True, False])
def test_a_prefill_worker_that_is_lost_while_we_read_takes_nothing_with_it(
    others_alive: bool,
) -> None:
    """Its KV may still be read, and its message, which it can ack no more, is needed no more."""
    model = HandoffModel()
    job, grant = granted(model)
    assert model.ready(grant) is None
    model.die("a", others_alive=others_alive)
    assert (told(model), model.naks, job.cancelled_in_queue) == ([], [], True)
    assert model.end_read(model.reads[0], good=True) is None
    model.step()
    assert job.reports == [True]
    model.drain()


@pytest.mark.parametrize("ends", ["abort", "deadline", "incarnation"])
def test_a_job_that_ends_while_it_is_read_keeps_its_blocks(ends: str) -> None:
    model = HandoffModel()
    job, grant = granted(model, targets=3, hits=0)
    model.ready(grant)
    match ends:
        case "abort":
            model.abort(job)
        case "deadline":
            model.tick(TIMEOUT_S + 1)
        case "incarnation":
            model.ledger.new_incarnation("i1")
            model.act()
    assert model.revokes[-1].writer == "a", "it need not keep its blocks any longer"
    model.step()
    assert job.reports == [False]
    assert not set(job.blocks) & model.pool.free, "the reader still copies into them"
    model.tick(1.0)
    assert model.ledger.quarantined_blocks == 3, "time is no proof"
    assert model.end_read(model.reads[0], good=True) == "stale"
    model.step()
    model.drain()


# ------------------------------------------------------------------ without a model: time, sums


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def woken() -> list[str]:
    return []


@pytest.fixture
def ledger(clock: FakeClock, woken: list[str]) -> Ledger:
    return Ledger(
        LoopbackFences(8), incarnation="i", clock=clock, on_action=lambda: woken.append("")
    )


def fill(ledger: Ledger, count: int, start: int = 0, **more: Any) -> None:
    """Open jobs `j0`, `j1` … with two blocks to write."""
    for number in range(start, start + count):
        more = {"timeout_s": 60.0, "claim_timeout_s": 30.0, **more}
        ledger.open(Entry(f"j{number}", f"r{number}", (1, 2, 3), 1, **more))
        ledger.set_digest(f"j{number}", b"d")


def outcomes(ledger: Ledger) -> list[Outcome]:
    """How requests ended since the last call."""
    return [e.outcome for e in ledger.take_events() if isinstance(e, Settle)]


def test_a_job_that_only_one_worker_gets_ends_with_it(ledger: Ledger) -> None:
    """That of a self-check. Others are connected, but the job is not in the queue."""
    fill(ledger, 1, to="gone")
    ledger.writer_lost("another", others_alive=True)
    assert outcomes(ledger) == []
    ledger.writer_lost("gone", others_alive=True)
    assert outcomes(ledger) == [Outcome.PREFILL_LOST]
    fill(ledger, 1, to="w")
    assert said.grant(ledger, "j0", "i", "w").grant is not None
    said.gave_up(ledger, "j0", 1, "i", "w", retry=True)
    assert outcomes(ledger) == [Outcome.PREFILL_FAILED], "it waits for no other"
    assert ledger.open_jobs == 0


def test_a_claim_without_a_free_fence_slot_is_held() -> None:
    ledger = Ledger(LoopbackFences(1), incarnation="i")
    fill(ledger, 2)
    assert said.grant(ledger, "j0", "i", "w").grant is not None
    claimed = said.grant(ledger, "j1", "i", "w")
    assert (claimed.refused, claimed.retry_after_s) == (RefuseReason.HELD, 1.0)


def test_sums_are_those_of_the_current_attempts(ledger: Ledger) -> None:
    fill(ledger, 2, tokens=8)
    said.grant(ledger, "j0", "i", "w")
    said.progress(ledger, "j0", 1, "i", "w", 1)
    jobs = {JobState.GRANTED: 1, JobState.QUEUED: 1}
    assert ledger.sums() == Sums(Counter(jobs), 8, uncomputed=4 + 8, unwritten=1, targets=4)
    said.gave_up(ledger, "j0", 1, "i", "w")
    assert said.grant(ledger, "j0", "i", "other").grant is not None
    assert ledger.sums() == Sums(Counter(jobs), 8, uncomputed=8 + 8, unwritten=2, targets=4)


def test_the_sums_take_no_longer_of_many_jobs() -> None:
    """Each decision asks for them, on the engine thread: streams wait meanwhile."""

    def seconds(jobs: int) -> float:
        ledger = Ledger(LoopbackFences(1), incarnation="i")
        fill(ledger, jobs)
        return min(timeit.repeat(ledger.sums, number=1, repeat=50))

    assert seconds(2000) < 10 * seconds(2)


def test_an_overdue_tick_is_made_by_another_thread_and_tried_again(
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


def test_a_job_is_not_granted_after_its_time_though_the_timer_is_late(
    ledger: Ledger, clock: FakeClock
) -> None:
    fill(ledger, 1)
    clock.advance(30.0)
    assert said.grant(ledger, "j0", "i", "w").refused is RefuseReason.CLOSED
    assert outcomes(ledger) == [Outcome.CLAIM_TIMEOUT]


def test_the_timer_is_woken_where_it_would_sleep_too_long(
    ledger: Ledger, clock: FakeClock, woken: list[str]
) -> None:
    """The wait for a claim begins when the job is published. Long steps are no sign that nobody
    claims."""
    ledger.open(Entry("j", "r", (1,), 0, timeout_s=60.0, claim_timeout_s=10.0))
    assert len(woken) == 1, "it slept without end"
    clock.advance(11.0)
    assert ledger.tick() == pytest.approx(49.0)
    fill(ledger, 1, timeout_s=90.0, claim_timeout_s=60.0)
    assert len(woken) == 1, "due after what it waits for"
    ledger.set_digest("j", b"d")
    assert len(woken) == 2, "due before"
    ledger.set_digest("j", b"d")
    assert ledger.tick() == pytest.approx(10.0), "it waits no longer for that"
    clock.advance(10.0)
    ledger.tick()
    assert outcomes(ledger) == [Outcome.CLAIM_TIMEOUT]


def test_the_timer_looks_at_no_job_before_the_first_is_due(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs at each claim, and thousands of jobs may be open."""
    fill(ledger, 1)
    monkeypatch.setattr(Entry, "due", property(lambda _: 1 / 0))
    assert ledger.tick() == pytest.approx(30.0)


# ------------------------------------------------------------------ no proof can be asked for


class NoLocks(LoopbackFences):
    """The kernel has no memory for the lock of the first proof."""

    fails = True

    def try_revoke(self, token: FenceToken) -> bool:
        if self.fails:
            self.fails = False
            raise OSError(errno.ENOLCK, "no locks available")
        return super().try_revoke(token)


@pytest.mark.parametrize("lost", [True, False])
def test_a_proof_that_cannot_be_asked_for_keeps_no_request_and_no_other_job_waiting(
    lost: bool, clock: FakeClock
) -> None:
    ledger = Ledger(NoLocks(4), incarnation="i", clock=clock)
    fill(ledger, 2)
    for name in ("j0", "j1"):
        ledger.published(name, object())
        said.grant(ledger, name, "i", "a", "ack")
    if lost:
        ledger.writer_lost("a", others_alive=True)
        naks = [action for action in ledger.take_actions() if isinstance(action, NakDelivery)]
        assert len(naks) == 2
        assert said.grant(ledger, "j1", "i", "b").grant is not None
        return
    clock.advance(100.0)
    ledger.tick()
    assert outcomes(ledger) == [Outcome.TIMEOUT] * 2
    clock.advance(1.0)
    ledger.tick()
    assert ledger.open_jobs == 0, "asked again"
