"""A decode worker's load: what frontends are told, and /status and `pullfill plan` show."""

from __future__ import annotations

from typing import Any

import msgspec

from pullfill.decode_worker.ledger import UNDER_WAY, JobState, Ledger
from pullfill.decode_worker.meter import DecodeMeter
from pullfill.decode_worker.peers import Peers
from pullfill.decode_worker.prefix.read_leases import ReadLeases
from pullfill.decode_worker.self_check import Checks
from pullfill.engine.front_wire import LoadReport
from pullfill.engine.view import View
from pullfill.snapshot import FLOWS, Demand, OpenJob
from pullfill.worker.sides import Engine

_REMOTE = (JobState.QUEUED, *UNDER_WAY)


def load_of(
    engine: Engine,
    ledger: Ledger,
    requests: int,
    peers: Peers,
    leases: ReadLeases,
    checks: Checks | None,
) -> dict[str, Any]:
    """Return the load, for JSON. asyncio thread only.

    requests: number of clients' requests that are not finished."""
    jobs = ledger.sums().jobs
    running, waiting = engine.view.counts()
    return {
        "running": running,
        "waiting": waiting,
        "requests": requests,
        "remote_prefills": sum(jobs[state] for state in _REMOTE),
        "kv_reads": jobs[JobState.READING],
        "quarantined_blocks": ledger.quarantined_blocks,
        "open_jobs": ledger.open_jobs,
        "read_leases": leases.open,
        "kv_free_blocks": engine.view.free_blocks,
        "kv_blocks": engine.view.usable_blocks,
        "prefill_workers": peers.instances,
        "prefill_workers_pulling": len(peers.pulling),
        "claims_stalled": ledger.claims.stalled,
        **(checks.told() if checks else {}),
    }


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


def demand_of(
    engine: Engine, ledger: Ledger, peers: Peers, meter: DecodeMeter, uncached_tokens: int
) -> Demand:
    """Return what this worker tells the planner. asyncio thread only.

    uncached_tokens: those of all requests here that are to be computed (`LoadReport`)."""
    ours = ledger.sums()
    remote = sum(ours.jobs[state] for state in _REMOTE)
    running, waiting = engine.view.counts()
    blocks = engine.view.usable_blocks
    pulling = peers.pulling
    rates = [peer.load.tokens_per_s for peer in pulling]
    return meter.demand.figures(
        open_tokens=ours.uncomputed,
        # `uncached_tokens` has no job: of a request with one, vLLM counts all as computed. And jobs
        # that are claimed are counted where they are computed.
        queued_tokens=uncached_tokens + ours.queued_tokens,
        rates=[rate for rate in rates if rate > 0],
        pool=len(pulling),
        connected=bool(peers),
        own_rate=meter.own_rate,
        kv=1.0 - engine.view.free_blocks / blocks if blocks else 0.0,
        # vLLM counts requests whose prompts are away as waiting. They take no seat yet.
        seats=(running + max(0, waiting - remote))
        / engine.view.config.scheduler_config.max_num_seqs,
    )
