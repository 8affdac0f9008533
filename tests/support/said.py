"""Messages in few words, and claims of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from pullfill.decode_worker.ledger import Ledger
from pullfill.wire import Claim, Grant, Refused, RefuseReason

S = TypeVar("S", bound=msgspec.Struct)


def blank(kind: type[S], **fields: Any) -> S:
    """A message with these fields. What else it must have is empty, or 0."""
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in fields:
            made = getattr(field.type, "__origin__", field.type)
            fields[field.name] = blank(made) if issubclass(made, msgspec.Struct) else made()
    return kind(**fields)


@dataclass(frozen=True, slots=True)
class Claimed:
    """Answer to a claim. Exactly one of `grant` and `refused` is set."""

    grant: Grant | None = None
    refused: RefuseReason | None = None
    retry_after_s: float | None = None


def grant(ledger: Ledger, job_id: str, incarnation: str, writer: str, ack: str = "") -> Claimed:
    claim = blank(Claim, job_id=job_id, incarnation=incarnation, ack_subject=ack)
    match ledger.grant(claim, writer):
        case Refused() as refused:
            return Claimed(None, refused.reason, refused.retry_after_s)
        case granted:
            return Claimed(granted)
