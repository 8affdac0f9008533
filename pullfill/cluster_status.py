"""Combines the reports of all workers: is NATS up, how long is the queue, which worker is cut off.

Frontends use this for `/pullfill/status` and `/ready`. The command line uses it when no frontend
answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from pullfill.clock import SYSTEM_CLOCK
from pullfill.live_view import HeldJob, OpenJob
from pullfill.runtime.health import outage_of
from pullfill.wire.records import QueueStatus, ServerStatus, WorkerRecord, WorkerState

UNTOLD = "unknown: no worker answers that is connected to NATS"
NOT_LINKED = "no decode worker is connected to it"
LOST = f"it does not answer, and {NOT_LINKED}"
NOT_CLAIMED = "no prefill worker has claimed its last jobs"


class Demand(msgspec.Struct, kw_only=True, frozen=True):
    """What one decode worker tells the planner, over the last 30 s (decode_worker/demand.py).

    backlog_s: seconds that all prefill workers together need for its open jobs. Without a prefill
    worker: seconds that one would need for the long prompts.
    prefill_demand: number of prefill workers that its long prompts keep busy all the time.
    tokens_per_s: prompt tokens that one prefill worker computes in a second.
    prompts: number of long prompts, which want a prefill worker.
    missed: how many of these the decode worker computed itself.
    pressure: how full the worker is, the largest of `streams`, `kv` and `seats`. 1: full."""

    backlog_s: float = 0.0
    prefill_demand: float = 0.0
    tokens_per_s: float = 0.0
    prompts: int = 0
    missed: int = 0
    pressure: float = 0.0
    streams: float = 0.0
    kv: float = 0.0
    seats: float = 0.0


class Report(msgspec.Struct, kw_only=True, frozen=True):
    """The answer of one worker to `/status`.

    servers: the status of NATS and etcd, as this worker sees it.
    routes: of a prefill worker: how it writes to each decode worker.
    jobs, held: the open jobs of a decode worker, and those that a prefill worker has. Told only to
    who asks for them.
    pod: name of its Kubernetes pod. Empty: it runs in none.
    at: when the answer came, by the clock of this process."""

    load: dict[str, Any] = {}
    servers: dict[str, ServerStatus] = {}
    queue: QueueStatus | None = None
    routes: dict[str, dict[str, Any]] = {}
    jobs: tuple[OpenJob, ...] = ()
    held: tuple[HeldJob, ...] = ()
    pod: str = ""
    at: float = msgspec.field(default_factory=SYSTEM_CLOCK.monotonic)

    @property
    def age_s(self) -> float:
        return SYSTEM_CLOCK.monotonic() - self.at

    @property
    def self_checks(self) -> list[dict[str, Any]]:
        return list(self.load.get("self_checks", ()))

    @property
    def self_checks_over(self) -> bool:
        """Whether a prefill worker may bring KV to this decode worker, or none may for good."""
        pending = any(check["result"] == "pending" for check in self.self_checks)
        failed = self.load.get("self_check") == "self_check_failed"
        return not pending and (failed or self.load.get("prefill_workers_pulling", 0) > 0)


Reports = Sequence[tuple[WorkerRecord, Report | None]]


def read_report(body: bytes) -> Report | None:
    """Return the report in the body of a `/status` answer. None: it holds none."""
    try:
        return msgspec.convert(json.loads(body), Report)
    except (ValueError, msgspec.ValidationError):
        return None


def nats_of(reports: Reports) -> ServerStatus | None:
    """Return the status of NATS: up if it answers any worker. None: no worker reports it."""
    told = [s for _, report in reports if report and (s := report.servers.get("nats"))]
    up = [status for status in told if status.up]
    return max(up or told, key=lambda status: status.since_s, default=None)


def queue_of(reports: Reports) -> QueueStatus | None:
    """Return the longest queue that a decode worker reports. None: none knows its queue."""
    found = [r.queue for record, r in reports if record.role == "decode" and r and r.queue]
    return max(found, key=lambda queue: queue.depth_jobs, default=None)


def troubles_of(reports: Reports) -> dict[str, list[str]]:
    """Return for each worker why it cannot work, as far as known, one line for each reason.

    A worker that is both has two records. All its lines come under its one id."""
    decode = {r.instance_id: report for r, report in reports if r.role == "decode" and report}
    linked = {name for report in decode.values() for name in report.load.get("prefill_workers", ())}
    checks = [check for report in decode.values() for check in report.self_checks]
    linked |= {check["prefill_instance"] for check in checks}
    troubles: dict[str, list[str]] = {}
    for record, report in reports:
        told = _troubles(record, report) if report else []
        others = decode.keys() - {record.instance_id}
        if record.role == "prefill" and others and record.instance_id not in linked:
            told.append(NOT_LINKED if report else LOST)
        known = troubles.setdefault(record.instance_id, [])
        known += [line for line in told if line not in known]
    return troubles


def _troubles(record: WorkerRecord, report: Report) -> list[str]:
    """Return what a worker itself says that it lacks."""
    servers = ((name, report.servers.get(name)) for name in ("nats", "etcd"))
    told = [outage_of(name, status) for name, status in servers if status and not status.up]
    if record.role == "decode":
        told += [NOT_CLAIMED] if report.load.get("claims_stalled") else []
        told += [check["advice"] for check in report.self_checks if check["advice"]]
    return told


def status_of(reports: Reports, etcd: ServerStatus, workers_age_s: float) -> dict[str, Any]:
    """Return the object of `GET /pullfill/status`.

    workers_age_s: seconds since etcd last answered."""
    troubles = troubles_of(reports)
    nats = nats_of(reports) or ServerStatus(up=False, since_s=0.0, error=UNTOLD)
    return {
        "workers": [row_of(r, s, troubles.get(r.instance_id, ())) for r, s in reports],
        "workers_age_s": workers_age_s,
        "queue": msgspec.to_builtins(queue_of(reports)),
        "servers": {"nats": msgspec.to_builtins(nats), "etcd": msgspec.to_builtins(etcd)},
    }


def row_of(record: WorkerRecord, report: Report | None, troubles: Sequence[str]) -> dict[str, Any]:
    """Return one entry of `workers`. Its `age_s` is the age of its load."""
    return {
        "instance_id": record.instance_id,
        "role": record.role,
        "state": str(WorkerState.LOST if report is None else record.state),
        "model": record.model,
        "host": record.host,
        "pid": record.pid,
        "http": record.http,
        "restarts": record.restarts,
        "load": report.load if report else {},
        "age_s": report.age_s if report else None,
        "troubles": list(troubles),
    }


def reasons_of(reports: Reports, etcd: ServerStatus) -> list[str]:
    """Return why the cluster is degraded, for /ready. Servers come first.

    A server that no worker reaches is named once, not once per worker."""
    servers = [outage_of("etcd", etcd)]
    if nats := nats_of(reports):
        servers.append(outage_of("nats", nats))
    elif reports:
        servers.append(f"NATS {UNTOLD}")
    away = tuple(line.partition(" ")[0] for line in servers if line)
    return list(filter(None, servers)) + [
        f"{instance_id}: {line}"
        for instance_id, lines in troubles_of(reports).items()
        for line in lines
        if not (away and line.startswith(away))
    ]
