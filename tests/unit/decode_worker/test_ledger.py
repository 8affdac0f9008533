"""The ledger's transitions, one by one, and faults that it once had."""

from __future__ import annotations

import os
from typing import Any

import pytest

from pullfill.decode_worker.ledger import (
    CancelMessage,
    Entry,
    Hold,
    JobState,
    Ledger,
    NakDelivery,
    Release,
    Settle,
)
from pullfill.errors import Outcome
from pullfill.testing.loopback import LoopbackFences
from pullfill.transfer.shm.fence import ShmFences
from pullfill.wire import RefuseReason
from tests.support import said
from tests.support.fakes import FakeClock
from tests.support.handoff_model import CLAIM_S, TIMEOUT_S, HandoffModel, Job, granted


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
    job = model.open(3, 2)
    assert job is not None
    model.ledger.set_digest(job.job.job_id, b"d")
    model.clock.advance(1.0)
    grant = model.claim(job, "a").grant
    assert grant is not None
    assert (grant.attempt, grant.job_digest) == (1, b"d")
    assert model.fences.valid(grant.fence) is not None
    assert grant.deadline_s == pytest.approx(TIMEOUT_S - 1.0)
    assert state(model, job) is JobState.GRANTED
    model.drain()


def test_a_queued_job_is_taken_back_and_a_granted_one_is_not() -> None:
    model = HandoffModel()
    queued, under_way = model.open(2), model.open(2)
    assert queued is not None
    assert under_way is not None
    model.publish(queued)
    model.publish(under_way)
    assert model.claim(under_way, "a").grant is not None
    for job in (queued, under_way):
        model.ledger.give_up(job.job.job_id, Outcome.OWN_JOB, if_queued=True)
    assert (state(model, queued), state(model, under_way)) == (None, JobState.GRANTED)
    settled = [event for event in told(model) if isinstance(event, Settle)]
    assert [event.outcome for event in settled] == [Outcome.OWN_JOB]
    model.drain()


@pytest.mark.parametrize("how", ["abort", "deadline", "publish_failed", "incarnation", "nobody"])
def test_queued_closes_without_a_hold(how: str) -> None:
    model = HandoffModel()
    job = model.open(2)
    assert job is not None
    if how == "publish_failed":
        model.publish(job, Outcome.QUEUE_FULL)
    else:
        model.publish(job)
    if how == "abort":
        model.abort(job)
    elif how == "deadline":
        soonest = model.tick(CLAIM_S - 1)
        assert soonest == pytest.approx(1.0), "the timer knows the nearer bound"
        assert told(model) == []
        model.tick(1.0)
    elif how == "incarnation":
        model.ledger.new_incarnation("i1")
        model.act()
    elif how == "nobody":
        model.lose("a", others_alive=False)
    outcome = {
        "abort": Outcome.CANCELLED,
        "deadline": Outcome.CLAIM_TIMEOUT,
        "publish_failed": Outcome.QUEUE_FULL,
        "incarnation": Outcome.PREFILL_LOST,
        "nobody": Outcome.PREFILL_LOST,
    }[how]
    assert told(model) == [Settle(job.request.request_id, outcome)]
    assert state(model, job) is None
    assert job.freed
    assert job.cancelled_in_queue == (how != "publish_failed")
    refused = model.claim(job, "a").refused
    wrong_incarnation = model.claim(job, "a", incarnation="i0").refused
    assert refused is RefuseReason.CLOSED
    assert wrong_incarnation is (
        RefuseReason.STALE_INCARNATION if how == "incarnation" else RefuseReason.CLOSED
    )


def test_a_claim_after_the_deadline_closes_the_job_even_before_a_tick() -> None:
    model = HandoffModel()
    job = model.open(2)
    assert job is not None
    model.clock.advance(CLAIM_S)
    assert model.claim(job, "a").refused is RefuseReason.CLOSED
    assert told(model) == [Settle(job.request.request_id, Outcome.CLAIM_TIMEOUT)]


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


def test_unknown_job() -> None:
    model = HandoffModel()
    assert said.grant(model.ledger, "nope", "i0", "a").refused is RefuseReason.UNKNOWN_JOB
    assert said.commit(model.ledger, "nope", 1, "i0", "a", 1) == "stale"


# ------------------------------------------------------------------ granted


