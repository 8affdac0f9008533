"""Every struct that crosses a process boundary, in one place (docs/wire.md describes each).

Encoding is msgpack through msgspec: strict types, unknown fields refused, no pickle.
Each top-level message carries `v`; a reader refuses another version with `BadMessage`.
Sizes are bytes, times are seconds unless the name ends in `_ms`. Durations are relative:
clocks of two hosts are never compared.
"""

from __future__ import annotations

import enum
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from pullfill.errors import BadMessage

WIRE_VERSION = 1
ALIVE_INTERVAL_S = 1.0
SILENT_S = 5.0

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Count = Annotated[int, Meta(ge=0)]
Id = Annotated[str, Meta(min_length=1, max_length=128)]
MAX_TEXT = 2048
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Version = Annotated[int, Meta(ge=WIRE_VERSION, le=WIRE_VERSION)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all wire structs."""


T = TypeVar("T")


def encode(message: msgspec.Struct) -> bytes:
    """msgpack bytes of `message`."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Strictly decode `data` as `kind`. Raises BadMessage (never a msgspec error)."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise BadMessage(f"not a valid {getattr(kind, '__name__', kind)}: {exc}") from exc


# --------------------------------------------------------------------------- compatibility


class Compat(Message, frozen=True, kw_only=True):
    """What two workers must share to exchange KV bytes. Compared field by field at join."""

    model: str
    model_fingerprint: str
    vllm: str
    dtype: str
    kv_cache_dtype: str
    block_size: Count
    layout: str
    num_layers: Count
    num_kv_heads: Count
    page_bytes: Count
    isa: str

    def hash(self) -> str:
        """16 hex digits over all fields; names the job stream."""
        import hashlib

        return hashlib.blake2b(msgspec.json.encode(self), digest_size=8).hexdigest()

    def differs_from(self, other: Compat) -> list[tuple[str, object, object]]:
        """(field, ours, theirs) for each field that differs."""
        return [
            (name, getattr(self, name), getattr(other, name))
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]


# --------------------------------------------------------------------------- the job


class PrefillJob(Message, frozen=True, kw_only=True):
    """One remote prefill, as published on the job stream.

    token_ids: the prompt tokens whose KV is wanted, raw little-endian u32.
    hit_tokens: leading tokens whose KV the decode worker already holds (a block multiple).
    block_ids: decode-side blocks of all `token_ids` (hit blocks first), raw little-endian u32.
    timeout_s: how long from publish the decode worker waits before it serves locally.
    """

    v: Version = WIRE_VERSION
    job_id: Id
    incarnation: Id
    decode_instance: Id
    control: Id
    request_id: Text
    compat: Id
    token_ids: bytes
    hit_tokens: Count
    block_ids: bytes
    block_size: Annotated[int, Meta(ge=1)]
    cache_salt: Text | None = None
    priority: int = 0
    timeout_s: Annotated[float, Meta(gt=0)]


# --------------------------------------------------------------------------- control channel


class RefuseReason(enum.StrEnum):
    """Why a claim got no grant."""

    UNKNOWN_JOB = "unknown_job"
    STALE_INCARNATION = "stale_incarnation"
    COMMITTED = "committed"
    CLOSED = "closed"
    HELD = "held"
    """Another attempt holds it or its blocks are quarantined: retry after `retry_after_s`."""
    DRAINING = "draining"
    INCOMPATIBLE = "incompatible"


class FenceToken(Message, frozen=True, kw_only=True):
    """The right to touch a grant's blocks: valid while slot `slot` holds `epoch`."""

    slot: Count
    epoch: Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Hello(Message, tag="hello", frozen=True, kw_only=True):
    """First message of a prefill worker on a control connection."""

    v: Version = WIRE_VERSION
    prefill_instance: Id
    host_id: Id
    compat: Id
    transports: list[str]


class Welcome(Message, tag="welcome", frozen=True, kw_only=True):
    """The decode worker accepts the connection."""

    v: Version = WIRE_VERSION
    decode_instance: Id
    incarnation: Id


class Goodbye(Message, tag="goodbye", frozen=True, kw_only=True):
    """The decode worker refuses the connection; `reason` is for people."""

    reason: Text


class Claim(Message, tag="claim", frozen=True, kw_only=True):
    """Ask for a grant. `ack_subject` lets the decode worker hand the delivery back to the
    queue at once (a NAK on the worker's behalf) if this worker dies."""

    rid: Count
    job_id: Id
    incarnation: Id
    delivery: Count
    ack_subject: Text = ""


class Grant(Message, tag="grant", frozen=True, kw_only=True):
    """The right to write `block_ids[hit_tokens // block_size:]` and to read the ones before,
    for at most `deadline_s` from receipt, while `fence` is valid."""

    rid: Count
    job_id: Id
    attempt: Annotated[int, Meta(ge=1)]
    incarnation: Id
    deadline_s: float
    block_ids: bytes
    hit_tokens: Count
    job_digest: bytes
    fence: FenceToken


class Refused(Message, tag="refused", frozen=True, kw_only=True):
    """No grant. `retry_after_s` None: settle the job (ack); it needs nobody any more."""

    rid: Count
    job_id: Id
    reason: RefuseReason
    retry_after_s: float | None = None


class StageTimings(Message, frozen=True, kw_only=True):
    """What the prefill worker measured for one attempt, milliseconds."""

    queue_ms: float = 0.0
    claim_ms: float = 0.0
    prefix_read_ms: float = 0.0
    prefill_ms: float = 0.0
    kv_write_ms: float = 0.0


class Commit(Message, tag="commit", frozen=True, kw_only=True):
    """All writes of attempt are in decode memory. `parts`: (rank × chunk) writes done;
    `blocks`: blocks written; `digest`: of the written bytes, if digests are on."""

    rid: Count
    job_id: Id
    attempt: Count
    incarnation: Id
    parts: Count
    blocks: Count
    kv_bytes: Count
    prefix_read_bytes: Count = 0
    timings: StageTimings
    digest: bytes | None = None


class CommitReply(Message, tag="commit_reply", frozen=True, kw_only=True):
    """ok False: the attempt was not current any more; its bytes will not be used."""

    rid: Count
    job_id: Id
    ok: bool
    reason: Text = ""


class HandBack(Message, tag="hand_back", frozen=True, kw_only=True):
    """The prefill worker gives the attempt up and promises that its writer is quiet.
    retry: whether another attempt may succeed."""

    job_id: Id
    attempt: Count
    incarnation: Id
    cause: Text
    retry: bool


class Revoke(Message, tag="revoke", frozen=True, kw_only=True):
    """Stop working on the attempt: abort, then answer `Quiet`."""

    job_id: Id
    attempt: Count
    incarnation: Id
    reason: Text


class Quiet(Message, tag="quiet", frozen=True, kw_only=True):
    """Drain-ack: no byte of the attempt can land any more."""

    job_id: Id
    attempt: Count
    incarnation: Id


class Leaving(Message, tag="leaving", frozen=True, kw_only=True):
    """The prefill worker drains: it pulls no more jobs, and finishes those it was granted."""


class Alive(Message, tag="alive", frozen=True, kw_only=True):
    """Sent every ALIVE_INTERVAL_S: the process runs. Silent for SILENT_S, it is treated as gone."""


ToDecode = Hello | Claim | Commit | HandBack | Quiet | Leaving | Alive
ToPrefill = Welcome | Goodbye | Grant | Refused | CommitReply | Revoke


# --------------------------------------------------------------------------- registry records


class RegionDescriptor(Message, frozen=True, kw_only=True):
    """One rank's registered KV memory: how a peer finds (layer, block, KV head) bytes.

    Address of the run (layer l, block b, head h) is
    `base_offset + l*layer_stride + b*block_stride + h*head_stride`, `page_bytes` long.
    endpoints: transport name -> address understood by that transport.
    epoch: changes whenever the pages behind the region change.
    """

    v: Version = WIRE_VERSION
    instance_id: Id
    incarnation: Id
    rank: Count
    world_size: Annotated[int, Meta(ge=1)] = 1
    host_id: Id
    epoch: Count
    nbytes: Count
    base_offset: Count
    num_layers: Count
    num_blocks: Count
    num_kv_heads: Count
    block_size: Count
    page_bytes: Count
    layer_stride: Count
    block_stride: Count
    head_stride: Count
    compat: Compat
    endpoints: dict[str, str]


class WorkerState(enum.StrEnum):
    """READY takes work; DRAINING finishes what it has; LOST: its key is gone or it is silent."""

    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


class WorkerRecord(Message, frozen=True, kw_only=True):
    """`workers/{role}/{instance_id}`: one process, on its lease.

    data: ZMQ address for requests (decode); control: TCP address for claims (decode);
    http: base URL of the probe server (/live /ready /metrics /status).
    """

    v: Version = WIRE_VERSION
    instance_id: Id
    incarnation: Id
    role: str
    state: WorkerState
    model: str
    model_path: str = ""
    compat: Compat | None = None
    host: str
    host_id: Id
    pid: Count
    started_at: float
    http: str = ""
    data: str = ""
    control: str = ""
    max_model_len: Count = 0
    world_size: Count = 1
    version: str = ""


# --------------------------------------------------------------------------- router settings


class RouterPolicy(enum.StrEnum):
    CONDITIONAL = "conditional"
    ALWAYS_LOCAL = "always_local"
    ALWAYS_REMOTE = "always_remote"


class RouterConfig(Message, frozen=True, kw_only=True):
    """`config/router`, JSON in etcd, watched by decode workers (hot).

    max_local_prefill_length: tokens beyond the prefix hit that are still prefilled locally.
    max_prefill_queue_size: jobs waiting in the queue above which prefill stays local.
    remote_timeout_s: how long a remote prefill may take before it is done locally.
    """

    policy: RouterPolicy = RouterPolicy.CONDITIONAL
    max_local_prefill_length: Annotated[int, Meta(ge=0)] = 512
    max_prefill_queue_size: Annotated[int, Meta(ge=0)] = 64
    remote_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0


# --------------------------------------------------------------------------- explain


class Timings(Message, frozen=True, kw_only=True):
    """Milliseconds per stage of one request; None where the stage did not happen."""

    route: float | None = None
    queue: float | None = None
    claim: float | None = None
    prefix_read: float | None = None
    prefill: float | None = None
    kv_write: float | None = None
    commit: float | None = None
    first_token: float | None = None


class ExplainRecord(Message, frozen=True, kw_only=True):
    """Why and how one request was served (`pullfill explain`, GET /pullfill/requests/{id})."""

    request_id: str
    path: str
    reason: str
    prompt_tokens: int
    prefix_hit_tokens: int
    remote_tokens: int
    decode_instance: str
    prefill_instance: str | None = None
    attempts: int = 0
    fallback: str | None = None
    kv_bytes: int = 0
    timings_ms: Timings = Timings()


class QueueStatus(Message, frozen=True, kw_only=True):
    """The job queue as one number each; `oldest_age_s` 0 when empty."""

    depth_jobs: int = 0
    depth_tokens: int = 0
    in_flight: int = 0
    oldest_age_s: float = 0.0
