"""The `pullfill_*` metrics of workers. No request, job or instance id is a label here.

The frontend adds `instance_id` and `role` when it merges what workers report."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from pullfill.runtime.health import UP as UP

_STAGE_BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip

RESTARTS = Gauge("pullfill_restarts", "How often `pullfill up` has started this worker again")
DECISION = Counter(
    "pullfill_decision", "Requests by where their prompt was prefilled and why", ["path", "reason"]
)
QUEUE_DEPTH_JOBS = Gauge("pullfill_queue_depth_jobs", "Prefill jobs pending or in flight")
QUEUE_DEPTH_TOKENS = Gauge("pullfill_queue_depth_tokens", "Prompt tokens pending or in flight")
QUEUE_OLDEST_AGE = Gauge("pullfill_queue_oldest_age_seconds", "Age of the oldest unsettled job")
HANDOFF_STAGE = Histogram(
    "pullfill_handoff_stage_seconds",
    "Time per stage of a remote prefill",
    ["stage"],
    buckets=_STAGE_BUCKETS,
)
CLAIM = Counter("pullfill_claim", "Claims by result", ["result"])
KV_WRITE_BYTES = Counter("pullfill_kv_write_bytes", "KV bytes written one-sided", ["transport"])
KV_WRITE_SECONDS = Histogram(
    "pullfill_kv_write_seconds",
    "Time of one write of finished blocks into decode memory",
    ["transport"],
    buckets=_STAGE_BUCKETS,
)
KV_READ_BYTES = Counter(
    "pullfill_kv_read_bytes", "KV bytes read one-sided: prefixes, and prompts in pull mode",
    ["transport"],
)  # fmt: skip
KV_READ_SECONDS = Histogram(
    "pullfill_kv_read_seconds",
    "Time of one read of blocks out of another worker's memory",
    ["transport"],
    buckets=_STAGE_BUCKETS,
)
PREFIX_FETCH = Counter(
    "pullfill_prefix_fetch",
    "Prompts whose prefix another decode worker holds, by what came of reading it from there",
    ["outcome"],
)
KV_OFFLOAD_BYTES = Counter(
    "pullfill_kv_offload_bytes", "KV bytes copied by vLLM's own KV offloading", ["direction"]
)
KV_OFFLOAD_TOKENS = Counter(
    "pullfill_kv_offload_tokens", "Prompt tokens whose KV came from vLLM's own KV offloading"
)
KV_CREDITS = Gauge(
    "pullfill_kv_credits_bytes",
    "KV computed for a decode worker and not yet in its memory: limit for each, used by the one "
    "that has most, and by all together",
    ["what"],
)
KV_CONNECTIONS = Gauge(
    "pullfill_kv_connections", "Connections of other workers to this worker's KV port"
)
KV_REFUSED = Counter(
    "pullfill_kv_connections_refused", "KV connections refused because a limit was reached", ["why"]
)
QUARANTINED_BLOCKS = Gauge(
    "pullfill_quarantined_blocks", "Blocks held until a revoked writer is proved quiet"
)
STALE_REFUSED = Counter(
    "pullfill_stale_refused", "Stale claims, commits, reads and writes refused", ["what"]
)
AUTH_REFUSED = Counter(
    "pullfill_auth_refused", "Peers that did not show the right cluster key", ["link"]
)
FALLBACK = Counter("pullfill_fallback", "Remote prefills served locally instead", ["cause"])
DEAD_LETTER = Counter("pullfill_dead_letter", "Jobs moved to the dead-letter record")
SELF_CHECK = Counter(
    "pullfill_self_check",
    "Comparisons of a remote with a local prefill, made when two workers met",
    ["result"],
)
BACKLOG_SECONDS = Gauge(
    "pullfill_backlog_seconds",
    "Seconds that the prefill workers need for the open jobs of this decode worker. If none is "
    "connected: that one would need for the prompts of the last 30 s that wanted one",
)
PREFILL_DEMAND = Gauge(
    "pullfill_prefill_demand",
    "Prefill workers that the prompts of this decode worker kept busy in the last 30 s",
)
DECODE_PRESSURE = Gauge(
    "pullfill_decode_pressure",
    "How full this decode worker is: ITL, short prompts, KV blocks or number of requests. 1: full",
)
