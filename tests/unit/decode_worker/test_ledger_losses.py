"""Jobs whose writers are lost, and jobs that no stream can deliver again."""

from __future__ import annotations

import pytest

from pullfill.decode_worker.ledger_types import TAKEN_S, NakDelivery, Settle
from pullfill.errors import Outcome
from pullfill.wire import DigestMode
from tests.support.handoff_model import CLAIM_S, HandoffModel, Job, granted


def settled(model: HandoffModel) -> list[Outcome]:
    """Outcomes of the requests that were told."""
    return [event.outcome for event in model.ledger.take_events() if isinstance(event, Settle)]


def test_a_prompt_that_may_have_killed_two_prefill_workers_is_sent_to_no_third() -> None:
    """One deadly prompt ended three of them, and then its decode worker."""
    model = HandoffModel()
    job, _ = granted(model)
    model.die("a", others_alive=True)
    assert settled(model) == []
    assert len(model.naks) == 1
    assert model.claim(job, "b").grant is not None
    model.die("b", others_alive=True)
    assert settled(model) == [Outcome.PREFILL_LOST]
    assert len(model.naks) == 1, "nobody needs the second delivery"
    assert job.cancelled_in_queue


def test_a_writer_that_gives_up_is_no_loss() -> None:
    model = HandoffModel()
    job, grant = granted(model)
    model.die("a", others_alive=True)
    assert grant.attempt == 1
    assert model.claim(job, "b").grant is not None
    model.gave_up(model.grants[-1], retry=True)
    assert settled(model) == []
    assert model.claim(job, "c").grant is not None


def handed_over() -> tuple[HandoffModel, Job]:
    model = HandoffModel()
    job = model.open(2)
    assert job is not None
    model.publish(job)
    assert model.tick() == pytest.approx(CLAIM_S)
    model.clock.advance(0.5)
    model.ledger.handed_over(job.job.job_id)
    return model, job


def test_a_job_past_the_stream_waits_for_its_taker_only() -> None:
    """It waited for the whole claim timeout."""
    assert TAKEN_S + 0.5 < CLAIM_S
    model, _ = handed_over()
    assert model.ledger._next_tick == pytest.approx(model.clock.monotonic() + TAKEN_S)
    assert model.tick() == pytest.approx(TAKEN_S), "the timer was told"
    model.clock.advance(TAKEN_S)
    assert model.ledger.tick() is None
    assert settled(model) == [Outcome.CLAIM_TIMEOUT]


@pytest.mark.parametrize("how", ["dies", "gives up"])
def test_a_job_past_the_stream_is_not_left_to_another_writer(how: str) -> None:
    model, job = handed_over()
    assert model.claim(job, "a").grant is not None
    if how == "dies":
        model.ledger.writer_lost("a", others_alive=True)
    else:
        model.ledger.gave_up(job.job.job_id, 1, "i0", "a", "no", retry=True)
    outcome = Outcome.PREFILL_LOST if how == "dies" else Outcome.PREFILL_FAILED
    assert settled(model) == [outcome]
    naks = [one for one in model.ledger.take_actions() if isinstance(one, NakDelivery)]
    assert naks == []


@pytest.mark.parametrize("state", ["granted", "reading", "verifying"])
def test_what_a_worker_that_fails_the_self_check_has_under_way_is_served_here(state: str) -> None:
    model = HandoffModel()
    job, grant = granted(model)
    if state == "reading":
        assert model.ready(grant) is None
    if state == "verifying":
        model.ledger.kv_digest = DigestMode.FULL
        model.commit(grant)
    model.ledger.distrust("b")
    assert settled(model) == []
    model.ledger.distrust("a")
    assert settled(model) == [Outcome.SELF_CHECK]
    if state == "reading":
        assert model.end_read(model.reads[-1], good=True) == "stale"
    assert model.claim(job, "c").grant is None
