"""A decode worker's load, as /status and `pullfill status` show it (asyncio thread)."""

from __future__ import annotations

from typing import Any

from pullfill.decode_worker.control import ControlServer
from pullfill.decode_worker.ledger import Ledger
from pullfill.decode_worker.ledger_types import UNDER_WAY, JobState
from pullfill.decode_worker.request_server import RequestServer
from pullfill.engine import kv

_REMOTE = (JobState.QUEUED, *UNDER_WAY)


def load_of(
    core: Any,
    ledger: Ledger | None,
    request_server: RequestServer | None,
    control: ControlServer | None,
    kv_blocks: int,
) -> dict[str, Any]:
    """JSON-able; zeroes for what is not there yet."""
    counts = ledger.counts() if ledger is not None else {}
    running, waiting = core.scheduler.get_request_counts() if core is not None else (0, 0)
    return {
        "running": running,
        "waiting": waiting,
        "requests": request_server.active_requests if request_server else 0,
        "remote_prefills": sum(counts.get(state, 0) for state in _REMOTE),
        "kv_reads": counts.get(JobState.READING, 0),
        "quarantined_blocks": ledger.quarantined_blocks if ledger else 0,
        "open_jobs": ledger.open_jobs if ledger else 0,
        "kv_free_blocks": kv.free_blocks(core),
        "kv_blocks": kv_blocks,
        "prefill_workers": control.peers.instances if control else [],
        "prefill_workers_pulling": control.prefill_workers if control else 0,
        **(control.checks.told() if control and control.checks else {}),
    }
