"""The frontend's own `pullfill_frontend_*` metrics. The workers' metrics are merged in by
`cluster_view.MergedMetrics`. This process does not import `pullfill.runtime.metrics`, so it never
exports zeroes under their names."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

MIGRATED = Counter(
    "pullfill_frontend_migrated",
    "Answers that left their decode worker before their end, by what became of them: sent (to "
    "another decode worker), not_exact, no_worker, given_up, refused, failed",
    ["result"],
)
FAILED = Counter(
    "pullfill_frontend_failed", "Requests ended because no decode worker could finish them"
)
SUSPECTS = Counter(
    "pullfill_suspect",
    "Requests that may have killed a decode worker: suspected (in flight at a death), convicted "
    "(such requests are refused from then on), refused (requests with such a fingerprint)",
    ["result"],
)
REFUSED = Counter(
    "pullfill_frontend_refused", "HTTP requests refused before any work was done", ["reason"]
)
AUTH_REFUSED = Counter(
    "pullfill_frontend_auth_refused", "HTTP requests without the right key", ["status"]
)
DECODE_WORKERS = Gauge(
    "pullfill_frontend_decode_workers", "Decode workers by connection", ["state"]
)
DECODE_CHOICE = Counter(
    "pullfill_decode_choice",
    "Choices of a decode worker for a request, by policy and by why that worker was chosen",
    ["policy", "reason"],
)
IN_FLIGHT = Gauge("pullfill_frontend_in_flight", "Engine requests submitted and not ended")
PREFIX_BLOCKS = Gauge(
    "pullfill_prefix_index_blocks", "Different blocks that decode workers hold, as far as known"
)
PREFIX_GAPS = Counter(
    "pullfill_prefix_gaps",
    "What was healed in the index of blocks: gaps (events were missing), snapshots, differences "
    "(all events came, yet the blocks differed)",
    ["what"],
)
PREFIX_MISSING = Gauge(
    "pullfill_prefix_missing_workers", "Decode workers whose cached blocks are not known"
)
STOCK_SERVERS = Gauge("pullfill_stock_servers", "Known stock vLLM servers", ["role", "state"])
WORKERS_NEEDED = Gauge(
    "pullfill_workers_needed",
    "Workers that are right for the load, as `pullfill plan` says",
    ["kind"],
)
