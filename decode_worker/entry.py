"""One job as the ledger keeps it; ledger.py moves it from state to state under its lock."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pullfill.wire import FenceToken


class JobState(enum.StrEnum):
    QUEUED = "queued"
    GRANTED = "granted"
    READING = "reading"
    VERIFYING = "verifying"
    QUARANTINED = "quarantined"
    COMMITTED = "committed"
    CLOSED = "closed"


NO_PROOF_S = 0.1
"""How long a request waits for the proof that its revoked writer is quiet. A running batch ends
within milliseconds. A writer whose process is stopped in a batch may never end it."""

UNDER_WAY = frozenset({JobState.GRANTED, JobState.READING, JobState.VERIFYING})
"""Some prefill worker has computed for it, or does."""


@dataclass(slots=True)
class Entry:
    """One job.

    blocks: all blocks of the prompt on this worker, hit blocks first. The writer may touch only
    `blocks[first_target:]`.
    deadline: when the whole job ends, by the ledger's clock.
    stall_s: an attempt that makes progress ends only after this long without progress, also beyond
    the deadline.
    queued_at, claim_timeout_s: when the job was last queued, and how long it may then wait for a
    claim.
    written: number of target blocks that the current attempt has reported as written.
    reading: whether our own reader copies into the blocks, or will. Until it says that it is done,
    the blocks are not free, even if the job has ended."""

    job_id: str
    request_id: str
    blocks: tuple[int, ...]
    first_target: int
    hit_tokens: int
    deadline: float
    opened_at: float
    claim_timeout_s: float
    queued_at: float
    stall_s: float
    digest: bytes = b""
    state: JobState = JobState.QUEUED
    attempt: int = 0
    writer: str = ""
    ack_subject: str = ""
    fence: FenceToken | None = None
    settled: bool = False
    held: bool = False
    written: int = 0
    reading: bool = False
    receipt: object | None = None
    quarantined_at: float = 0.0

    @property
    def targets(self) -> int:
        """Blocks the writer may touch."""
        return len(self.blocks) - self.first_target

    @property
    def due(self) -> float:
        """When the stage it is in has taken too long."""
        if self.state is JobState.QUEUED:
            return min(self.deadline, self.queued_at + self.claim_timeout_s)
        if self.state is JobState.QUARANTINED:
            return min(self.deadline, self.quarantined_at + NO_PROOF_S)
        return self.deadline
