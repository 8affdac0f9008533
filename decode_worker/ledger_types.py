"""The words of the ledger: a job and its states, what it asks of other threads, its answers."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from pullfill.engine.groups import ONE_TABLE, BlockOrder
from pullfill.errors import Outcome
from pullfill.wire import FenceToken, KvMode, RefuseReason

NO_PROOF_S = 0.1
"""How long a request waits for the proof that its revoked writer is quiet. A running batch ends
within milliseconds. A writer whose process is stopped in a batch may never end it."""


class JobState(enum.StrEnum):
    QUEUED = "queued"
    GRANTED = "granted"
    READING = "reading"
    QUARANTINED = "quarantined"
    COMMITTED = "committed"
    CLOSED = "closed"


UNDER_WAY = frozenset({JobState.GRANTED, JobState.READING})
"""A prefill worker computes the job, or has computed it."""
TRIAL = "self-check-"
"""Request ids of the self-check begin with this."""


@dataclass(slots=True)
class Entry:
    """One open job. Only the ledger changes it, with its lock held.

    blocks: all blocks of the prompt on this worker, hit blocks first. The writer may touch only
    `blocks[first_target:]`.
    deadline: when the whole job ends, by the ledger's clock.
    queued_at, claim_timeout_s: when the job was last queued, and how long it may then wait for a
    claim. queued_at is infinite for a job that is not published yet.
    hedge_at: when the prompt is computed here if no prefill worker has claimed it.
    stall_s: an attempt that makes progress may go on beyond the deadline. It ends after this many
    seconds without progress.
    order: which blocks of each KV cache group are written.
    hit_tokens: length of the prefix hit.
    tokens: number of tokens that a prefill worker must compute.
    features: encoded multimodal inputs, which the grant brings. Empty once the job is settled.
    receipt: of the queue, once the job is stored there and as long as it may have to be deleted.
    attempt: number of grants so far.
    losses: how many of their writers were lost.
    writer, ack_subject, fence: control connection, delivery and fence of the current grant.
    written: number of target blocks that the current attempt has reported as written.
    reading: whether our own reader copies into the blocks, or will.
    settled: whether the request was told how its remote prefill ended.
    held: whether the engine was told to hold the blocks.
    quarantined_at, granted_at: when it last came into that state."""

    job_id: str
    request_id: str
    blocks: tuple[int, ...]
    first_target: int
    opened_at: float
    queued_at: float
    deadline: float
    claim_timeout_s: float
    stall_s: float
    hedge_at: float = math.inf
    order: BlockOrder = ONE_TABLE
    hit_tokens: int = 0
    tokens: int = 0
    state: JobState = JobState.QUEUED
    digest: bytes = b""
    features: bytes = b""
    receipt: object | None = None
    attempt: int = 0
    losses: int = 0
    writer: str = ""
    ack_subject: str = ""
    fence: FenceToken | None = None
    written: int = 0
    reading: bool = False
    settled: bool = False
    held: bool = False
    quarantined_at: float = 0.0
    granted_at: float = 0.0

    @property
    def self_check(self) -> bool:
        """Whether the self-check made this job. Such a job does not pass the queue."""
        return self.request_id.startswith(TRIAL)

    @property
    def published(self) -> bool:
        """Whether the job went to the queue, or is just on its way there."""
        return self.queued_at < math.inf

    @property
    def targets(self) -> int:
        """Number of blocks that the writer may touch."""
        return len(self.blocks) - self.first_target

    @property
    def uncomputed(self) -> int:
        """Number of tokens that a prefill worker has still to compute, judged by its blocks."""
        if self.state is JobState.QUEUED:
            return self.tokens
        if self.state is JobState.GRANTED:
            return round(self.tokens * (1.0 - min(1.0, self.written / max(1, self.targets))))
        return 0

    @property
    def since(self) -> float:
        """When the job came into its state. Of one under way: when it was granted."""
        if self.state is JobState.QUEUED:
            return self.queued_at if self.published else self.opened_at
        return self.quarantined_at if self.state is JobState.QUARANTINED else self.granted_at

    @property
    def due(self) -> float:
        """When the job has been in its state for too long."""
        if self.state is JobState.QUEUED:
            return min(self.deadline, self.queued_at + self.claim_timeout_s, self.hedge_at)
        if self.state is JobState.QUARANTINED:
            return min(self.deadline, self.quarantined_at + NO_PROOF_S)
        return self.deadline


# ---------------------------------------------------------------------- events: the engine thread


@dataclass(frozen=True, slots=True)
class Hold:
    """Take one more reference to these blocks, so that vLLM cannot reuse what it frees."""

    job_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Drop the references that were taken for this job: its writer is proved quiet."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Settle:
    """Tell vLLM that the request's remote prefill has ended.

    loaded: the KV is there. Otherwise vLLM computes the prompt here."""

    request_id: str
    loaded: bool
    outcome: Outcome


EngineEvent = Hold | Release | Settle


# ---------------------------------------------------------------------- actions: the asyncio thread


@dataclass(frozen=True, slots=True)
class CancelMessage:
    """Delete this job from the queue. The receipt is the queue's."""

    receipt: object


@dataclass(frozen=True, slots=True)
class NakDelivery:
    """Nak the delivery of a lost prefill worker, so that the queue delivers the job again.

    receipt: of the queue. None if the queue has not confirmed the job yet."""

    ack_subject: str
    receipt: object | None


@dataclass(frozen=True, slots=True)
class SendRevoke:
    """Tell the writer to stop."""

    writer: str
    job_id: str
    attempt: int
    reason: str


Action = CancelMessage | NakDelivery | SendRevoke


# ---------------------------------------------------------------------- answers


@dataclass(frozen=True, slots=True)
class GrantView:
    """A grant, as the control server sends it.

    queued_s: seconds from the job's opening to this grant.
    features: see `Entry`. They are here because the engine thread may settle the job meanwhile."""

    attempt: int
    deadline_s: float
    digest: bytes
    fence: FenceToken
    queued_s: float
    mode: KvMode
    features: bytes


@dataclass(frozen=True, slots=True)
class Claimed:
    """Answer to a claim. Exactly one of `grant` and `refused` is set."""

    grant: GrantView | None = None
    refused: RefuseReason | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """Answer to `Ready`: our reader may copy into these blocks now.

    However that ends, `Ledger.read_over` must be told."""

    job_id: str
    attempt: int
    blocks: tuple[int, ...]
