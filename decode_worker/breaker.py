"""Stops queueing while claims time out one after another, and tries again after a growing pause.

    CLOSED ──3 stalled timeouts──▶ OPEN ──pause──▶ HALF-OPEN ──next prompt is queued──▶ TRIAL
       ▲                            ▲                  ▲                                 │
       │                            └──not claimed─────┼─────────────────────────────────┤
       │                                               └──cancelled, not published───────┤
       └──any claim──────────────────────────────────────────────────────────────────────┘

A claim timeout counts as a stall if no job of this decode worker was claimed while the job waited.
A stall counts even while prefill workers compute other jobs, because the next prompts would wait as
long as this one. The pause ends when a prefill worker becomes idle. Then one job is tried. It waits
for TRIAL_SHARE of the claim timeout only.

Every method is called under the ledger's lock; `stalled` may be read from any thread.
"""

from __future__ import annotations

import math

from pullfill.backoff import Backoff
from pullfill.clock import Clock

STALLS = 3
PAUSE_S = (1.0, 30.0)
TRIAL_SHARE = 0.2


class ClaimBreaker:
    """See the module. Owned by the ledger, which tells it about jobs and gives it the clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stalls = 0
        self._claimed_at = -math.inf
        self._backoff = Backoff(*PAUSE_S)
        self._open_until: float | None = None
        self._trial = ""

    @property
    def stalled(self) -> bool:
        """Whether prompts are prefilled here: the breaker is open, or a trial is under way."""
        until = self._open_until
        return until is not None and (bool(self._trial) or self._clock.monotonic() < until)

    def queued(self, job_id: str) -> bool:
        """Note that a job is queued. Returns True if it is the trial."""
        if self._open_until is None or self.stalled:
            return False
        self._trial = job_id
        return True

    def claimed(self) -> None:
        """A job of this decode worker was claimed. Closes the breaker."""
        self._claimed_at, self._stalls = self._clock.monotonic(), 0
        self._backoff.reset()
        self._open_until, self._trial = None, ""

    def timed_out(self, job_id: str, queued_at: float) -> bool:
        """Note that nobody claimed the job in time.

        Returns True if this opens the breaker. Then the caller serves all queued jobs locally."""
        if self._open_until is not None:
            if job_id == self._trial:
                self._open()
            return False
        if queued_at < self._claimed_at:
            return False
        self._stalls += 1
        if self._stalls < STALLS:
            return False
        self._open()
        return True

    def ended(self, job_id: str) -> None:
        """Note that the job is over. After a trial without a result the next job is the trial."""
        if job_id == self._trial:
            self._trial = ""

    def retry(self) -> None:
        """End the pause, so the next prompt is the trial: a prefill worker has become free."""
        if self._open_until is not None:
            self._open_until = self._clock.monotonic()

    def _open(self) -> None:
        self._trial = ""
        self._open_until = self._clock.monotonic() + self._backoff.next()