def test_granted_commit() -> None:
    model = HandoffModel()
    job, grant = granted(model)
    assert model.commit(grant) is None
    assert told(model) == [Settle(job.request.request_id, Outcome.COMMITTED)]
    assert not job.freed, "the request goes on with its blocks"
    assert not model.begin_batch(grant)
    assert model.commit(grant) == "stale"
    assert model.claim(job, "b").refused is RefuseReason.COMMITTED
    model.drain()
    assert not job.cancelled_in_queue, "a committed job is acked by its worker"


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
    if how == "abort":
        model.abort(job)
    elif how == "deadline":
        model.tick(TIMEOUT_S)
    elif how == "fail":
        model.gave_up(grant, retry=False)
    elif how == "wrong_count":
        assert model.commit(grant, wrong_by=-1) == "wrong_block_count"
    elif how == "alone_lost":
        model.lose("a", others_alive=False)
    settle = Settle(job.request.request_id, outcome)
    events = told(model)
    hold = Hold(job.job.job_id, job.job.blocks)
    assert events == ([hold, settle] if busy else [settle]), "the hold comes before the report"
    assert job.freed
    assert model.commit(grant) == "stale"
    if busy:
        assert state(model, job) is JobState.QUARANTINED
        assert model.ledger.quarantined_blocks == len(job.blocks)
        assert not set(job.blocks) & model.pool.free
        model.tick(3600.0)
        assert state(model, job) is JobState.QUARANTINED, "time is no proof"
        assert model.claim(job, "b").refused is RefuseReason.CLOSED
        model.end_batch(grant)
        model.tick()
        assert told(model) == [Release(job.job.job_id)]
    assert state(model, job) is None
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


def test_wrong_writer_attempt_or_incarnation_changes_nothing() -> None:
    model = HandoffModel()
    job, grant = granted(model)
    ledger, job_id = model.ledger, job.job.job_id
    assert said.commit(ledger, job_id, 1, "i0", "b", job.targets) == "stale"
    assert said.commit(ledger, job_id, 2, "i0", "a", job.targets) == "stale"
    assert said.commit(ledger, job_id, 1, "i9", "a", job.targets) == "stale"
    said.gave_up(ledger, job_id, 1, "i0", "b", "x", False)
    ledger.writer_lost("b", others_alive=True)
    assert state(model, job) is JobState.GRANTED
    assert not ledger.has_events
    assert model.commit(grant) is None


@pytest.mark.parametrize("how", ["gave_up", "lost"])
@pytest.mark.parametrize("busy", [False, True])
def test_granted_goes_to_another_writer(how: str, busy: bool) -> None:
    """Attempt n+1 only after n is proved quiet; the request just waits on."""
    model = HandoffModel()
    job, grant = granted(model)
    if busy:
        assert model.begin_batch(grant)
    if how == "gave_up":
        model.gave_up(grant, retry=True)
    elif how == "lost":
        model.lose("a", others_alive=True)
        assert model.naks == ["ack.a"]
    claimed = model.claim(job, "b")
    if busy:
        assert claimed.refused is RefuseReason.HELD
        assert claimed.retry_after_s is not None
        assert claimed.retry_after_s < 1
        model.end_batch(grant)
        model.tick()
        claimed = model.claim(job, "b")
    assert claimed.grant is not None
    assert claimed.grant.attempt == 2
    assert not model.begin_batch(grant)
    assert model.commit(grant) == "stale"
    assert not model.ledger.has_events
    assert model.commit(model.grants[-1]) is None
    assert [r.attempt for r in model.revokes] == [1]
    model.drain()


@pytest.mark.parametrize("under_way", ["granted", "reading"])
def test_a_claim_takes_nothing_from_a_holder_that_is_alive(under_way: str) -> None:
    """However often it comes: no attempt is counted, no writer is revoked."""
    model = HandoffModel()
    job, grant = granted(model)
    if under_way == "reading":
        assert model.ready(grant) is None
    for _ in range(4):
        claimed = model.claim(job, "b")
        assert claimed.refused is RefuseReason.IN_PROGRESS
        assert claimed.retry_after_s is None, "the newcomer asks no more"
    if under_way == "granted":
        assert model.commit(grant) is None
    else:
        assert model.end_read(model.reads[0], good=True) is None
    assert told(model) == [Settle(job.request.request_id, Outcome.COMMITTED)]
    assert model.revokes == []
    assert model.claim(job, "b").refused is RefuseReason.COMMITTED
    model.drain()


@pytest.mark.parametrize("busy", [False, True])
def test_out_of_attempts_is_served_locally(busy: bool) -> None:
    model = HandoffModel(max_attempts=2)
    job, first = granted(model)
    model.gave_up(first, retry=True)
    assert model.claim(job, "b").grant is not None
    second = model.grants[-1]
    if busy:
        assert model.begin_batch(second)
    model.lose("b", others_alive=True)
    assert model.naks == [], "nobody needs the delivery any more"
    assert job.cancelled_in_queue
    assert told(model)[-1] == Settle(job.request.request_id, Outcome.PREFILL_LOST)
    model.drain()


