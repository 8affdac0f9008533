"""What is kept in etcd or shown to people: settings, worker records, explain records.

Part of the wire (docs/wire.md); imported through `pullfill.wire`.
"""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta

from pullfill.wire.codec import WIRE_VERSION, Compat, Count, Finite, Id, Message, Text, Version


class RouterPolicy(enum.StrEnum):
    CONDITIONAL = "conditional"
    ALWAYS_LOCAL = "always_local"
    ALWAYS_REMOTE = "always_remote"
    COST = "cost"


class DecodePolicy(enum.StrEnum):
    """How a frontend chooses the decode worker of a request."""

    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    LEAST_LOADED = "least_loaded"
    KV = "kv"
    PACK = "pack"


class RouterConfig(Message, frozen=True, kw_only=True):
    """`config/router`, JSON in etcd, watched by decode workers and frontends (hot)."""

    policy: RouterPolicy = RouterPolicy.COST
    # How frontends choose the decode worker of a request.
    decode_policy: DecodePolicy = DecodePolicy.KV
    # Tokens beyond the prefix hit that are still prefilled locally.
    max_local_prefill_length: Annotated[int, Meta(ge=0)] = 512
    # Jobs waiting in the queue, those in work not counted, above which prefill stays local.
    max_prefill_queue_size: Annotated[int, Meta(ge=0)] = 64
    # Prefill stays local if a job is expected to wait longer in the queue.
    max_queue_wait_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    # Share of the KV cache that open remote prefills may bind.
    max_remote_kv_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.5
    # How long a remote prefill may take before the prompt is prefilled locally. If it is expected
    # to take long, it gets more time.
    remote_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    # How long of that it may wait for a prefill worker to claim it. If it is expected to wait long,
    # it gets more time.
    claim_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    # A prefix is read from another decode worker only if that holds at least so many tokens more.
    # 0: never.
    min_fetch_tokens: Annotated[int, Meta(ge=0)] = 256
    # With the policy `cost`, the targets of requests that name none: time to the first token, and
    # time between two tokens.
    ttft_ms: Annotated[float, Meta(gt=0, le=3.6e6)] = 1000.0
    itl_ms: Annotated[float, Meta(gt=0, le=3.6e6)] = 50.0
    # Jobs whose target for the first token is at most this come first in the queue.
    tight_ttft_ms: Annotated[float, Meta(gt=0, le=3.6e6)] = 500.0
    # Jobs whose target for the first token is at least this come last in the queue.
    loose_ttft_ms: Annotated[float, Meta(gt=0, le=3.6e6)] = 5000.0
    # Share of the requests that a frontend's stock vLLM servers get, if it has any.
    stock_share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    # How long frontends refuse a request at which decode workers died. Long enough to tell people,
    # short enough that a repaired cluster does not refuse for hours.
    refuse_s: Annotated[float, Meta(ge=1, le=86_400)] = 600.0


class QueueSettings(Message, frozen=True, kw_only=True):
    """`config/queue`, JSON in etcd, watched by decode and prefill workers.

    None: not set. Then a new stream gets pullfill's default, and a stream that exists keeps what
    it has."""

    # Servers of a NATS cluster that hold each stream.
    replicas: Annotated[int, Meta(ge=1, le=5)] | None = None
    # Size of the job stream above which a new job is refused.
    max_bytes: Annotated[int, Meta(ge=1)] | None = None
    # Jobs pending and in flight above which a new job is refused.
    max_jobs: Annotated[int, Meta(ge=1)] | None = None
    # Silence of a prefill worker after which NATS delivers its job again.
    ack_wait_s: Annotated[float, Meta(ge=1, le=3600)] | None = None
    # Deliveries of one job, after which it is a dead letter.
    max_deliver: Annotated[int, Meta(ge=1, le=100)] | None = None
    # Silence of NATS after which a decode worker prefills locally.
    publish_timeout_s: Annotated[float, Meta(ge=0.05, le=60)] | None = None


class RegionDescriptor(Message, frozen=True, kw_only=True):
    """One rank's registered KV memory: how a peer finds (layer, block, KV head) bytes.

    Address of the run (layer l, block b, head h) is
    `base_offset + l*layer_stride + b*block_stride + h*head_stride`, `page_bytes` long.
    incarnation: of the memory, new at each start of its process.
    endpoints: transport name -> address understood by that transport.
    first_head, first_layer: where the region's heads and layers are in the whole model, when it is
    split over `world_size` ranks.
    """

    v: Version = WIRE_VERSION
    instance_id: Id
    incarnation: Id
    rank: Count
    world_size: Annotated[int, Meta(ge=1)] = 1
    host_id: Id
    nbytes: Count
    base_offset: Count
    num_layers: Count
    num_blocks: Count
    num_kv_heads: Count
    first_head: Count = 0
    first_layer: Count = 0
    page_bytes: Count
    layer_stride: Count
    block_stride: Count
    head_stride: Count
    endpoints: dict[str, str]


