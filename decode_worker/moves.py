"""What the ledger asks of the threads around it, and what it answers a claim."""

from __future__ import annotations

from dataclasses import dataclass

from pullfill.errors import Outcome
from pullfill.wire import DigestMode, FenceToken, KvMode, RefuseReason


@dataclass(frozen=True, slots=True)
class Hold:
    """Engine: take one more reference on these blocks, so that vLLM's free cannot reuse them."""

    job_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Engine: drop the reference taken for this job; the writer is proved quiet."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Settle:
    """Engine: tell vLLM, once, that the request's load ended; loaded False: recompute locally."""

    request_id: str
    loaded: bool
    outcome: Outcome


EngineEvent = Hold | Release | Settle


@dataclass(frozen=True, slots=True)
class CancelMessage:
    """Asyncio: delete this job from the queue (`receipt` is the queue's)."""

    receipt: object


@dataclass(frozen=True, slots=True)
class NakDelivery:
    """Asyncio thread: nak the delivery of a lost worker, so that the queue delivers it again.

    receipt: of the queue. None if the queue has not confirmed the job yet."""

    ack_subject: str
    receipt: object | None


@dataclass(frozen=True, slots=True)
class SendRevoke:
    """Asyncio: tell the writer to stop."""

    writer: str
    job_id: str
    attempt: int
    reason: str


Action = CancelMessage | NakDelivery | SendRevoke


@dataclass(frozen=True, slots=True)
class GrantView:
    """A grant, as the control server sends it. `queued_s`: from open to this claim."""

    attempt: int
    deadline_s: float
    digest: bytes
    fence: FenceToken
    queued_s: float
    kv_digest: DigestMode
    mode: KvMode = KvMode.PUSH_ASYNC


@dataclass(frozen=True, slots=True)
class Claimed:
    """Answer to a claim: exactly one of `grant` and `refused` is set."""

    grant: GrantView | None = None
    refused: RefuseReason | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Verify:
    """Answer to a commit whose bytes must be checked first: `blocks` (those that were written, in
    order), as far as `kv_digest` says, against `digest`; then `Ledger.verified`."""

    job_id: str
    attempt: int
    blocks: tuple[int, ...]
    kv_digest: DigestMode
    job_digest: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class Read:
    """Answer to a `Ready`: the reader may copy into `blocks` now, and must say when it is over
    (`Ledger.read_over`), however it ends."""

    job_id: str
    attempt: int
    blocks: tuple[int, ...]
