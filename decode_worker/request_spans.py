"""The spans of one request at a decode worker.

    decode.request            from the decision, or the read before it, to the last token
      decode.prefix_fetch     the read of a prefix from another decode worker
      decode.remote_prefill   from the decision until vLLM knows how the remote prefill has ended
        queue.wait            one for each attempt: from the decision to its claim
        prefill.attempt       the prefill worker's
        decode.commit         from the commit until vLLM schedules the request

They are made at the moments at which `RequestTraces` notes what happened, under its lock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from pullfill.decode_worker.prefix_fetch import Fetch, FetchOutcome
from pullfill.runtime import tracing
from pullfill.runtime.tracing import PARENT, Context
from pullfill.wire import ExplainRecord


@dataclass(slots=True)
class RequestSpans:
    """Times are those of `time.monotonic`.

    above: the span above all of these. request, remote: `decode.request`, `decode.remote_prefill`.
    began: when the decision was made. committed_at: when the KV was committed. 0: not yet.
    remote_ended: whether `decode.remote_prefill` was recorded.
    fetch_began: when the worker began to read a prefix from another decode worker. That may be
    before the decision. inf: it read none."""

    above: Context
    request: Context
    remote: Context
    request_id: str
    began: float
    committed_at: float = 0.0
    remote_ended: bool = False
    fetch_began: float = math.inf

    def claimed(self, attempt: int, instance: str) -> None:
        """Note the claim of an attempt."""
        tracing.record(
            "queue.wait",
            self.remote.child(),
            self.remote,
            self.began,
            time.monotonic(),
            {"pullfill.attempt": attempt, "pullfill.prefill_instance": instance},
            kind="PRODUCER",
        )

    def committed(self) -> None:
        """Note that the KV is there."""
        self.committed_at = time.monotonic()

    def settled(self, loaded: bool, outcome: str, attempts: int) -> None:
        """Note that vLLM knows how the remote prefill has ended."""
        self.remote_ended = True
        now = time.monotonic()
        if loaded and self.committed_at:
            tracing.record(
                "decode.commit", self.remote.child(), self.remote, self.committed_at, now, {}
            )
        tracing.record(
            "decode.remote_prefill",
            self.remote,
            self.request,
            self.began,
            now,
            {"pullfill.outcome": outcome, "pullfill.attempts": attempts},
            error="" if loaded else outcome,
        )

    def fetched(self, fetch: Fetch) -> None:
        """Note how the read of a prefix has just ended."""
        now, outcome = time.monotonic(), fetch.outcome.value
        self.fetch_began = now - fetch.seconds
        tracing.record(
            "decode.prefix_fetch",
            self.request.child(),
            self.request,
            self.fetch_began,
            now,
            {
                "pullfill.fetched_from": fetch.at.instance_id,
                "pullfill.outcome": outcome,
                "pullfill.kv_bytes": fetch.kv_bytes,
            },
            error="" if fetch.outcome is FetchOutcome.FETCHED else outcome,
            kind="CLIENT",
        )

    def finished(self, record: ExplainRecord) -> None:
        """Note that the request is over here."""
        tracing.record(
            "decode.request",
            self.request,
            self.above,
            min(self.began, self.fetch_began),
            time.monotonic(),
            {
                "gen_ai.request.id": self.request_id,
                "gen_ai.usage.prompt_tokens": record.prompt_tokens,
                "pullfill.path": record.path,
                "pullfill.reason": record.reason,
                "pullfill.prefix_hit_tokens": record.prefix_hit_tokens,
                "pullfill.fetched_tokens": record.fetched_tokens,
                "pullfill.remote_tokens": record.remote_tokens,
                "pullfill.prefill_instance": record.prefill_instance,
                "pullfill.transport": record.transport,
                "pullfill.kv_bytes": record.kv_bytes,
                "pullfill.fallback": record.fallback,
                "pullfill.outage": record.outage,
            },
            kind="SERVER",
        )


def begin(headers: Mapping[str, str] | None, request_id: str) -> RequestSpans | None:
    """Return the spans of a request that is decided about now. None: it is not traced.

    headers: its trace headers, which the frontend has set."""
    above = tracing.read(headers.get(PARENT)) if headers else None
    if above is None:
        return None
    request = above.child()
    return RequestSpans(above, request, request.child(), request_id, time.monotonic())
