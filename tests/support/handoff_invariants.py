"""What must always hold of a decode worker's handoff, whatever the order of events.

`HandoffModel` (handoff_model.py) calls these after its events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from typing import TYPE_CHECKING

from pullfill.decode_worker.ledger import JobState
from tests.support.handoff_jobs import NUM_BLOCKS, PREFIX

if TYPE_CHECKING:
    from tests.support.handoff_model import HandoffModel

PROOF_S = 0.1
"""A writer's last batch is over in milliseconds: a proof is asked for at least as often as this,
and no request waits for it longer."""


def check(model: HandoffModel) -> None:
    """What holds after every event."""
    live = model.live_targets()
    assert len(live) == model.fences.in_use, "a fence is in use that nobody was granted"
    union: set[int] = set()
    for targets in live:
        assert not union & targets, "two writers hold one block"
        union |= targets
    assert not union & model.pool.free, "a block that may still be written is free"
    for grant in model.grants:
        # Who reads a prefix under a fence that was not proved dead believes what he read.
        if model.is_live(grant) or (grant.in_batch and grant.reads):
            assert not grant.hits & model.pool.free, "a block that may still be read is free"
        if grant.in_batch and not grant.reads:
            _check_lands(model, grant.job_id, grant.targets)
    for read in model.reads:
        targets = set(read.blocks[read.first_target :])
        assert not targets & union, "a writer holds what we read into"
        _check_lands(model, read.job_id, targets)
    if model.ledger.quarantined_blocks:
        model.seen.add("quarantined")
    for job in model.jobs.values():
        if job.reports and job.reports[0]:
            assert job.committed, "loaded without a commit"
    _check_totals(model)


def _check_totals(model: HandoffModel) -> None:
    """The sums that the ledger keeps are those of its open jobs."""
    ledger, jobs = model.ledger, list(model.ledger._jobs.values())
    queued = [job.tokens for job in jobs if job.state is JobState.QUEUED]
    granted = [job for job in jobs if job.state is JobState.GRANTED]
    assert ledger.queued() == (len(queued), sum(queued))
    assert ledger.uncomputed() == sum(job.uncomputed for job in jobs)
    assert ledger.unwritten() == sum(max(0, job.targets - job.written) for job in granted)
    states = Counter(job.state for job in jobs)
    assert ledger.counts() == {state: states[state] for state in JobState}


def _check_lands(model: HandoffModel, owner: str, targets: Set[int]) -> None:
    """Bytes land in these blocks right now, whatever the ledger believes."""
    assert not targets & model.pool.free, "bytes land in free blocks"
    for job_id, job in model.jobs.items():
        if job_id != owner and not job.freed:
            assert not targets & set(job.blocks), "bytes land in another's blocks"


def check_timer(model: HandoffModel, soonest: float) -> None:
    """The next tick, in `soonest` seconds, comes in time for every open job."""
    now = model.clock.monotonic()
    for job_id, job in model.jobs.items():
        entry = model.ledger.find(job_id)
        if entry is None:
            continue
        if not entry.settled:
            assert now < min(entry.due, job.deadline), "waits although its time is up"
            assert soonest <= min(entry.due, job.deadline) - now, "nobody looks in time"
        if entry.state is JobState.QUARANTINED:
            waited_s = now - entry.quarantined_at
            assert entry.settled or waited_s < PROOF_S, "a request waits for a stopped writer"
            assert soonest <= PROOF_S, "nobody asks for the proof"


def check_drained(model: HandoffModel) -> None:
    """Everything has come back: jobs, blocks and fences."""
    assert model.ledger.open_jobs == 0
    assert model.ledger.quarantined_blocks == 0
    assert model.fences.in_use == 0
    assert model.pool.free == set(range(NUM_BLOCKS)) - set(PREFIX)
    assert not model.ledger.has_events
    assert not model.ledger.take_actions()
    assert model.ledger.tick() is None
    model.seen |= {f"ended {outcome}" for _, outcome in model.outcomes}
    ended = [job_id for job_id, _ in model.outcomes]
    assert sorted(ended) == sorted(model.jobs), "one outcome per job"
