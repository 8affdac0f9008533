"""What the live page of a frontend and `pullfill top` show.

A frontend makes one `Snapshot` a second while somebody looks, and nothing otherwise. The first one
that a viewer gets is `whole`: it also has the history. `/pullfill/ui/events` sends them as JSON.

Times named `at` are seconds since 1970 by the frontend's clock. Other times are seconds (`_s`) or
milliseconds (`_ms`). None: unknown, or not measured.

Requests are those of the frontend that tells. Workers, jobs and the queue are those of the cluster.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from pullfill.wire import ExplainRecord

HISTORY_S = 900.0
"""How far back the history goes."""
STEP_S = 5.0
"""Seconds of one `Point`."""
RECENT = 200
"""Finished requests that a frontend tells of a new viewer."""
FLOWS = 120
"""Most requests under way in one snapshot, the oldest."""
FAILED = "failed"


class Explained(ExplainRecord, frozen=True, kw_only=True):
    """What `pullfill explain --json` and GET /pullfill/requests/ID show: a worker's record of a
    request, and what its frontend adds.

    path: `unknown` if no worker has told of the request, `none` if it was not sent to one.
    state: `running`, `answered`, `failed`, or `cancelled` by its client.
    status: of HTTP. 0: no answer has begun.
    error: what the client was told.
    arrived_at: when it came. 0 in `parts`.
    parts: its other prompts, choices or beams. more_parts: number of those that are not kept.
    same_id: earlier requests that had the same id, the newest first. They have no `parts`."""

    state: str = ""
    status: int = 0
    error: str | None = None
    arrived_at: float = 0.0
    parts: tuple[Explained, ...] = ()
    more_parts: int = 0
    same_id: tuple[Explained, ...] = ()


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


class OpenJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An open prefill job as its decode worker knows it (`jobs` of a worker's `/status?jobs`).

    request_id: of the request at the decode worker.
    state: `JobState` of decode_worker/ledger_types.py.
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


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker now.

    kv: share of its KV blocks in use, 0 to 1.
    running, waiting: requests (decode), or jobs (prefill).
    tokens_per_s: of a decode worker: tokens of answers of this frontend. Of a prefill worker: how
    fast it computes prompts.
    backlog_s, pressure: see `cluster_status.Demand`.
    load: all it tells of its load that is a number or a text."""

    instance_id: str
    role: str
    state: str
    model: str = ""
    host: str = ""
    pid: int = 0
    restarts: int = 0
    kv: float | None = None
    running: int | None = None
    waiting: int | None = None
    tokens_per_s: float | None = None
    backlog_s: float | None = None
    pressure: float | None = None
    troubles: tuple[str, ...] = ()
    load: dict[str, Any] = {}


class WorkerPoint(msgspec.Struct, frozen=True, array_like=True):
    """A worker at one point of the history: its figures as in `WorkerRow`."""

    kv: float | None = None
    running: int | None = None
    waiting: int | None = None
    tokens_per_s: float | None = None


class Point(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """STEP_S seconds of the history, or the part of them that is over.

    at: when they began. seconds: how many are over.
    done: requests that ended. good: those of them within their targets.
    tokens_per_s: tokens of answers.
    ttft_ms, itl_ms: median and 95th percentile of the requests that ended.
    decisions: how often each `path reason` was decided, of those.
    backlog_s: seconds of work in the queue. None: nobody looked."""

    at: float
    seconds: float = STEP_S
    done: int = 0
    good: int = 0
    tokens_per_s: float = 0.0
    ttft_ms: tuple[float, float] | None = None
    itl_ms: tuple[float, float] | None = None
    decisions: dict[str, int] = {}
    backlog_s: float | None = None
    workers: dict[str, WorkerPoint] = {}


class Mark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened.

    kind: `outage` (a server did not answer), `drain`, `lost` (a worker did not answer), `joined`,
    `left`, `restarted`.
    until: when it was over. None: it is not over, or has no length."""

    at: float
    kind: str
    who: str
    text: str = ""
    until: float | None = None


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


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """See the module.

    since: when the frontend started. A viewer that reconnects sees by it that this one is new.
    targets_ms: time to first token and between tokens, of requests that name none.
    servers: whether NATS and etcd answer. A text: why not.
    queue: jobs and tokens in the queue. None: unknown.
    flows: requests under way. hidden: how many more there are.
    ended: requests that have ended since the last snapshot, oldest first. Whole: the last ones.
    points: the point of now, and the one before when it has just ended. Whole: the history.
    marks: all of the history."""

    at: float
    frontend: str
    model: str
    since: float
    frontends: int = 1
    whole: bool = False
    draining: bool = False
    targets_ms: tuple[float, float] = (0.0, 0.0)
    servers: dict[str, str] = {}
    queue: tuple[int, int] | None = None
    now: Now = Now()
    workers: tuple[WorkerRow, ...] = ()
    flows: tuple[Flow, ...] = ()
    hidden: int = 0
    ended: tuple[Ended, ...] = ()
    points: tuple[Point, ...] = ()
    marks: tuple[Mark, ...] = ()
