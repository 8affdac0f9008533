"""The rows of the live page, as views of the records of requests: those that are over, and those
under way, joined with the open jobs of the workers. Pure.

A request of this frontend has a `Flight`. Its prefill job, if it has one, is in the report of its
decode worker, and in that of the prefill worker that has claimed it. Jobs without a flight here are
of other frontends. Reports are up to a second older than flights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pullfill.frontend.flight import Flight
from pullfill.snapshot import (
    FAILED,
    FLOWS,
    Ended,
    Explained,
    Flow,
    HeldJob,
    Now,
    OpenJob,
    Reports,
    Stage,
)
from pullfill.wire import ExplainRecord

_MAX_ERROR = 200
_STAGES = ("fetch", "queue", "prefix_read", "prefill", "tail")
_QUEUED = frozenset({"queued", "quarantined"})
# Pull mode: the decode worker reads the KV.
_READING = "reading"
# Open jobs by decode worker and request there. Jobs that a prefill worker has, by id.
_Jobs = dict[tuple[str, str], OpenJob]
_Held = dict[str, tuple[str, HeldJob]]


def ended_of(record: Explained, targets_ms: tuple[float, float]) -> Ended:
    """Return the row of a request that is over.

    targets_ms: of requests that name none, for TTFT and ITL."""
    timings, ended, made = record.timings_ms, record.answer_ms, record.answer_tokens
    cancelled = ended is None or record.state == "cancelled"
    total, first = None if record.error or cancelled else ended, timings.first_token
    itl = (total - first) / (made - 1) if total and first is not None and made > 1 else None
    ttft_target, itl_target = (
        own if isinstance(own, int | float) else default
        for own, default in zip(record.targets_ms, targets_ms, strict=True)
    )
    good = None
    if total is not None:
        good = (first or 0.0) <= ttft_target and (itl or 0.0) <= itl_target
    stages = {name: ms for name in _STAGES if (ms := getattr(timings, name)) is not None}
    return Ended(
        id=record.request_id,
        at=None if cancelled else ended_at(record),
        path=FAILED if record.error else record.path,
        reason=(record.error or "")[:_MAX_ERROR] or record.reason,
        prompt=record.prompt_tokens,
        made=made,
        ttft_ms=first,
        itl_ms=itl,
        total_ms=total,
        good=False if record.error else good,
        predicted_ms=predicted_of(record),
        fallback=record.fallback,
        decode=record.decode_instance,
        prefill=record.prefill_instance or "",
        stages=stages,
    )


def ended_at(record: Explained) -> float:
    """Return when a request that is over ended, in seconds since 1970."""
    return record.arrived_at + (record.answer_ms or 0.0) / 1e3


def minute_of(ended: Sequence[Ended]) -> Now:
    """Return the figures of requests that were answered within one minute."""
    return Now(
        ttft_ms=_percentiles([row.ttft_ms for row in ended if row.ttft_ms is not None]),
        itl_ms=_percentiles([row.itl_ms for row in ended if row.itl_ms is not None]),
        done_per_s=len(ended) / 60.0,
        good_per_s=sum(bool(row.good) for row in ended) / 60.0,
    )


def _percentiles(values: list[float]) -> tuple[float, float] | None:
    """Return the median and the 95th percentile, by nearest rank. None: there are no values."""
    if not values:
        return None
    values.sort()
    last = len(values) - 1
    return values[round(0.5 * last)], values[round(0.95 * last)]


def predicted_of(record: ExplainRecord) -> float | None:
    """Return the predicted time to first token of what was chosen, in milliseconds."""
    predicted = record.predicted_ms
    if predicted is None:
        return None
    return predicted.remote if (record.choice or record.path) == "remote" else predicted.local


def flows_of(
    flights: Iterable[Flight], reports: Reports, now: float, limit: int = FLOWS
) -> tuple[tuple[Flow, ...], int]:
    """Return `limit` requests under way, the oldest first, and how many more there are.

    flights: the oldest first. now: `time.monotonic`."""
    jobs: _Jobs = {}
    held: _Held = {}
    for record, report in reports:
        if report is None:
            continue
        if record.role == "decode":
            jobs |= {(record.instance_id, job.request_id): job for job in report.jobs}
        held |= {job.job_id: (record.instance_id, job) for job in report.held}
    waiting, streaming = list[Flight](), list[Flight]()
    for flight in flights:
        (streaming if flight.tokens else waiting).append(flight)
    own = {(_at(f), f.wire_id) for f in (*waiting, *streaming)} if jobs else frozenset()
    others = [(decode, job) for (decode, name), job in jobs.items() if (decode, name) not in own]
    total = len(waiting) + len(streaming) + len(others)
    # Those without a token come first: they are fewer, and move.
    shown = [*waiting[:limit], *streaming[: max(0, limit - len(waiting))]]
    flows = [_own(flight, jobs, held, now) for flight in shown]
    flows += [_other(decode, job, held) for decode, job in others[: limit - len(flows)]]
    flows.sort(key=lambda flow: -flow.age_s)
    return tuple(flows), total - len(flows)


def _at(flight: Flight) -> str:
    return flight.worker.instance_id if flight.worker is not None else ""


def _own(flight: Flight, jobs: _Jobs, held: _Held, now: float) -> Flow:
    record, decode = flight.record, _at(flight)
    job = jobs.get((decode, flight.wire_id))
    age_s = max(0.0, now - record.arrived)
    more = {"id": record.key, "age_s": age_s, "tokens": record.prompt_tokens, "decode": decode}
    if job is not None and not flight.tokens:
        return _of_job(job, held, **more)
    first_ms = record.first_token_ms
    if flight.tokens and first_ms is not None:
        stage, stage_s = Stage.DECODE, max(0.0, age_s - first_ms / 1e3)
    elif flight.worker is None:
        stage, stage_s = Stage.ROUTE, max(0.0, now - record.submitted)
    else:
        routed_s = record.submitted - record.arrived + (record.route_ms or 0.0) / 1e3
        stage, stage_s = Stage.PROMPT, max(0.0, age_s - routed_s)
    return Flow(stage=stage, stage_s=stage_s, made=len(flight.tokens), **more)  # type: ignore[arg-type]


def _other(decode: str, job: OpenJob, held: _Held) -> Flow:
    return _of_job(
        job, held, id=job.request_id, own=False, age_s=job.open_s, tokens=job.tokens, decode=decode
    )


def _of_job(job: OpenJob, held: _Held, **more: object) -> Flow:
    """The flow of a request whose job is open."""
    prefill, holder = held.get(job.job_id, ("", None))
    kv_s = holder.kv_s if holder is not None else None
    stage, done = Stage.PREFILL, None
    stage_s: float | None = job.stage_s
    queue_s, prefill_s = job.queue_s, None
    if job.state in _QUEUED:
        stage, queue_s = Stage.QUEUE, job.open_s
    elif job.state == _READING or kv_s is not None:
        stage, stage_s, done = Stage.KV, kv_s, job.written
        prefill_s = max(0.0, job.stage_s - (kv_s or 0.0))
    else:
        done, prefill_s = holder.computed if holder is not None else None, job.stage_s
    return Flow(
        stage=stage,
        stage_s=stage_s,
        done=done,
        prefill=prefill,
        attempt=job.attempt,
        queue_s=queue_s,
        prefill_s=prefill_s,
        **more,  # type: ignore[arg-type]
    )