class WorkerState(enum.StrEnum):
    """READY takes work; DRAINING finishes what it has; LOST: its key is gone or it is silent.

    CHECKING: it is compared with the workers of the other role first (decode_worker/self_check.py).
    A decode worker gets no requests meanwhile, and a prefill worker pulls no jobs."""

    CHECKING = "checking"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


class WorkerRecord(Message, frozen=True, kw_only=True):
    """`workers/{role}/{instance_id}`: one process, on its lease."""

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
    started_at: Finite
    # Base URL of the probe server (/live /ready /metrics /status).
    http: str = ""
    # A decode worker's ZMQ address for requests.
    data: str = ""
    # A decode worker's TCP address for claims.
    control: str = ""
    max_model_len: Count = 0
    # How often `pullfill up` has started it again.
    restarts: Count = 0
    # Digest of how it rounds (`engine.compat.rounding_digest`). Empty: it takes part in no
    # self-check.
    computes: Text = ""


class AdapterRecord(Message, frozen=True, kw_only=True):
    """`adapters/{name}`: a LoRA adapter that the cluster serves. It has no lease."""

    v: Version = WIRE_VERSION
    name: Text
    # Where each worker has its files.
    path: Text
    # Digest of these files (`engine.adapters`). Workers refuse other files.
    content: Id
    # vLLM's `is_3d_lora_weight`.
    layout_3d: bool = False
    # Grows with each load of the name, so that workers know the newest one.
    number: Count = 0


# --------------------------------------------------------------------------- suspects


class SuspectRecord(Message, frozen=True, kw_only=True):
    """`suspects/{fingerprint}`: a request that no frontend sends to a decode worker while the key
    lives. deaths: decode workers that died with it.

    until: when the key ends, in seconds since 1970, by the clock of the frontend that wrote it."""

    v: Version = WIRE_VERSION
    fingerprint: Id
    deaths: Count
    prompt_tokens: Count
    until: Finite = 0.0


# --------------------------------------------------------------------------- explain


class Timings(Message, frozen=True, kw_only=True):
    """Milliseconds per stage of one request; None where the stage did not happen."""

    route: Finite | None = None
    queue: Finite | None = None
    claim: Finite | None = None
    prefix_read: Finite | None = None
    fetch: Finite | None = None
    prefill: Finite | None = None
    kv_write: Finite | None = None
    tail: Finite | None = None
    commit: Finite | None = None
    first_token: Finite | None = None


class Expected(Message, frozen=True, kw_only=True):
    """How long one remote prefill was expected to take when the decision was made, in seconds.

    None: it was not measured yet, and the decision counted it as 0."""

    # The wait for a prefill worker.
    queue: Finite | None = None
    prefill: Finite | None = None
    # Most of it happens during the computation.
    kv_write: Finite | None = None
    # How long the job had, or would have had, to be claimed and to be committed, if it made no
    # progress.
    claim_timeout: Finite = 0.0
    timeout: Finite = 0.0


class PredictedMs(Message, frozen=True, kw_only=True):
    """Time to the first token that was predicted at the decision, in milliseconds, by choice."""

    # Computed here. With the policy `cost`: in chunks that spare the running streams.
    local: Finite | None = None
    # Computed by a prefill worker. None: none was measured yet.
    remote: Finite | None = None


class DecodeChoice(Message, frozen=True, kw_only=True):
    """How a frontend has chosen the decode worker of a request."""

    policy: DecodePolicy
    # How much of the prompt the worker held, as far as the frontend knew.
    matched_tokens: Count
    # The cost by which the worker was chosen, in tokens of work. None: by no cost.
    score: Finite | None
    # Why this worker (frontend/routing/choice.py).
    reason: Text


class ForwardStage(Message, frozen=True, kw_only=True):
    """One stage of a request at a stock vLLM server, as tried."""

    # `prefill` or `decode`.
    stage: str
    # Its URL.
    server: str
    # `ok`, or what went wrong.
    result: str
    # Since the request came.
    begin_ms: Finite
    end_ms: Finite
    # How it was chosen.
    choice: DecodeChoice | None = None


