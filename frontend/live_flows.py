"""Which requests are under way and where: ours, joined with the open jobs of the workers.

A request of this frontend has a `Flight`. Its prefill job, if it has one, is in the report of its
decode worker, and in that of the prefill worker that has claimed it. Jobs without a flight here are
of other frontends. Pure; reports are up to a second older than flights.
"""

from __future__ import annotations

from collections.abc import Iterable

from pullfill.frontend.flight import Flight
from pullfill.snapshot import FLOWS, Flow, HeldJob, OpenJob, Reports, Stage

_QUEUED = frozenset({"queued", "quarantined"})
_READING = "reading"
"""Pull mode: the decode worker reads the KV."""


def flows_of(
    flights: Iterable[Flight], reports: Reports, now: float, limit: int = FLOWS
) -> tuple[tuple[Flow, ...], int]:
    """Return `limit` requests under way, the oldest first, and how many more there are.

    Those without a token come before those that stream: they are fewer, and move.

    flights: the oldest first. now: `time.monotonic`."""
    jobs: dict[tuple[str, str], OpenJob] = {}
    held: dict[str, tuple[str, HeldJob]] = {}
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
    shown = [*waiting[:limit], *streaming[: max(0, limit - len(waiting))]]
    flows = [_own(f, _at(f), jobs.get((_at(f), f.wire_id)), held, now) for f in shown]
    flows += [_other(decode, job, held) for decode, job in others[: limit - len(flows)]]
    flows.sort(key=lambda flow: -flow.age_s)
    return tuple(flows), total - len(flows)


def _at(flight: Flight) -> str:
    return flight.worker.instance_id if flight.worker is not None else ""


def _own(
    flight: Flight,
    decode: str,
    job: OpenJob | None,
    held: dict[str, tuple[str, HeldJob]],
    now: float,
) -> Flow:
    age_s = max(0.0, now - flight.arrived)
    tokens = len(flight.request.prompt_token_ids or ())
    more = {"id": flight.trace.key, "age_s": age_s, "tokens": tokens, "decode": decode}
    if job is not None and not flight.tokens:
        return _of_job(job, held, **more)
    first_ms = flight.trace.first_token_ms
    if flight.tokens and first_ms is not None:
        stage, stage_s = Stage.DECODE, max(0.0, age_s - first_ms / 1e3)
    elif flight.worker is None:
        stage, stage_s = Stage.ROUTE, max(0.0, now - flight.submitted)
    else:
        routed_s = flight.submitted - flight.arrived + (flight.trace.route_ms or 0.0) / 1e3
        stage, stage_s = Stage.PROMPT, max(0.0, age_s - routed_s)
    return Flow(stage=stage, stage_s=stage_s, made=len(flight.tokens), **more)  # type: ignore[arg-type]


def _other(decode: str, job: OpenJob, held: dict[str, tuple[str, HeldJob]]) -> Flow:
    return _of_job(
        job, held, id=job.request_id, own=False, age_s=job.open_s, tokens=job.tokens, decode=decode
    )


def _of_job(job: OpenJob, held: dict[str, tuple[str, HeldJob]], **more: object) -> Flow:
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
