"""Jobs whose writers are lost, and jobs that no stream can deliver again."""

from __future__ import annotations

import errno

import pytest

from pullfill.decode_worker.ledger import Entry, Ledger, NakDelivery, Settle
from pullfill.errors import Outcome
from pullfill.testing.loopback import LoopbackFences
from pullfill.wire import FenceToken
from tests.support import said
from tests.support.fakes import FakeClock
from tests.support.handoff_model import HandoffModel, granted


def settled(model: HandoffModel) -> list[Outcome]:
    """Outcomes of the requests that were told."""
    return [event.outcome for event in model.ledger.take_events() if isinstance(event, Settle)]


@pytest.mark.essential
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


class NoLocks(LoopbackFences):
    """The kernel has no memory for the locks of the first `fails` proofs."""

    fails = 0

    def try_revoke(self, token: FenceToken) -> bool:
        if self.fails:
            self.fails -= 1
            raise OSError(errno.ENOLCK, "no locks available")
        return super().try_revoke(token)


def without_locks() -> tuple[Ledger, NoLocks, FakeClock]:
    fences, clock = NoLocks(16, 4), FakeClock()
    ledger = Ledger(fences, incarnation="i0", clock=clock)
    for number, name in enumerate(("j1", "j2")):
        ledger.open(Entry(name, f"r-{name}", (2 * number, 2 * number + 1), 0, timeout_s=5.0))
        ledger.published(name, object())
        said.grant(ledger, name, "i0", "a", f"ack.{number}")
    return ledger, fences, clock


def test_a_proof_that_cannot_be_asked_for_keeps_no_request_waiting() -> None:
    ledger, fences, clock = without_locks()
    fences.fails = 1
    clock.advance(100.0)
    ledger.tick()
    events = [event for event in ledger.take_events() if isinstance(event, Settle)]
    assert {event.request_id for event in events} == {"r-j1", "r-j2"}
    clock.advance(1.0)
    ledger.tick()
    assert ledger.open_jobs == 0, "asked again"


def test_a_proof_that_cannot_be_asked_for_leaves_no_other_job_with_a_lost_writer() -> None:
    ledger, fences, _ = without_locks()
    fences.fails = 1
    ledger.writer_lost("a", others_alive=True)
    naks = [action for action in ledger.take_actions() if isinstance(action, NakDelivery)]
    assert len(naks) == 2
    assert said.grant(ledger, "j2", "i0", "b", "ack.3").grant is not None
