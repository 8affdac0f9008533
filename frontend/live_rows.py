"""The rows of the live page: workers as they are now, and requests that have ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pullfill.cluster_status import Report, Reports, troubles_of
from pullfill.frontend.explain import Trace
from pullfill.live_view import FAILED, Ended, WorkerPoint, WorkerRow
from pullfill.wire import ExplainRecord, WorkerRecord, WorkerState

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


def workers_of(reports: Reports, own_tokens_per_s: Mapping[str, float]) -> tuple[WorkerRow, ...]:
    """Return the workers. own_tokens_per_s: what this frontend gets from each decode worker."""
    troubles = troubles_of(reports)
    return tuple(
        _worker(record, report, troubles.get(record.instance_id, []), own_tokens_per_s)
        for record, report in reports
    )


def _worker(
    record: WorkerRecord,
    report: Report | None,
    troubles: list[str],
    own_tokens_per_s: Mapping[str, float],
) -> WorkerRow:
    load = report.load if report is not None else {}
    demand = load.get("demand") if isinstance(load.get("demand"), dict) else None
    decode = record.role == "decode"
    running, waiting = _count(load.get("running")), _count(load.get("waiting"))
    rate = own_tokens_per_s.get(record.instance_id, 0.0) if decode and report else None
    if not decode:
        waiting, jobs = _count(load.get("unclaimed")), _count(load.get("jobs"))
        running = None if jobs is None else max(0, jobs - (waiting or 0))
        rate = _number(load.get("tokens_per_s"))
    return WorkerRow(
        instance_id=record.instance_id,
        role=record.role,
        state=str(WorkerState.LOST if report is None else record.state),
        model=record.model,
        host=record.host,
        pid=record.pid,
        restarts=record.restarts,
        kv=_kv(load),
        running=running,
        waiting=waiting,
        tokens_per_s=rate,
        backlog_s=_number(demand.get("backlog_s")) if demand and decode else None,
        pressure=_number(demand.get("pressure")) if demand and decode else None,
        troubles=tuple(troubles),
        load={k: v for k, v in load.items() if isinstance(v, int | float | str)},
    )


def point_of(row: WorkerRow) -> WorkerPoint:
    """Return what the history keeps of a worker."""
    return WorkerPoint(row.kv, row.running, row.waiting, row.tokens_per_s)


def backlog_of(rows: tuple[WorkerRow, ...]) -> float | None:
    """Return the seconds of work in the queue. None: no decode worker tells."""
    told = [row.backlog_s for row in rows if row.backlog_s is not None]
    return sum(told) if told else None


def _kv(load: Mapping[str, Any]) -> float | None:
    blocks, free = _count(load.get("kv_blocks")), _count(load.get("kv_free_blocks"))
    if not blocks or free is None:
        return None
    return min(1.0, max(0.0, 1.0 - free / blocks))


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and value == value else None
