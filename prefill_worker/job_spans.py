"""The spans of one job at a prefill worker, below the decode worker's `decode.remote_prefill`.

    prefill.attempt         from the delivery until the job is over here. A second attempt is linked
                            to the first, wherever that one ran
      prefill.claim         until the grant
      prefill.compute       from the first step to the last
      transfer.read         one for each read of the prefix
      transfer.write        one for each write of finished blocks

A delivery that gets no grant makes no attempt: it has a random span of the same name.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pullfill.runtime import tracing
from pullfill.runtime.tracing import Context

if TYPE_CHECKING:
    from pullfill.prefill_worker.job import Job
    from pullfill.prefill_worker.task import PrefillTask


def attempt_of(trace: str, job_id: str, number: int) -> Context | None:
    """Return the span of an attempt. None: it is not traced. trace: as in `PrefillJob`."""
    remote = tracing.read(trace)
    return None if remote is None else remote.attempt(job_id, number)


def claimed(job: Job, asked: float) -> None:
    """Note the grant. asked: when it was first asked for."""
    if (attempt := attempt_of(job.job.trace, job.job_id, job.grant.attempt)) is not None:
        tracing.record(
            "prefill.claim", attempt.child(), attempt, asked, time.monotonic(), {}, kind="CLIENT"
        )


def moved(task: PrefillTask, verb: str, transport: str, seconds: float, nbytes: int) -> None:
    """Note a read or write that has just ended. Lane threads."""
    if task.span is not None:
        now = time.monotonic()
        tracing.record(
            f"transfer.{verb}",
            task.span.child(),
            task.span,
            now - seconds,
            now,
            {"pullfill.transport": transport, "pullfill.bytes": nbytes},
        )


def computed(task: PrefillTask, failure: BaseException | None) -> None:
    """Note the end of a task. Any thread."""
    if task.span is not None and task.first_step:
        ended = task.last_compute or time.monotonic()
        tracing.record(
            "prefill.compute",
            task.span.child(),
            task.span,
            task.first_step,
            ended,
            {"gen_ai.usage.prompt_tokens": len(task.token_ids)},
            error="" if failure is None else str(failure) or type(failure).__name__,
        )


def ended(job: Job, began: float) -> None:
    """Note that a job is over here. began: its delivery, by `time.monotonic`."""
    body = getattr(job, "job", None)
    remote = tracing.read(body.trace) if body is not None else None
    if remote is None or body is None:
        return
    grant = getattr(job, "grant", None)
    number = grant.attempt if grant is not None else 0
    before = (remote.attempt(job.job_id, number - 1),) if number > 1 else ()
    tracing.record(
        "prefill.attempt",
        remote.attempt(job.job_id, number) if number else remote.child(),
        remote,
        began,
        time.monotonic(),
        {
            "pullfill.job_id": job.job_id,
            "pullfill.attempt": number,
            "pullfill.delivery": job.message.first.number,
            "pullfill.decode_instance": body.decode_instance,
            "gen_ai.request.id": body.request_id,
        },
        links=before,
        error="" if job.succeeded else "not committed here",
        kind="CONSUMER",
    )