class ExplainRecord(Message, frozen=True, kw_only=True):
    """Why and how one request was served (`pullfill explain`, GET /pullfill/requests/{id})."""

    request_id: str
    path: str
    reason: str = ""
    prompt_tokens: int
    prefix_hit_tokens: int = 0
    remote_tokens: int = 0
    decode_instance: str = ""
    prefill_instance: str | None = None
    attempts: int = 0
    fallback: str | None = None
    kv_bytes: int = 0
    # The transport that carried the KV.
    transport: str | None = None
    # "name: reason" for each better transport.
    why_not_better: tuple[str, ...] = ()
    # What was unreachable, and for how long, when the prompt was kept local or taken back. Or the
    # result of the self-check that kept it local.
    outage: str | None = None
    # The times that the decision was made on. Set for remote prefills, and for prompts kept local
    # because of the queue, the link or the share of the KV cache.
    expected_s: Expected | None = None
    timings_ms: Timings = Timings()
    # Decode workers that had the request before and are gone, oldest first. The frontend adds them.
    migrated_from: tuple[str, ...] = ()
    # Tokens of the answer that the client had when the last of them was lost. They are part of
    # `prompt_tokens`, because `decode_instance` got them as prompt.
    migrated_tokens: int = 0
    # How much of `prefix_hit_tokens` came from vLLM's own KV offloading.
    offloaded_tokens: int = 0
    # Those after the hit that were read from decode worker `fetched_from`.
    fetched_tokens: int = 0
    fetched_from: str | None = None
    # What came of the hint that it holds them.
    fetch: str | None = None
    # What the policy `cost` chose: `remote` or `local`.
    choice: str | None = None
    # What it expected.
    predicted_ms: PredictedMs | None = None
    # What it was, measured like the predictions: from the decision to the first token, at the
    # decode worker.
    outcome_ms: Finite | None = None
    # How much sooner the best of the other choices was expected. None: unknown.
    regret_ms: Finite | None = None
    # How the frontend has chosen `decode_instance`.
    decode_choice: DecodeChoice | None = None
    # What stock vLLM servers did, if a forwarder served the request. Then `path` is the forwarder,
    # and the instances are URLs.
    stages: tuple[ForwardStage, ...] = ()


class QueueStatus(Message, frozen=True, kw_only=True):
    """The job queue in figures.

    oldest_age_s: 0 when the queue is empty.
    age_s: how old these figures are."""

    depth_jobs: int = 0
    depth_tokens: int = 0
    in_flight: int = 0
    oldest_age_s: Finite = 0.0
    age_s: Finite = 0.0


class ServerStatus(Message, frozen=True, kw_only=True):
    """Whether NATS or etcd answers.

    since_s: seconds since it last came up or went down.
    error: why it does not answer, with its address, for people. None while it is up."""

    up: bool
    since_s: Finite
    error: str | None = None


class SelfCheck(Message, frozen=True, kw_only=True):
    """`self_checks/{pair}`: whether remote prefills of two kinds of workers equal local ones."""

    v: Version = WIRE_VERSION
    passed: bool
    # Largest relative difference of the KV of one block in one layer. None: this KV cache type
    # cannot be read as numbers.
    kv_difference: Finite | None
    # What rounding explains.
    kv_tolerance: Finite
    # Largest difference of a log probability of the next token. None: the KV was compared.
    logprob_difference: Finite | None
    # What rounding explains.
    logprob_tolerance: Finite
    decode_instance: Id
    prefill_instance: Id

    @property
    def word(self) -> str:
        return "passed" if self.passed else "failed"

    def advice(self, prefill_instance: str = "", decode_instance: str = "") -> str:
        """What a failure means and what to do. The instances: those that meet now, where they are
        not those that were compared."""
        prefill = prefill_instance or self.prefill_instance
        decode = decode_instance or self.decode_instance
        return (
            f"self_check_failed: a remote prefill by {prefill} is not what {decode} computes "
            f"itself: {self.in_words()}. It brings no KV. Compare versions and flags of the two "
            "workers, then run `pullfill recheck`"
        )

    def in_words(self) -> str:
        """The differences and their tolerances."""
        told = [
            f"{what} differ{s} by {value:.3g} (rounding explains {most:g})"
            for what, s, value, most in (
                ("KV", "s", self.kv_difference, self.kv_tolerance),
                ("log probabilities", "", self.logprob_difference, self.logprob_tolerance),
            )
            if value is not None
        ]
        return ", ".join(told) or "nothing could be compared"
