"""The settings in etcd that `pullfill config` writes and running processes follow.

Part of the wire (docs/wire.md); imported through `pullfill.wire`.
"""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta

from pullfill.wire.codec import Message


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


class RouterConfig(Message, frozen=True, kw_only=True):
    """`config/router`, JSON in etcd, watched by decode workers and frontends (hot).

    decode_policy: how frontends choose the decode worker of a request.
    max_local_prefill_length: tokens beyond the prefix hit that are still prefilled locally.
    max_prefill_queue_size: jobs waiting in the queue, those in work not counted, above which
    prefill stays local.
    max_queue_wait_s: prefill stays local if a job is expected to wait longer in the queue.
    max_remote_kv_fraction: share of the KV cache that open remote prefills may bind.
    remote_timeout_s: how long a remote prefill may take before the prompt is prefilled locally. If
    it is expected to take long, it gets more time.
    claim_timeout_s: how long of that it may wait for a prefill worker to claim it. If it is
    expected to wait long, it gets more time.
    min_fetch_tokens: a prefix is read from another decode worker only if that holds at least so
    many tokens more. 0: never.
    ttft_ms, itl_ms: with the policy `cost`, the targets of requests that name none: time to the
    first token, and time between two tokens.
    hedge: as long as no prefill worker has claimed a prompt, the decode worker may compute it. It
    does so as soon as that is needed to meet the target for the first token.
    tight_ttft_ms: jobs whose target for the first token is at most this come first in the queue.
    loose_ttft_ms: jobs whose target for the first token is at least this come last in the queue.
    stock_share: share of the requests that a frontend's stock vLLM servers get, if it has any.
    """

    policy: RouterPolicy = RouterPolicy.CONDITIONAL
    decode_policy: DecodePolicy = DecodePolicy.KV
    max_local_prefill_length: Annotated[int, Meta(ge=0)] = 512
    max_prefill_queue_size: Annotated[int, Meta(ge=0)] = 64
    max_queue_wait_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    max_remote_kv_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.5
    remote_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    claim_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    min_fetch_tokens: Annotated[int, Meta(ge=0)] = 256
    ttft_ms: Annotated[float, Meta(gt=0, le=3.6e6)] = 1000.0
    itl_ms: Annotated[float, Meta(gt=0, le=3.6e6)] = 50.0
    hedge: bool = False
    tight_ttft_ms: Annotated[float, Meta(gt=0, le=3.6e6)] = 500.0
    loose_ttft_ms: Annotated[float, Meta(gt=0, le=3.6e6)] = 5000.0
    stock_share: Annotated[float, Meta(ge=0, le=1)] = 1.0


class QueueSettings(Message, frozen=True, kw_only=True):
    """`config/queue`, JSON in etcd, watched by decode and prefill workers.

    None: not set. Then a new stream gets pullfill's default, and a stream that exists keeps what
    it has.

    replicas: servers of a NATS cluster that hold each stream.
    max_bytes: size of the job stream above which a new job is refused.
    max_jobs: jobs pending and in flight above which a new job is refused.
    ack_wait_s: silence of a prefill worker after which NATS delivers its job again.
    max_deliver: deliveries of one job, after which it is a dead letter.
    publish_timeout_s: silence of NATS after which a decode worker prefills locally.
    """

    replicas: Annotated[int, Meta(ge=1, le=5)] | None = None
    max_bytes: Annotated[int, Meta(ge=1)] | None = None
    max_jobs: Annotated[int, Meta(ge=1)] | None = None
    ack_wait_s: Annotated[float, Meta(ge=1, le=3600)] | None = None
    max_deliver: Annotated[int, Meta(ge=1, le=100)] | None = None
    publish_timeout_s: Annotated[float, Meta(ge=0.05, le=60)] | None = None
