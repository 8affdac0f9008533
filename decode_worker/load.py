"""What frontends are told of a decode worker's load, and the live page of its open jobs."""

from __future__ import annotations

import msgspec

from pullfill.decode_worker.ledger import Ledger
from pullfill.decode_worker.meter import DecodeMeter
from pullfill.engine.front_wire import LoadReport
from pullfill.engine.view import View
from pullfill.snapshot import FLOWS, OpenJob


def jobs_of(ledger: Ledger, limit: int = FLOWS) -> list[OpenJob]:
    """Return the open jobs, for the live page. Only when somebody looks. Any thread."""
    now, entries = ledger.oldest(limit)
    return [
        OpenJob(
            job_id=entry.job_id,
            request_id=entry.request_id,
            state=entry.state.value,
            tokens=entry.tokens,
            attempt=entry.attempt,
            open_s=now - entry.opened_at,
            stage_s=max(0.0, now - entry.since),
            queue_s=entry.granted_at - entry.opened_at if entry.attempt else None,
            written=min(1.0, entry.written / max(1, entry.targets)),
        )
        for entry in entries
        if not entry.settled
    ]


def report_of(view: View, meter: DecodeMeter, draining: bool) -> LoadReport:
    """Return what frontends are told. Engine thread."""
    cost = meter.model.cost
    return msgspec.structs.replace(
        view.load(draining),
        seats=view.config.scheduler_config.max_num_seqs,
        requests=meter.model.requests,
        streams=meter.model.streams,
        stream_tokens=meter.model.kv_tokens,
        # Rounded, because a report is sent only if it has changed.
        prompt_share=round(meter.prompts.share(), 2),
        step_s=(cost.base_s, cost.stream_s, cost.kv_s),
    )
