"""Sums over the open jobs of a ledger. A decision reads them and need not visit every job."""

from __future__ import annotations

from pullfill.decode_worker.ledger_types import Entry, JobState

_Share = tuple[JobState, int, int]
_NOTHING = None, 0, 0


class Totals:
    """The sums. Only the ledger changes them, with its lock held. Any thread may read them.

    jobs: number of open jobs in each state.
    queued_tokens: tokens to compute for jobs that nobody has claimed.
    uncomputed: tokens that prefill workers have still to compute, over all open jobs.
    unwritten: blocks that are not written yet, over all jobs that prefill workers hold."""

    def __init__(self) -> None:
        self.jobs = dict.fromkeys(JobState, 0)
        self.queued_tokens = 0
        self.uncomputed = 0
        self.unwritten = 0
        self._shares: dict[str, _Share] = {}
        """By job, what it has added: its state, uncomputed tokens and unwritten blocks."""

    def count(self, entry: Entry) -> None:
        """Count an open job. Call it again after its state or its written blocks have changed."""
        unwritten = max(0, entry.targets - entry.written) if entry.state is JobState.GRANTED else 0
        self._change(entry.job_id, (entry.state, entry.uncomputed, unwritten))

    def forget(self, entry: Entry) -> None:
        """The job is not open any more."""
        self._change(entry.job_id, None)

    def _change(self, job_id: str, new: _Share | None) -> None:
        # Each sum changes in one go: others read it without the lock.
        old = self._shares.pop(job_id, None)
        if new is not None:
            self._shares[job_id] = new
        before, tokens, blocks = old or _NOTHING
        after, more_tokens, more_blocks = new or _NOTHING
        self.uncomputed += more_tokens - tokens
        self.unwritten += more_blocks - blocks
        queued = JobState.QUEUED
        self.queued_tokens += more_tokens * (after is queued) - tokens * (before is queued)
        if before is not after:
            for state, by in ((before, -1), (after, 1)):
                if state is not None:
                    self.jobs[state] += by