def test_the_same_writer_claiming_twice_does_not_revoke_itself() -> None:
    model = HandoffModel()
    job, grant = granted(model)
    assert model.claim(job, "a").refused is RefuseReason.HELD
    assert model.begin_batch(grant)
    model.drain()


def test_no_fence_slot_is_a_wait_not_a_failure() -> None:
    model = HandoffModel(slots=1)
    _, first = granted(model)
    job = model.open(1)
    assert job is not None
    assert model.claim(job, "b").refused is RefuseReason.HELD
    assert model.commit(first) is None
    assert model.claim(job, "b").grant is not None
    model.drain()


@pytest.mark.parametrize("how", ["gave_up", "lost"])
def test_a_request_waits_for_a_stopped_writer_a_tenth_of_a_second(how: str) -> None:
    """Another worker is there and could take it; the request goes on locally all the same."""
    model = HandoffModel()
    job, grant = granted(model)
    assert model.begin_batch(grant)
    if how == "gave_up":
        model.gave_up(grant, retry=True)
    else:
        model.lose("a", others_alive=True)
    soonest = model.tick(0.09)
    assert soonest == pytest.approx(0.01), "the timer looks again in time"
    assert model.claim(job, "b").refused is RefuseReason.HELD
    assert told(model) == []
    model.tick(0.011)
    hold, settle = told(model)
    assert hold == Hold(job.job.job_id, job.job.blocks), "the hold comes first"
    assert settle == Settle(job.request.request_id, Outcome.QUARANTINED)
    assert job.cancelled_in_queue
    assert model.claim(job, "b").refused is RefuseReason.CLOSED, "nobody polls for it"
    assert state(model, job) is JobState.QUARANTINED, "its blocks are held until the proof"
    model.end_batch(grant)
    model.tick()
    assert told(model) == [Release(job.job.job_id)]
    model.drain()


def test_a_proof_in_the_last_moment_lets_the_job_go_on() -> None:
    model = HandoffModel()
    job, grant = granted(model)
    assert model.begin_batch(grant)
    model.gave_up(grant, retry=True)
    model.end_batch(grant)
    model.tick(0.2)  # the timer came late
    assert state(model, job) is JobState.QUEUED
    assert model.claim(job, "b").grant is not None
    model.drain()


# ------------------------------------------------------------------ what once slipped through


def test_a_publish_that_ends_after_its_job_was_given_up_is_cancelled() -> None:
    """Also while the blocks are still in quarantine."""
    model = HandoffModel()
    job = model.open(2)
    assert job is not None
    assert model.claim(job, "a").grant is not None
    assert model.begin_batch(model.grants[-1])
    model.abort(job)
    model.publish(job)
    assert job.cancelled_in_queue
    model.drain()


def test_actions_name_what_the_queue_needs() -> None:
    ledger = Ledger(LoopbackFences(8, 2), incarnation="i0", clock=FakeClock())
    ledger.open(Entry("j", "r", (1, 2), first_target=0, timeout_s=5.0))
    receipt = object()
    ledger.published("j", receipt)
    said.grant(ledger, "j", "i0", "a", "ack.1")
    ledger.writer_lost("a", others_alive=True)
    revoke, nak = ledger.take_actions()
    assert nak == NakDelivery("ack.1", receipt)
    assert (revoke.writer, revoke.job_id, revoke.attempt) == ("a", "j", 1)  # type: ignore[union-attr]
    ledger.give_up_all(Outcome.ENGINE_STUCK)
    assert ledger.take_actions() == [CancelMessage(receipt)]
    assert ledger.open_jobs == 0


def test_a_grant_reads_no_block() -> None:
    """The engine thread waits for the lock: with 65,536 blocks it waited 20 ms for their sets."""
    read = list[str]()

    class Blocks(tuple[int, ...]):
        def __iter__(self) -> Any:
            read.append("all")
            return super().__iter__()

        def __getitem__(self, at: Any) -> Any:
            read.append("some")
            return super().__getitem__(at)

    fences = ShmFences(os.memfd_create("fence"), "i0")
    ledger = Ledger(fences, incarnation="i0")
    ledger.open(Entry("j", "r", Blocks((7, 1, 2)), first_target=1, timeout_s=5.0))
    grant = said.grant(ledger, "j", "i0", "w").grant
    assert grant is not None
    assert not read
    assert fences.granted(grant.fence, writes=False) == {7, 1, 2}
    assert fences.granted(grant.fence, writes=True) == {1, 2}
    assert said.commit(ledger, "j", 1, "i0", "w", 2) is None
    assert fences.granted(grant.fence, writes=True) is None
    fences.close()
