"""Stops queueing while claims time out one after another, and tries again after a growing pause.

    CLOSED ──3 stalled timeouts──▶ OPEN ──pause──▶ HALF-OPEN ──next prompt is queued──▶ TRIAL
       ▲                            ▲                  ▲                                 │
       │                            └──not claimed─────┼─────────────────────────────────┤
       │                                               └──cancelled, not published───────┤
       └──any claim──────────────────────────────────────────────────────────────────────┘

A claim timeout counts as a stall when two things held while the job waited: no job of this decode
worker was claimed, and no connected prefill worker computed. A long queue that moves is no stall.
A trial waits TRIAL_SHARE of the claim timeout, so no other prompt waits the whole of it.

Every method is called under the ledger's lock; `stalled` may be read from any thread.
"""

from __future__ import annotations

import math

from pullfill.clock import Clock

STALLS = 3
PAUSE_S = (1.0, 30.0)
TRIAL_SHARE = 0.2


class ClaimBreaker:
    """See the module. Owned by the ledger, which tells it about jobs and gives it the clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stalls = 0
        self._moved_at = -math.inf
        self._pause_s = PAUSE_S[0]
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

    def moving(self) -> None:
        """Note that a connected prefill worker is busy. Claim timeouts do not count as stalls then.

        An open breaker stays open. Only a claim of a job of this decode worker closes it.
        """
        self._moved_at, self._stalls = self._clock.monotonic(), 0

    def claimed(self) -> None:
        """A job of this decode worker was claimed. Closes the breaker."""
        self.moving()
        self._pause_s = PAUSE_S[0]
        self._open_until, self._trial = None, ""

    def timed_out(self, job_id: str, queued_at: float, *, computing: bool) -> bool:
        """Note that nobody claimed the job in time.

        Returns True if the breaker opens now. Then other queued jobs need not wait either.

        computing: whether a prefill worker holds a grant of this decode worker."""
        if self._open_until is not None:
            if job_id == self._trial:
                self._pause_s = min(2 * self._pause_s, PAUSE_S[1])
                self._open()
            return False
        if computing or queued_at < self._moved_at:
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
        """Make the next prompt the trial: a prefill worker has connected, or pulls again."""
        if self._open_until is not None:
            self._open_until = self._clock.monotonic()

    def _open(self) -> None:
        self._trial = ""
        self._open_until = self._clock.monotonic() + self._pause_s
