"""Combines the reports of all workers: is NATS up, how long is the queue, which worker is cut off.

A report is a worker's answer to `/status`. Frontends use this for `/pullfill/status` and `/ready`.
The command line uses it when no frontend answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from pullfill.clock import SYSTEM_CLOCK
from pullfill.runtime.health import outage_of
from pullfill.wire.records import QueueStatus, ServerStatus, WorkerRecord, WorkerState

T = TypeVar("T")

UNTOLD = "unknown: no worker answers that is connected to NATS"
NOT_LINKED = "no decode worker is connected to it"


@dataclass(frozen=True, slots=True)
class Report:
    """The answer of one worker, and when it came, by the clock of this process."""

    said: Mapping[str, Any]
    at: float

    @property
    def age_s(self) -> float:
        return SYSTEM_CLOCK.monotonic() - self.at

    @property
    def load(self) -> dict[str, Any]:
        load = self.said.get("load")
        return load if isinstance(load, dict) else {}

    @property
    def self_checks_over(self) -> bool:
        """Whether a prefill worker may bring KV to this decode worker, or none may for good."""
        pending = any(c.get("result") == "pending" for c in self.load.get("self_checks", ()))
        failed = self.load.get("self_check") == "self_check_failed"
        return not pending and (failed or self.load.get("prefill_workers_pulling", 0) > 0)

    def server(self, name: str) -> ServerStatus | None:
        """The status of NATS or etcd, as this worker sees it."""
        servers = self.said.get("servers")
        return _read(servers if isinstance(servers, dict) else {}, name, ServerStatus)

    def queue(self) -> QueueStatus | None:
        return _read(self.said, "queue", QueueStatus)


Reports = Sequence[tuple[WorkerRecord, Report | None]]


def read_report(body: bytes) -> Report | None:
    """Make a report from the body of a `/status` answer. Returns None if it is no JSON object."""
    try:
        said = json.loads(body)
    except ValueError:
        return None
    return Report(said, SYSTEM_CLOCK.monotonic()) if isinstance(said, dict) else None


def nats_of(reports: Reports) -> ServerStatus | None:
    """The status of NATS: up if it answers any worker. None: no worker reports it."""
    told = [s for _, report in reports if report and (s := report.server("nats"))]
    up = [status for status in told if status.up]
    return max(up or told, key=lambda status: status.since_s, default=None)


def queue_of(reports: Reports) -> QueueStatus | None:
    """The longest queue that any decode worker reports. None: no decode worker knows its queue."""
    found = [
        queue
        for record, report in reports
        if record.role == "decode" and report and (queue := report.queue())
    ]
    return max(found, key=lambda queue: queue.depth_jobs, default=None)


def troubles_of(reports: Reports) -> dict[str, list[str]]:
    """Instance id -> reasons why this worker cannot work, one line each. For all that report."""
    decode = [report for record, report in reports if record.role == "decode" and report]
    linked = {name for report in decode for name in report.load.get("prefill_workers", ())}
    checks = [check for report in decode for check in report.load.get("self_checks", ())]
    linked |= {check.get("prefill_instance") for check in checks}
    troubles: dict[str, list[str]] = {}
    for record, report in reports:
        if report is None:
            continue
        told = [
            outage_of(name, status)
            for name in ("nats", "etcd")
            if (status := report.server(name)) and not status.up
        ]
        if record.role == "prefill" and decode and record.instance_id not in linked:
            told.append(NOT_LINKED)
        if record.role == "decode":
            told += [c["advice"] for c in report.load.get("self_checks", ()) if c.get("advice")]
        troubles[record.instance_id] = told
    return troubles


def status_of(reports: Reports, etcd: ServerStatus, workers_age_s: float) -> dict[str, Any]:
    """The object of `GET /pullfill/status`. workers_age_s: seconds since etcd last answered."""
    troubles = troubles_of(reports)
    nats = nats_of(reports) or ServerStatus(up=False, since_s=0.0, error=UNTOLD)
    return {
        "workers": [row_of(r, s, troubles.get(r.instance_id, ())) for r, s in reports],
        "workers_age_s": workers_age_s,
        "queue": msgspec.to_builtins(queue_of(reports)),
        "servers": {"nats": msgspec.to_builtins(nats), "etcd": msgspec.to_builtins(etcd)},
    }


def row_of(record: WorkerRecord, report: Report | None, troubles: Sequence[str]) -> dict[str, Any]:
    """One entry of `workers`. Its `age_s` is the age of its load."""
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
    """Why the cluster is degraded, for /ready. Servers come first.

    A server that no worker reaches is named once, not once per worker."""
    servers = [outage_of("etcd", etcd)]
    servers.append(outage_of("nats", nats) if (nats := nats_of(reports)) else "")
    away = tuple(line.partition(" ")[0] for line in servers if line)
    return list(filter(None, servers)) + [
        f"{instance_id}: {line}"
        for instance_id, lines in troubles_of(reports).items()
        for line in lines
        if not (away and line.startswith(away))
    ]


def _read(found: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    try:
        return msgspec.convert(found[name], kind)
    except (KeyError, msgspec.ValidationError):
        return None
