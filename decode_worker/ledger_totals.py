"""Sums over the open jobs of a ledger. A decision reads them and need not visit every job."""

from __future__ import annotations

from pullfill.decode_worker.ledger_types import Entry, JobState


class Totals:
    """The sums. Only the ledger changes them, with its lock held.

    jobs: number of open jobs in each state.
    queued_tokens: tokens to compute for jobs that nobody has claimed.
    uncomputed: tokens that prefill workers have still to compute, over all open jobs.
    unwritten: blocks that are not written yet, over all jobs that prefill workers hold."""

    def __init__(self) -> None:
        self.jobs = dict.fromkeys(JobState, 0)
        self.queued_tokens = 0
        self.uncomputed = 0
        self.unwritten = 0
        self._shares: dict[str, tuple[JobState, int, int]] = {}
        """By job, what it has added: its state, uncomputed tokens and unwritten blocks."""

    def count(self, entry: Entry) -> None:
        """Count an open job. Call it again after its state or its written blocks have changed."""
        self.forget(entry)
        unwritten = max(0, entry.targets - entry.written) if entry.state is JobState.GRANTED else 0
        share = entry.state, entry.uncomputed, unwritten
        self._shares[entry.job_id] = share
        self._add(share, 1)

    def forget(self, entry: Entry) -> None:
        """The job is not open any more."""
        if (share := self._shares.pop(entry.job_id, None)) is not None:
            self._add(share, -1)

    def _add(self, share: tuple[JobState, int, int], sign: int) -> None:
        state, tokens, blocks = share
        self.jobs[state] += sign
        self.uncomputed += sign * tokens
        self.unwritten += sign * blocks
        if state is JobState.QUEUED:
            self.queued_tokens += sign * tokens
