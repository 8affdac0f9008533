"""The ledger in pull mode: what our reader copies into stays its own until it says it is over."""

from __future__ import annotations

import pytest

from pullfill.decode_worker.ledger import JobState
from pullfill.errors import Outcome
from pullfill.wire import KvMode
from tests.support.handoff_model import TIMEOUT_S, Grant, HandoffModel, Job, granted


def model_with_grant(hits: int = 0) -> tuple[HandoffModel, Job, Grant]:
    model = HandoffModel()
    return model, *granted(model, targets=3, hits=hits)


def test_the_grant_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HandoffModel()
    model.ledger.kv_mode = KvMode.PULL
    job = model.open(2)
    assert job is not None
    claimed = model.claim(job, "a")
    assert claimed.grant is not None
    assert claimed.grant.mode is KvMode.PULL


@pytest.mark.parametrize("hits", [0, 2])
def test_ready_read_committed(hits: int) -> None:
    model, job, grant = model_with_grant(hits)
    assert model.ready(grant) is None
    assert model.fences.in_use == 0, "the writer is proved quiet before we read"
    assert [read.job_id for read in model.reads] == [grant.job_id]
    assert model.ledger.counts()[JobState.READING] == 1
    assert model.commit(grant) == "stale"
    assert model.ready(grant) == "stale"
    assert model.end_read(model.reads[0], good=True) is None
    model.step()
    assert job.reports == [True]
    model.drain()


def test_ready_of_a_writer_that_still_writes_or_counts_wrong_is_refused() -> None:
    model, job, grant = model_with_grant()
    assert model.begin_batch(grant)
    assert model.ready(grant) == "writer_not_quiet"
    assert model.outcomes == [(job.job.job_id, Outcome.REJECTED)]
    model.end_batch(grant)
    model.drain()
    model, job, grant = model_with_grant()
    assert model.ready(grant, wrong_by=1) == "wrong_block_count"
    model.drain()


def test_what_could_not_be_read_is_computed_here() -> None:
    model, job, grant = model_with_grant()
    model.ready(grant)
    assert model.end_read(model.reads[0], good=False) == "read_failed"
    model.step()
    assert job.reports == [False]
    assert job.freed
    assert model.outcomes == [(job.job.job_id, Outcome.PREFILL_FAILED)]
    assert job.cancelled_in_queue
    model.drain()


@pytest.mark.parametrize("ends", ["abort", "deadline", "incarnation"])
@pytest.mark.parametrize("good", [True, False])
def test_a_job_that_ends_while_it_is_read_keeps_its_blocks(ends: str, good: bool) -> None:
    model, job, grant = model_with_grant()
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
    assert len(job.reports) == 1
    assert not job.reports[0]
    assert not set(job.blocks) & model.pool.free, "the reader still copies into them"
    assert model.ledger.quarantined_blocks == 3
    model.tick(1.0)
    assert model.ledger.quarantined_blocks == 3, "time is no proof"
    assert model.end_read(model.reads[0], good=good) == "stale"
    model.step()
    assert model.ledger.open_jobs == 0
    model.drain()


@pytest.mark.parametrize("others_alive", [True, False])
def test_a_prefill_worker_lost_while_we_read_changes_nothing(others_alive: bool) -> None:
    """Its memory may well outlive it; if not, the read fails and says so."""
    model, job, grant = model_with_grant()
    model.ready(grant)
    model.lose("a", others_alive=others_alive)
    assert model.ledger.counts()[JobState.READING] == 1
    assert model.naks == []
    assert model.end_read(model.reads[0], good=True) is None
    model.step()
    assert job.reports == [True]
    model.drain()


def test_nobody_else_gets_what_is_read() -> None:
    model, job, grant = model_with_grant()
    model.ready(grant)
    claimed = model.claim(job, "b")
    assert claimed.refused == "in_progress"
    model.ledger.give_up_all(Outcome.ENGINE_STUCK, but_granted=True)
    assert model.outcomes == []
    model.end_read(model.reads[0], good=True)
    model.drain()


def test_a_read_ends_once() -> None:
    model, _, grant = model_with_grant()
    model.ready(grant)
    (read,) = model.reads
    model.abort(model.jobs[grant.job_id])
    model.end_read(read, good=True)
    with pytest.raises(AssertionError):
        model.ledger.read_over(read, good=True)
