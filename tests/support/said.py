"""What a prefill worker says to a ledger: its messages in few words."""

from __future__ import annotations

from dataclasses import dataclass

from pullfill.decode_worker.ledger import Entry, Ledger
from pullfill.wire import (
    Claim,
    Commit,
    FenceToken,
    GiveUp,
    Grant,
    Progress,
    Ready,
    Refused,
    RefuseReason,
    StageTimings,
)

NO_FENCE = FenceToken(slot=0, epoch=0)


@dataclass(frozen=True, slots=True)
class Claimed:
    """Answer to a claim. Exactly one of `grant` and `refused` is set."""

    grant: Grant | None = None
    refused: RefuseReason | None = None
    retry_after_s: float | None = None


def grant(ledger: Ledger, job_id: str, incarnation: str, writer: str, ack: str = "") -> Claimed:
    claim = Claim(rid=1, job_id=job_id, incarnation=incarnation, ack_subject=ack)
    match ledger.grant(claim, writer):
        case Refused() as refused:
            return Claimed(None, refused.reason, refused.retry_after_s)
        case granted:
            return Claimed(granted)


def commit(
    ledger: Ledger, job_id: str, attempt: int, incarnation: str, writer: str, blocks: int
) -> str | None:
    said = Commit(
        rid=1, job_id=job_id, attempt=attempt, incarnation=incarnation, blocks=blocks, kv_bytes=0,
        timings=StageTimings(),
    )  # fmt: skip
    return ledger.commit(said, writer)


def ready(
    ledger: Ledger, job_id: str, attempt: int, incarnation: str, writer: str, blocks: int
) -> Entry | str:
    said = Ready(
        rid=1, job_id=job_id, attempt=attempt, incarnation=incarnation, block_ids=bytes(4 * blocks),
        fence=NO_FENCE, timings=StageTimings(),
    )  # fmt: skip
    return ledger.ready(said, writer)


def progress(
    ledger: Ledger, job_id: str, attempt: int, incarnation: str, writer: str, blocks: int = 0
) -> bool:
    said = Progress(job_id=job_id, attempt=attempt, incarnation=incarnation, blocks=blocks)
    return ledger.progress(said, writer)


def gave_up(
    ledger: Ledger,
    job_id: str,
    attempt: int,
    incarnation: str,
    writer: str,
    cause: str = "why",
    retry: bool = True,
) -> None:
    said = GiveUp(job_id=job_id, attempt=attempt, incarnation=incarnation, cause=cause, retry=retry)
    ledger.gave_up(said, writer)
