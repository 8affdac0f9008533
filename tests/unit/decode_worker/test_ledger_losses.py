"""Jobs whose writers are lost, and jobs that no stream can deliver again."""

from __future__ import annotations

import pytest

from pullfill.decode_worker.ledger_types import TAKEN_S, NakDelivery, Settle
from pullfill.errors import Outcome
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
    model.ledger.published(job.job.job_id, job.job.job_id, b"digest", stored=False)
    return model, job


def test_a_job_past_the_stream_waits_for_its_taker_only() -> None:
    """It waited for the whole claim timeout, and three of them stopped all queueing."""
    assert TAKEN_S < CLAIM_S
    model, _ = handed_over()
    model.clock.advance(TAKEN_S)
    assert model.ledger.tick() is None
    assert settled(model) == [Outcome.CLAIM_TIMEOUT]
    for _ in range(4):
        model, _ = handed_over()
        model.clock.advance(TAKEN_S)
        model.ledger.tick()
        assert not model.ledger.claims.stalled


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
