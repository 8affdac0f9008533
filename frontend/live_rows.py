"""The rows of the live page for requests that have ended. Pure."""

from __future__ import annotations

from pullfill.frontend.explain import Trace
from pullfill.snapshot import FAILED, Ended
from pullfill.wire import ExplainRecord

_MAX_ERROR = 200
_STAGES = ("fetch", "queue", "prefix_read", "prefill", "tail")


def ended_of(record: ExplainRecord, trace: Trace, targets_ms: tuple[float, float]) -> Ended:
    """Return the row of a request that is over.

    targets_ms: of requests that name none, for TTFT and ITL."""
    total, first, made = trace.answer_ms, trace.first_token_ms, trace.answer_tokens
    itl = (total - first) / (made - 1) if total and first is not None and made > 1 else None
    ttft_target, itl_target = (
        own if isinstance(own, int | float) else default
        for own, default in zip(trace.targets_ms, targets_ms, strict=True)
    )
    good = None
    if total is not None:
        good = (first or 0.0) <= ttft_target and (itl or 0.0) <= itl_target
    timings = record.timings_ms
    stages = {name: ms for name in _STAGES if (ms := getattr(timings, name)) is not None}
    return Ended(
        id=trace.key,
        at=trace.failed_at if total is None else trace.arrived_at + total / 1e3,
        path=FAILED if trace.error else record.path,
        reason=trace.error[:_MAX_ERROR] or record.reason,
        prompt=record.prompt_tokens,
        made=made,
        ttft_ms=first,
        itl_ms=itl,
        total_ms=total,
        good=False if trace.error else good,
        predicted_ms=predicted_of(record),
        fallback=record.fallback,
        decode=record.decode_instance,
        prefill=record.prefill_instance or "",
        stages=stages,
    )


def predicted_of(record: ExplainRecord) -> float | None:
    """Return the predicted time to first token of what was chosen, in milliseconds."""
    predicted = record.predicted_ms
    if predicted is None:
        return None
    choice = record.choice or record.path
    if choice == "remote":
        return predicted.remote
    if choice == "local_chunked" and predicted.local_chunked is not None:
        return predicted.local_chunked
    return predicted.local
