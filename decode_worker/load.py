"""A decode worker's load, as /status and `pullfill status` show it."""

from __future__ import annotations

from typing import Any

from pullfill.decode_worker.context import DecodeContext
from pullfill.decode_worker.control import ControlServer
from pullfill.decode_worker.ledger_types import UNDER_WAY, JobState
from pullfill.decode_worker.request_server import RequestServer
from pullfill.engine import kv
from pullfill.worker.process import Engine

_REMOTE = (JobState.QUEUED, *UNDER_WAY)


def load_of(
    engine: Engine[DecodeContext], server: RequestServer, control: ControlServer
) -> dict[str, Any]:
    """Return the load, for JSON. asyncio thread only."""
    ledger = engine.context.ledger
    counts = ledger.counts()
    running, waiting = engine.core.scheduler.get_request_counts()
    return {
        "running": running,
        "waiting": waiting,
        "requests": server.active_requests,
        "remote_prefills": sum(counts.get(state, 0) for state in _REMOTE),
        "kv_reads": counts.get(JobState.READING, 0),
        "quarantined_blocks": ledger.quarantined_blocks,
        "open_jobs": ledger.open_jobs,
        "kv_free_blocks": kv.free_blocks(engine.core),
        "kv_blocks": engine.config.cache_config.num_gpu_blocks or 0,
        "prefill_workers": control.peers.instances,
        "prefill_workers_pulling": control.prefill_workers,
        **(control.checks.told() if control.checks else {}),
    }
