"""One picture of the cluster. All that show it read this: /ready, `/pullfill/status`,
`pullfill status`, `pullfill top` and the live page.

    workers' /status: `Report` ──► `cluster_of` ──► `Cluster` ──► status, /ready
                                                        └─ with its requests: `LiveSnapshot`

A frontend makes a `LiveSnapshot` a second while somebody looks, and nothing otherwise.
`/pullfill/ui/events` sends them. `pullfill page` and `top` make them without a frontend.

Times named `at` are seconds since 1970 by the frontend's clock. Other times are seconds (`_s`) or
milliseconds (`_ms`). None: unknown, or not measured.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pullfill.clock import SYSTEM_CLOCK
from pullfill.runtime.health import outage_of
from pullfill.wire.codec import Count
from pullfill.wire.records import (
    ExplainRecord,
    QueueStatus,
    ServerStatus,
    WorkerRecord,
    WorkerState,
)

UNTOLD = "unknown: no worker answers that is connected to NATS"
NOT_LINKED = "no decode worker is connected to it"
LOST = f"it does not answer, and {NOT_LINKED}"
NOT_CLAIMED = "no prefill worker has claimed its last jobs"
# Finished requests in one snapshot, the latest.
RECENT = 50
# Most requests under way in one snapshot, the oldest.
FLOWS = 120
FAILED = "failed"
# Finished requests that a frontend keeps, and a decode worker of those that no frontend sent.
MAX_RECORDS = 10_000
# Engine requests of one call that are kept. A beam search makes one for each beam and token.
MAX_PARTS = 32


# ------------------------------------------------------------------------- what a worker tells


class OpenJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An open prefill job as its decode worker knows it (`jobs` of a worker's `/status?jobs`).

    request_id: of the request at the decode worker.
    state: `JobState` of the ledger (decode_worker).
    tokens: those that a prefill worker computes.
    open_s: seconds since the job was opened. stage_s: since it is in this state.
    queue_s: seconds from its opening to its last grant.
    written: share of its blocks that are written, 0 to 1."""

    job_id: str
    request_id: str
    state: str
    tokens: int = 0
    attempt: int = 0
    open_s: float = 0.0
    stage_s: float = 0.0
    queue_s: float | None = None
    written: float = 0.0


class HeldJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job as the prefill worker knows it that has it (`held` of a worker's `/status?jobs`).

    computed: share of the prompt that is computed, 0 to 1.
    kv_s: seconds since all of it is computed. None: it is not."""

    job_id: str
    computed: float = 0.0
    kv_s: float | None = None


# Neither infinite nor NaN: of such a number of workers no whole one can be made.
Figure = Annotated[float, Meta(ge=0, le=1e12)]


class Demand(msgspec.Struct, kw_only=True, frozen=True):
    """What one decode worker tells the planner, over the last 30 s (decode_worker/demand.py).

    backlog_s: seconds that all prefill workers together need for its open jobs. If none is
    connected: seconds that one would need for the long prompts.
    queued_s: seconds that this worker alone needs for all prompts that it has to compute, with its
    jobs that nobody has claimed.
    prefill_demand: number of prefill workers that its long prompts keep busy all the time.
    tokens_per_s: prompt tokens that one prefill worker computes in a second.
    prompts: number of long prompts, which want a prefill worker.
    missed: how many of these the decode worker computed itself.
    pressure: how full the worker is, the largest of `streams`, `kv` and `seats`. 1: full."""

    backlog_s: Figure = 0.0
    queued_s: Figure = 0.0
    prefill_demand: Figure = 0.0
    tokens_per_s: Figure = 0.0
    prompts: Count = 0
    missed: Count = 0
    pressure: Figure = 0.0
    streams: Figure = 0.0
    kv: Figure = 0.0
    seats: Figure = 0.0


class Report(msgspec.Struct, kw_only=True, frozen=True):
    """The answer of one worker to `/status`.

    servers: the status of NATS and etcd, as this worker sees it.
    jobs, held: the open jobs of a decode worker, and those that a prefill worker has. Told only to
    who asks for them (`/status?jobs`).
    request: what a decode worker knows of a request that no frontend of ours has sent
    (`/status?request=ID`). None: nothing, or nobody has asked.
    ended: such requests that have ended last, RECENT at most, the oldest first
    (`/status?ended`).
    pod: name of its Kubernetes pod. Empty: it runs in none.
    stays: its process is stock vLLM, which goes on when the worker has drained.
    at: when the answer came, by the clock of this process."""

    load: dict[str, Any] = {}
    servers: dict[str, ServerStatus] = {}
    queue: QueueStatus | None = None
    jobs: tuple[OpenJob, ...] = ()
    held: tuple[HeldJob, ...] = ()
    request: Explained | None = None
    ended: tuple[Explained, ...] = ()
    pod: str = ""
    stays: bool = False
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


# ------------------------------------------------------------------------- the cluster now


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A worker now.

    load: what it tells of its load. age_s: how old that is. None: it does not answer.
    troubles: why it cannot work, as far as known.
    kv: share of its KV blocks in use, 0 to 1.
    running, waiting: requests (decode), or jobs (prefill).
    tokens_per_s: of a decode worker: tokens of answers of this frontend. Of a prefill worker: how
    fast it computes prompts.
    backlog_s, pressure: see `Demand`.
    routing: what the frontend that tells this knows of a decode worker when it chooses one."""

    instance_id: str
    role: str
    state: str
    model: str = ""
    host: str = ""
    pid: int = 0
    http: str = ""
    restarts: int = 0
    load: dict[str, Any] = {}
    age_s: float | None = None
    troubles: tuple[str, ...] = ()
    kv: float | None = None
    running: int | None = None
    waiting: int | None = None
    tokens_per_s: float | None = None
    backlog_s: float | None = None
    pressure: float | None = None
    routing: dict[str, Any] | UnsetType = UNSET


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The object of `GET /pullfill/status`.

    workers_age_s: seconds since etcd last answered. queue: None: no decode worker knows it.
    servers: whether NATS and etcd answer.
    stock: the stock vLLM servers of the frontend that tells, if it may have any.
    suspects: requests that all frontends refuse."""

    workers: tuple[WorkerRow, ...] = ()
    workers_age_s: float = 0.0
    queue: QueueStatus | None = None
    servers: dict[str, ServerStatus] = {}
    stock: list[dict[str, Any]] | UnsetType = UNSET
    suspects: list[dict[str, Any]] | UnsetType = UNSET

    @property
    def backlog_s(self) -> float | None:
        """Seconds of work in the queue. None: no decode worker tells."""
        told = [row.backlog_s for row in self.workers if row.backlog_s is not None]
        return sum(told) if told else None

    def outages(self) -> list[str]:
        """Return a line for each server that does not answer."""
        return [
            # Of a server that nobody asks, it is not known since when it does not answer.
            f"NATS {UNTOLD}" if status.error == UNTOLD else outage_of(name, status)
            for name, status in self.servers.items()
            # Stock servers alone need no NATS.
            if not status.up and (self.workers or status.error != UNTOLD)
        ]

    def reasons(self) -> list[str]:
        """Return why the cluster is degraded, for /ready. Servers come first."""
        servers = self.outages()
        # A server that no worker reaches is named once, not once per worker.
        away = tuple(line.partition(" ")[0] for line in servers)
        told = {
            f"{row.instance_id}: {line}": None
            for row in self.workers
            for line in row.troubles
            if not (away and line.startswith(away))
        }
        return [*servers, *told]


# ------------------------------------------------------------- the requests of a frontend


class Explained(ExplainRecord, frozen=True, kw_only=True):
    """What `pullfill explain --json` and GET /pullfill/requests/ID show: a worker's record of a
    request, and what its frontend adds. Without a frontend of ours: what the worker itself knows.

    path: `unknown` if no worker has told of the request, or its remote prefill has not ended.
    `none` if it was not sent to a worker.
    state: `running`, `answered`, `failed`, or `cancelled` by its client. Empty: not known.
    status: of HTTP. 0: no answer has begun, or a worker tells this.
    error: what the client was told.
    arrived_at: when it came.
    answer_ms: from its arrival to its end. None: it has not ended, or a client of a frontend has
    cancelled it.
    answer_tokens: of its answer.
    targets_ms: what it names for TTFT and ITL. None: nothing.
    parts: its other prompts, choices or beams. more_parts: number of those that are not kept."""

    state: str = ""
    status: int = 0
    error: str | None = None
    arrived_at: float = 0.0
    answer_ms: float | None = None
    answer_tokens: int = 0
    targets_ms: tuple[float | None, float | None] = (None, None)
    parts: tuple[Explained, ...] = ()
    more_parts: int = 0

    @classmethod
    def of(cls, record: ExplainRecord, **added: Any) -> Explained:
        """Return a worker's record with what is added."""
        return cls(**msgspec.structs.asdict(record) | added)


class Stage(enum.StrEnum):
    """Where a request is.

    ROUTE: at the frontend, without a decode worker. PROMPT: at its decode worker, which computes
    the prompt, or has others to do first. QUEUE: its prefill job waits for a prefill worker.
    PREFILL: a prefill worker has the job. KV: the prompt is computed, and the last of its KV is on
    the way. DECODE: its answer is being generated."""

    ROUTE = "route"
    PROMPT = "prompt"
    QUEUE = "queue"
    PREFILL = "prefill"
    KV = "kv"
    DECODE = "decode"


class Flow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request under way.

    id: the `id` of the response, with the choice if there are several. Of a request of another
    frontend: its id at the decode worker.
    own: whether it is a request of this frontend.
    age_s: seconds since it came. Of others: since their job was opened.
    tokens: length of its prompt, or of its job if that is all that is known.
    made: tokens of the answer that are out.
    done: share of the stage that is done. None: unknown.
    queue_s, prefill_s: how long those stages took, or have taken so far."""

    id: str
    stage: Stage
    own: bool = True
    stage_s: float | None = None
    age_s: float = 0.0
    tokens: int = 0
    made: int = 0
    done: float | None = None
    decode: str = ""
    prefill: str = ""
    attempt: int = 0
    queue_s: float | None = None
    prefill_s: float | None = None


class Ended(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that is over.

    at: when it ended. None: its client has cancelled it.
    path: FAILED if it failed. Then `reason` is the error.
    itl_ms: mean time between two tokens of its answer.
    good: whether both were within its targets. None: it was cancelled.
    total_ms: from its arrival to its end.
    predicted_ms: its time to first token, as predicted for the choice that was made.
    stages: milliseconds of `queue`, `prefill` and `tail`, where they happened."""

    id: str
    at: float | None
    path: str
    reason: str
    prompt: int = 0
    made: int = 0
    ttft_ms: float | None = None
    itl_ms: float | None = None
    total_ms: float | None = None
    good: bool | None = None
    predicted_ms: float | None = None
    fallback: str | None = None
    decode: str = ""
    prefill: str = ""
    stages: dict[str, float] = {}


class Now(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Figures of the last minute; `backlog_s`, `in_flight` and `failed` are of this moment.

    done_per_s, good_per_s: requests that ended, and those of them within their targets.
    failed: requests that no decode worker could finish, since the frontend started."""

    ttft_ms: tuple[float, float] | None = None
    itl_ms: tuple[float, float] | None = None
    tokens_per_s: float = 0.0
    done_per_s: float = 0.0
    good_per_s: float = 0.0
    backlog_s: float | None = None
    in_flight: int = 0
    failed: int = 0


class LiveSnapshot(Cluster, frozen=True, kw_only=True, omit_defaults=True):
    """The cluster, and the requests of the frontend that tells.

    frontend: empty: the workers tell. Then the requests are those that no frontend has sent.
    targets_ms: time to first token and between tokens, of requests that name none.
    flows: requests under way. hidden: how many more there are.
    ended: the requests that have ended last, oldest first."""

    at: float
    frontend: str
    model: str
    frontends: int = 1
    targets_ms: tuple[float, float] = (0.0, 0.0)
    now: Now = Now()
    flows: tuple[Flow, ...] = ()
    hidden: int = 0
    ended: tuple[Ended, ...] = ()


# ------------------------------------------------------------------------- from reports to rows


def cluster_of(
    reports: Reports,
    etcd: ServerStatus,
    workers_age_s: float = 0.0,
    tokens_per_s: Mapping[str, float] | None = None,
) -> Cluster:
    """Return the cluster, as its workers report it.

    etcd: as the caller sees it. workers_age_s: seconds since it last answered.
    tokens_per_s: what the frontend that asks gets from each decode worker."""
    # NATS is up if it answers any worker.
    told = [s for _, report in reports if report and (s := report.servers.get("nats"))]
    heard = [status for status in told if status.up] or told
    unknown = ServerStatus(up=False, since_s=0.0, error=UNTOLD)
    nats = max(heard, key=lambda status: status.since_s, default=unknown)
    queues = [r.queue for record, r in reports if record.role == "decode" and r and r.queue]
    troubles = _troubles(reports)
    return Cluster(
        workers=tuple(
            _row(r, report, troubles[r.instance_id], tokens_per_s) for r, report in reports
        ),
        workers_age_s=workers_age_s,
        queue=max(queues, key=lambda queue: queue.depth_jobs, default=None),
        servers={"nats": nats, "etcd": etcd},
    )


def _troubles(reports: Reports) -> dict[str, list[str]]:
    """Return for each worker why it cannot work, as far as known, one line for each reason."""
    decode = {r.instance_id: report for r, report in reports if r.role == "decode" and report}
    linked = {name for report in decode.values() for name in report.load.get("prefill_workers", ())}
    checks = [check for report in decode.values() for check in report.self_checks]
    linked |= {check["prefill_instance"] for check in checks}
    troubles: dict[str, list[str]] = {}
    for record, report in reports:
        told = _own_troubles(record, report) if report else []
        others = decode.keys() - {record.instance_id}
        if record.role == "prefill" and others and record.instance_id not in linked:
            told.append(NOT_LINKED if report else LOST)
        # A worker that is both has two records. All its lines come under its one id.
        known = troubles.setdefault(record.instance_id, [])
        known += [line for line in told if line not in known]
    return troubles


def _own_troubles(record: WorkerRecord, report: Report) -> list[str]:
    """Return what a worker itself says that it lacks."""
    servers = ((name, report.servers.get(name)) for name in ("nats", "etcd"))
    told = [outage_of(name, status) for name, status in servers if status and not status.up]
    if record.role == "decode":
        told += [NOT_CLAIMED] if report.load.get("claims_stalled") else []
        told += [check["advice"] for check in report.self_checks if check["advice"]]
    return told


def _row(
    record: WorkerRecord,
    report: Report | None,
    troubles: Sequence[str],
    rates: Mapping[str, float] | None,
) -> WorkerRow:
    load: Mapping[str, Any] = report.load if report is not None else {}
    decode, demand = record.role == "decode", load.get("demand")
    told: Mapping[str, Any] = demand if decode and isinstance(demand, dict) else {}
    if decode:
        running, waiting = _count(load.get("running")), _count(load.get("waiting"))
        rate = rates.get(record.instance_id, 0.0) if report and rates is not None else None
    else:
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
        http=record.http,
        restarts=record.restarts,
        load=dict(load),
        age_s=report.age_s if report else None,
        troubles=tuple(troubles),
        kv=_kv(load),
        running=running,
        waiting=waiting,
        tokens_per_s=rate,
        backlog_s=_number(told.get("backlog_s")),
        pressure=_number(told.get("pressure")),
    )


def _kv(load: Mapping[str, Any]) -> float | None:
    blocks, free = _count(load.get("kv_blocks")), _count(load.get("kv_free_blocks"))
    if not blocks or free is None:
        return None
    return min(1.0, max(0.0, 1.0 - free / blocks))


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and value == value else None
