"""Messages in few words, and claims of a prefill worker."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from pullfill.decode_worker.ledger import Ledger
from pullfill.wire import Claim

S = TypeVar("S", bound=msgspec.Struct)


def blank(kind: type[S], **fields: Any) -> S:
    """A message with these fields. What else it must have is empty, or 0."""
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in fields:
            made = getattr(field.type, "__origin__", field.type)
            fields[field.name] = blank(made) if issubclass(made, msgspec.Struct) else made()
    return kind(**fields)


def grant(ledger: Ledger, job_id: str, incarnation: str, writer: str, ack: str = "") -> Any:
    """A prefill worker claims a job. Returns the answer: `Grant` or `Refused`."""
    claim = blank(Claim, job_id=job_id, incarnation=incarnation, ack_subject=ack)
    return ledger.grant(claim, writer)
