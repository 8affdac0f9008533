"""What happened to each request, for `pullfill explain` and the counters.

Written from the engine thread (decision, settlement, finish) and the asyncio thread (claim,
commit); every record is touched under one lock for microseconds. A record lives from decision to
`finish`, which hands it to the frontend.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.decode_worker import request_spans
from pullfill.decode_worker.conditional_router import (
    CLAIMS_STALLED,
    NO_PREFILL_WORKER,
    QUEUE_UNAVAILABLE,
    SELF_CHECK_FAILED,
    SELF_CHECK_PENDING,
    Decision,
    Situation,
)
from pullfill.decode_worker.prefix_fetch import Fetch, FetchOutcome
from pullfill.decode_worker.request_spans import RequestSpans
from pullfill.errors import Outcome
from pullfill.runtime import metrics
from pullfill.wire import Expected, ExplainRecord, PredictedMs, StageTimings, Timings

_BY_OUTAGE = frozenset(
    {
        CLAIMS_STALLED,
        NO_PREFILL_WORKER,
        QUEUE_UNAVAILABLE,
        SELF_CHECK_FAILED,
        SELF_CHECK_PENDING,
    }
)
_AFTER_OUTAGE = frozenset(Outcome) - {
    Outcome.COMMITTED,
    Outcome.CANCELLED,
    Outcome.QUEUE_FULL,
    Outcome.REJECTED,
}

_OUTAGE_FRESH_S = 0.05

_observe = metrics.HANDOFF_STAGE.observe
"""Stages `claim` to `tail` are observed on the asyncio thread, `commit` on the engine thread."""


@cache
def _decision(path: str, reason: str) -> Any:
    """Return the counter of a decision, cached. Both labels have few values."""
    return metrics.DECISION.labels(path, reason)


@dataclass(frozen=True, slots=True)
class Measured:
    """A remote prefill that was committed. at: when, by the clock of the traces."""

    request_id: str
    instance: str
    transport: str
    stages: StageTimings
    kv_bytes: int
    at: float


@dataclass(slots=True)
class _RequestTrace:
    situation: Situation
    decision: Decision
    expected: Expected | None = None
    offloaded: int = 0
    attempts: int = 0
    fallback: str | None = None
    outage: str | None = None
    loaded: bool = False
    prefill_instance: str | None = None
    kv_bytes: int = 0
    transport: str | None = None
    why_not_better: tuple[str, ...] = ()
    queue_ms: float | None = None
    commit_ms: float | None = None
    committed_at: float | None = None
    stages: StageTimings | None = None
    choice: str | None = None
    predicted: PredictedMs | None = None
    outcome_ms: float | None = None
    regret_ms: float | None = None
    planned_fetch: int = 0
    fetched: int = 0
    fetched_from: str | None = None
    fetch: str | None = None
    fetch_ms: float | None = None
    again: bool = False
    spans: RequestSpans | None = None

    @property
    def trace_id(self) -> str:
        """For exemplars. Empty: the request is not traced."""
        return "" if self.spans is None else self.spans.request.trace


class RequestTraces:
    """All requests of this worker that were decided and are not finished.

    outage: returns what is unreachable now, for people. Empty: nothing. Set by the process.
    measured: is told of each commit, for later predictions. asyncio thread.
    apart: requests of the self-check. They are not recorded and not counted. By request id: a
    function that is called when the remote prefill is settled, with whether the KV was loaded.
    """

    def __init__(self, instance_id: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._instance_id = instance_id
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[str, _RequestTrace] = {}
        self.outage: Callable[[], str] = lambda: ""
        self._outages: dict[str, tuple[str, float]] = {}
        self.measured: Callable[[Measured], None] = lambda _: None
        self.apart: dict[str, Callable[[bool], None]] = {}

    def decided(
        self,
        request_id: str,
        situation: Situation,
        decision: Decision,
        expected: Expected | None = None,
        offloaded: int = 0,
        fetched: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Record the first decision of a request; later ones (after a fallback or a preemption)
        do not change it. The one after a failed fetch does.

        offloaded: how many tokens of the hit come from vLLM's own KV offloading.
        fetched: how many will be read from another decode worker.
        headers: the request's trace headers."""
        with self._lock:
            before = self._open.get(request_id)
            if request_id in self.apart or (before is not None and not before.again):
                return
            self._open[request_id] = trace = _RequestTrace(situation, decision, expected, offloaded)
            trace.planned_fetch = fetched
            if before is not None:  # counted already
                trace.fetched_from, trace.fetch = before.fetched_from, before.fetch
                trace.fetch_ms, trace.spans = before.fetch_ms, before.spans
            else:
                trace.spans = request_spans.begin(headers, request_id)
            if decision.reason in _BY_OUTAGE:
                trace.outage = self._outage_now(decision.reason) or None
        if before is None:
            path = "remote" if decision.remote else "local"
            _decision(path, decision.reason).inc()

    def claimed(self, request_id: str, attempt: int, instance: str, queued_s: float) -> None:
        """Note that a prefill worker holds the job now."""
        if request_id in self.apart:
            return
        with self._lock:
            if (trace := self._open.get(request_id)) is not None:
                trace.attempts, trace.prefill_instance = attempt, instance
                trace.queue_ms = queued_s * 1e3
                if trace.spans is not None:
                    trace.spans.claimed(attempt, instance)
        _observe("queue", queued_s, trace.trace_id if trace is not None else "")

    def committed(
        self,
        request_id: str,
        stages: StageTimings,
        kv_bytes: int,
        transport: str = "",
        why_not_better: tuple[str, ...] = (),
    ) -> None:
        """Note that the KV is in our blocks, and what the prefill worker has measured."""
        if request_id in self.apart:
            return
        with self._lock:
            if (trace := self._open.get(request_id)) is not None:
                trace.stages, trace.kv_bytes = stages, kv_bytes
                trace.transport, trace.why_not_better = transport or None, why_not_better
                trace.committed_at = self._clock.monotonic()
                if trace.spans is not None:
                    trace.spans.committed()
        trace_id = trace.trace_id if trace is not None else ""
        _observe("claim", stages.claim_ms / 1e3, trace_id)
        _observe("prefix_read", stages.prefix_read_ms / 1e3, trace_id)
        _observe("prefill", stages.prefill_ms / 1e3, trace_id)
        _observe("kv_write", stages.kv_write_ms / 1e3, trace_id)
        _observe("tail", stages.tail_ms / 1e3, trace_id)
        if trace is not None and (instance := trace.prefill_instance) is not None:
            at = self._clock.monotonic()
            self.measured(Measured(request_id, instance, transport, stages, kv_bytes, at))

    def fetched(self, fetch: Fetch) -> None:
        """Note how a fetch has ended that was begun. Engine thread."""
        with self._lock:
            if (trace := self._open.get(fetch.request_id)) is None:
                return
            trace.fetched_from, trace.fetch = fetch.at.instance_id, fetch.outcome.value
            trace.fetch_ms = fetch.seconds * 1e3
            trace.again = fetch.outcome is not FetchOutcome.FETCHED
            if not trace.again:
                trace.fetched, trace.kv_bytes = trace.planned_fetch, fetch.kv_bytes
                trace.transport = fetch.transport
            if trace.spans is not None:
                trace.spans.fetched(fetch)

    def not_fetched(self, request_id: str, instance_id: str, outcome: FetchOutcome) -> None:
        """Note why a hint that another worker holds more led to no fetch. Engine thread."""
        with self._lock:
            if (trace := self._open.get(request_id)) is not None and trace.fetch is None:
                trace.fetched_from, trace.fetch = instance_id, outcome.value

    def predicted(self, request_id: str, choice: str, predicted: PredictedMs | None) -> None:
        """Note what was expected of the request, and what was chosen."""
        with self._lock:
            if (trace := self._open.get(request_id)) is not None and trace.choice is None:
                trace.choice, trace.predicted = choice, predicted

    def first_token(self, request_id: str, outcome_ms: float, regret_ms: float | None) -> None:
        """Note how long the first token took since the decision."""
        with self._lock:
            if (trace := self._open.get(request_id)) is not None:
                trace.outcome_ms, trace.regret_ms = outcome_ms, regret_ms

    def _outage_now(self, reason: str) -> str:
        """Return what is unreachable. Thousands of requests may ask in one turn of the engine.

        reason: why the prompt stays here. Another reason is often the first sign of an outage."""
        now = self._clock.monotonic()
        said, at = self._outages.get(reason, ("", -math.inf))
        if now - at > _OUTAGE_FRESH_S:
            said = self.outage()
            self._outages[reason] = said, now
        return said

    def settled(self, request_id: str, loaded: bool, outcome: Outcome) -> None:
        """Note that vLLM was told how the remote prefill ended. Engine thread."""
        if (tell := self.apart.get(request_id)) is not None:
            tell(loaded)
            return
        with self._lock:
            trace = self._open.get(request_id)
            if trace is not None and loaded:
                trace.loaded = True
                if trace.committed_at is not None:
                    trace.commit_ms = (self._clock.monotonic() - trace.committed_at) * 1e3
                    _observe("commit", trace.commit_ms / 1e3, trace.trace_id)
            elif trace is not None and outcome is not Outcome.CANCELLED:
                trace.fallback = outcome.value
                if outcome in _AFTER_OUTAGE:
                    trace.outage = self._outage_now(outcome.value) or None
            if trace is not None and trace.spans is not None:
                trace.spans.settled(loaded, outcome.value, trace.attempts)
        if not loaded and outcome is not Outcome.CANCELLED:
            seen = trace is not None and trace.trace_id
            metrics.FALLBACK.labels(outcome.value).inc(1, {"trace_id": seen} if seen else None)

    def header(self, request_id: str) -> str:
        """Return the `traceparent` for those who work on its remote prefill. Empty: none."""
        with self._lock:
            trace = self._open.get(request_id)
            return trace.spans.remote.header if trace is not None and trace.spans else ""

    def fallback_of(self, request_id: str) -> str | None:
        """Return why the request's remote prefill was given up. None: it was not."""
        with self._lock:
            trace = self._open.get(request_id)
            return None if trace is None else trace.fallback

    def offloaded(self, request_id: str) -> int:
        """Return how many tokens of the request's hit came from vLLM's own KV offloading."""
        with self._lock:
            trace = self._open.get(request_id)
            return 0 if trace is None else trace.offloaded

    def finish(self, request_id: str) -> ExplainRecord | None:
        """Close and return the record. None: no decision was made about the request."""
        with self._lock:
            trace = self._open.pop(request_id, None)
        if trace is None:
            return None
        record = self._record(request_id, trace)
        if trace.spans is not None:
            if trace.decision.remote and not trace.spans.remote_ended:
                # Its client has left. Spans of the remote prefill name this one above them.
                trace.spans.settled(False, Outcome.CANCELLED.value, trace.attempts)
            trace.spans.finished(record)
        return record

    def _record(self, request_id: str, trace: _RequestTrace) -> ExplainRecord:
        stages = trace.stages if trace.loaded else None
        came = trace.loaded or trace.fetched > 0
        return ExplainRecord(
            request_id=request_id,
            path="remote" if trace.loaded else "local",
            reason=trace.decision.reason,
            prompt_tokens=trace.situation.prompt_tokens,
            prefix_hit_tokens=trace.situation.hit_tokens - trace.planned_fetch,
            offloaded_tokens=trace.offloaded,
            fetched_tokens=trace.fetched,
            fetched_from=trace.fetched_from,
            fetch=trace.fetch,
            remote_tokens=trace.situation.remote_tokens if trace.loaded else 0,
            decode_instance=self._instance_id,
            prefill_instance=trace.prefill_instance,
            attempts=trace.attempts,
            fallback=trace.fallback,
            outage=trace.outage,
            expected_s=trace.expected,
            choice=trace.choice,
            predicted_ms=trace.predicted,
            outcome_ms=trace.outcome_ms,
            regret_ms=trace.regret_ms,
            kv_bytes=trace.kv_bytes if came else 0,
            transport=trace.transport if came else None,
            why_not_better=trace.why_not_better if trace.loaded else (),
            timings_ms=Timings(
                queue=trace.queue_ms,
                fetch=trace.fetch_ms,
                commit=trace.commit_ms,
                claim=stages.claim_ms if stages else None,
                prefix_read=stages.prefix_read_ms if stages else None,
                prefill=stages.prefill_ms if stages else None,
                kv_write=stages.kv_write_ms if stages else None,
                tail=stages.tail_ms if stages else None,
            ),
        )
