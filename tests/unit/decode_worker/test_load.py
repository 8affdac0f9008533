"""The open jobs that a decode worker tells the live page."""

from __future__ import annotations

import pytest

from pullfill.decode_worker.load import jobs_of
from tests.support import said
from tests.support.handoff_model import HandoffModel


def test_open_jobs_have_their_state_and_their_times() -> None:
    model = HandoffModel()
    first, second = model.open(4), model.open(2)
    assert first is not None
    assert second is not None
    model.clock.advance(1.5)
    model.claim(first, "a")
    ledger = model.ledger
    said.progress(ledger, first.job.job_id, 1, ledger.incarnation, "a", blocks=1)
    model.clock.advance(0.25)
    granted, queued = jobs_of(ledger)
    assert (granted.job_id, granted.state, granted.attempt) == (first.job.job_id, "granted", 1)
    assert granted.open_s == pytest.approx(1.75)
    assert granted.stage_s == pytest.approx(0.25)
    assert granted.queue_s == pytest.approx(1.5)
    assert granted.written == 0.25
    assert (queued.state, queued.stage_s, queued.queue_s) == ("queued", queued.open_s, None)
    assert [job.job_id for job in jobs_of(ledger, limit=1)] == [first.job.job_id]
    model.drain()
    assert jobs_of(ledger) == []
