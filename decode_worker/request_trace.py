"""What happened to each request at this decode worker: one record, of which `pullfill explain` and
the spans are views.

Written from the engine thread (decision, settlement, finish) and the asyncio thread (claim,
commit); every record is touched under one lock for microseconds. A record lives from decision to
`finish`, which hands it to the frontend and sends its spans (`_send_spans`).

Clients of stock `vllm serve` need not come through our frontends. The records of their requests
stay here (`keep`): the latest MAX_RECORDS.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

from msgspec.structs import asdict, replace

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.decode_worker.prefix.fetches import Fetch, FetchOutcome
from pullfill.decode_worker.rules import BY_OUTAGE, Decision, Situation, expected
from pullfill.engine import request_limits
from pullfill.engine.requests import end_of, names_of
from pullfill.errors import Outcome
from pullfill.runtime import metrics, tracing
from pullfill.runtime.tracing import PARENT, Context
from pullfill.snapshot import MAX_PARTS, MAX_RECORDS, RECENT, Explained
from pullfill.wire import MAX_TEXT, ExplainRecord, PredictedMs, StageTimings, Timings

# Ends of remote prefills that come from no outage.
_AS_USUAL = frozenset({Outcome.QUEUE_FULL, Outcome.REJECTED})

# Of the parts of one call, the first of these states is that of the whole call.
_STATES = ("running", "failed", "cancelled", "", "answered")

# Fields of the record that are attributes of its span.
_IN_SPAN = (
    "path", "reason", "prefix_hit_tokens", "fetched_tokens", "remote_tokens", "prefill_instance",
    "transport", "kv_bytes", "fallback", "outage",
)  # fmt: skip


@dataclass(slots=True, frozen=True)
class _Spans:
    """The span ids of one request. The job carries the id `remote` to the prefill worker."""

    above: Context  # the frontend's span
    # request, remote: `decode.request`, `decode.remote_prefill`.
    request: Context
    remote: Context

    @classmethod
    def below(cls, headers: Mapping[str, str] | None) -> _Spans | None:
        """headers: trace headers, which the frontend has set. None: it is not traced."""
        above = tracing.read(headers.get(PARENT)) if headers else None
        if above is None:
            return None
        request = above.child()
        return cls(above, request, request.child())


@dataclass(slots=True)
class _RequestTrace:
    """Times (`_at`) are those of the traces' clock."""

    situation: Situation
    decision: Decision
    decided_at: float
    spans: _Spans | None
    # The fields of `ExplainRecord` that are known so far.
    told: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)  # the same, of its `timings_ms`
    # The same as the prefill worker says at its commit. It counts once vLLM has loaded the KV.
    brought: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    planned_fetch: int = 0  # number of tokens that are read from another decode worker
    # When that read ended. Infinite: nothing was read.
    fetched_at: float = math.inf
    fetch_bytes: int = 0  # what it moved
    again: bool = False  # its fetch has failed, so it will be decided about once more
    # Attempt, prefill worker and time of each claim.
    claims: list[tuple[int, str, float]] = field(default_factory=list)
    committed_at: float = 0.0
    ended_at: float = 0.0  # when vLLM was told how the remote prefill had ended
    # How the remote prefill has ended. Empty: not yet.
    outcome: str = ""

    @property
    def loaded(self) -> bool:
        return self.outcome == Outcome.COMMITTED.value

    @property
    def commit_ms(self) -> float:
        """From the commit until vLLM schedules the request."""
        return (self.ended_at - self.committed_at) * 1e3


@dataclass(eq=False, repr=False)
class RequestTraces:
    """All requests of this worker that were decided and are not finished, and what `keep` keeps.

    outage: returns what is unreachable now, for people. Empty: nothing."""

    instance_id: str
    clock: Clock = SYSTEM_CLOCK
    outage: Callable[[], str] = lambda: ""
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _open: dict[str, _RequestTrace] = field(init=False, default_factory=dict)
    _kept: deque[Explained] = field(init=False, default_factory=lambda: deque(maxlen=MAX_RECORDS))

    def decided(
        self,
        request_id: str,
        situation: Situation,
        decision: Decision,
        *,
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
            now, trace = self.clock.monotonic(), self._open.get(request_id)
            if trace is None:
                trace = _RequestTrace(situation, decision, now, _Spans.below(headers))
                self._open[request_id] = trace
                path = "remote" if decision.remote else "local"
                metrics.DECISION.labels(path, decision.reason).inc()
            elif not trace.again:
                return
            trace.situation, trace.decision, trace.decided_at = situation, decision, now
            trace.planned_fetch, trace.again = fetched, False
            trace.told["expected_s"] = expected(situation, decision)
            trace.told["offloaded_tokens"] = offloaded
            if decision.reason in BY_OUTAGE:
                trace.told["outage"] = self.outage() or None

    def claimed(self, request_id: str, attempt: int, instance: str, queued_s: float) -> None:
        """Note that a prefill worker holds the job now."""
        with self._lock:
            if (trace := self._open.get(request_id)) is None:
                return
            trace.claims.append((attempt, instance, self.clock.monotonic()))
            trace.timings["queue"] = queued_s * 1e3
        metrics.HANDOFF_STAGE.labels("queue").observe(queued_s)

    def committed(
        self,
        request_id: str,
        stages: StageTimings,
        kv_bytes: int,
        transport: str,
        why_not_better: tuple[str, ...] = (),
    ) -> None:
        """Note that the KV is in our blocks, and what the prefill worker has measured."""
        with self._lock:
            if (trace := self._open.get(request_id)) is None:
                return
            trace.committed_at = self.clock.monotonic()
            trace.brought = {
                "kv_bytes": kv_bytes,
                "transport": transport or None,
                "why_not_better": why_not_better,
            }
            trace.stages = {
                name.removesuffix("_ms"): value for name, value in asdict(stages).items()
            }
        for stage, ms in trace.stages.items():
            metrics.HANDOFF_STAGE.labels(stage).observe(ms / 1e3)

    def fetched(self, fetch: Fetch) -> None:
        """Note how a fetch has ended that was begun. Engine thread."""
        with self._lock:
            if (trace := self._open.get(fetch.request_id)) is None:
                return
            trace.told |= {"fetched_from": fetch.at.instance_id, "fetch": fetch.outcome.value}
            trace.timings["fetch"] = fetch.seconds * 1e3
            trace.fetched_at, trace.fetch_bytes = self.clock.monotonic(), fetch.kv_bytes
            trace.again = fetch.outcome is not FetchOutcome.FETCHED
            if not trace.again:
                trace.told |= {
                    "fetched_tokens": trace.planned_fetch,
                    "kv_bytes": fetch.kv_bytes,
                    "transport": fetch.transport,
                }

    def not_fetched(self, request_id: str, instance_id: str, outcome: FetchOutcome) -> None:
        """Note why a hint that another worker holds more led to no fetch. Engine thread."""
        with self._lock:
            trace = self._open.get(request_id)
            if trace is not None and "fetch" not in trace.told:
                trace.told |= {"fetched_from": instance_id, "fetch": outcome.value}

    def settled(self, request_id: str, outcome: Outcome) -> None:
        """Note that vLLM was told how the remote prefill ended. Engine thread."""
        with self._lock:
            if (trace := self._open.get(request_id)) is None:
                return
            trace.outcome, trace.ended_at = outcome.value, self.clock.monotonic()
            if trace.loaded:
                metrics.HANDOFF_STAGE.labels("commit").observe(trace.commit_ms / 1e3)
            elif outcome is not Outcome.CANCELLED:
                metrics.FALLBACK.labels(outcome.value).inc()
                trace.told["fallback"] = outcome.value
                if outcome not in _AS_USUAL:
                    trace.told["outage"] = self.outage() or None

    def header(self, request_id: str) -> str:
        """Return the `traceparent` for those who work on its remote prefill. Empty: none."""
        with self._lock:
            trace = self._open.get(request_id)
            return trace.spans.remote.header if trace is not None and trace.spans else ""

    def fallback_of(self, request_id: str) -> str | None:
        """Return why the request's remote prefill was given up. None: it was not."""
        with self._lock:
            trace = self._open.get(request_id)
            return None if trace is None else trace.told.get("fallback")

    def offloaded(self, request_id: str) -> int:
        """Return how many tokens of the request's hit came from vLLM's own KV offloading."""
        with self._lock:
            trace = self._open.get(request_id)
            return 0 if trace is None else trace.told["offloaded_tokens"]

    def finish(self, request_id: str) -> ExplainRecord | None:
        """Close and return the record. None: no decision was made about the request."""
        with self._lock:
            trace = self._open.pop(request_id, None)
        if trace is None:
            return None
        record = self._record(request_id, trace)
        if trace.spans is not None:
            _send_spans(trace, trace.spans, record, self.clock.monotonic())
        return record

    def keep(self, request: Any) -> None:
        """Close the record of a vLLM Request that is over, and keep it. Engine thread."""
        record = self.finish(request.request_id)
        # Clients choose the ids, and vLLM's server takes any length.
        if record is not None and len(request.request_id) <= MAX_TEXT:
            state, came = end_of(request), request.arrival_time
            self._kept.append(Explained.of(
                record, state=state, arrived_at=came,
                answer_ms=1e3 * max(0.0, time.time() - came),
                answer_tokens=request.num_output_tokens,
                targets_ms=request_limits.targets_of(request.sampling_params),
                error="its engine ended it with an error" if state == "failed" else None,
            ))  # fmt: skip

    def ended(self) -> list[Explained]:
        """Return the RECENT that were kept last, the oldest first. Any thread."""
        return list(self._kept)[-RECENT:]

    def find(self, name: str, running: Iterable[Any]) -> Explained | None:
        """Return the newest call with this id. None: none is known.

        Any thread. Takes milliseconds for MAX_RECORDS.

        running: vLLM's Requests that are not over."""
        open_ = [self._so_far(one) for one in running if name in one.request_id]
        kept = [one for one in list(self._kept) if name in one.request_id]
        by_id = {one.request_id: one for one in (*open_, *kept)}
        found = [one for one in by_id.values() if name in names_of(one.request_id)]
        # To vLLM's server the prompts and choices of one call have arrived at the same moment.
        arrived = attrgetter("arrived_at")
        calls = [list(call) for _, call in groupby(sorted(found, key=arrived), key=arrived)]
        return _together(name, *calls[-1]) if calls else None

    def _so_far(self, request: Any) -> Explained:
        name = request.request_id
        with self._lock:
            trace = self._open.get(name)
            record = None if trace is None else self._record(name, trace)
        record = record or ExplainRecord(
            request_id=name, path="unknown", prompt_tokens=request.num_prompt_tokens,
            decode_instance=self.instance_id,
        )  # fmt: skip
        return Explained.of(record, state="running", arrived_at=request.arrival_time)

    def _record(self, request_id: str, trace: _RequestTrace) -> ExplainRecord:
        told, timings, loaded = trace.told, trace.timings, trace.loaded
        if loaded:
            told = told | trace.brought
            timings = timings | trace.stages | {"commit": trace.commit_ms}
        if (costs := trace.situation.costs) is not None:
            remote_ms = None if costs.remote is None else 1e3 * costs.remote.ttft_s
            told = told | {
                "choice": "remote" if trace.decision.remote else "local",
                "predicted_ms": PredictedMs(local=1e3 * costs.local.ttft_s, remote=remote_ms),
            }
            if costs.took_s is not None:
                told["outcome_ms"] = 1e3 * costs.took_s
                told["regret_ms"] = costs.regret_s and 1e3 * costs.regret_s
                # Since it came to vLLM. A frontend knows it since it came to the frontend.
                timings = timings | {"first_token": 1e3 * (costs.waited_s + costs.took_s)}
        away = trace.decision.remote and not trace.outcome
        attempts, prefill_instance, _ = trace.claims[-1] if trace.claims else (0, None, 0.0)
        return ExplainRecord(
            request_id=request_id,
            path="unknown" if away else "remote" if loaded else "local",
            reason=trace.decision.reason,
            prompt_tokens=trace.situation.prompt_tokens,
            prefix_hit_tokens=trace.situation.hit_tokens - trace.planned_fetch,
            remote_tokens=trace.situation.remote_tokens if loaded else 0,
            decode_instance=self.instance_id,
            prefill_instance=prefill_instance,
            attempts=attempts,
            timings_ms=Timings(**timings),
            **told,
        )


def _together(name: str, first: Explained, *others: Explained) -> Explained:
    """Return the record of one call from those of its prompts, choices and beams."""
    return replace(
        first,
        request_id=name,
        state=min((one.state for one in (first, *others)), key=_STATES.index),
        parts=others[: MAX_PARTS - 1],
        more_parts=len(others[MAX_PARTS - 1 :]),
    )


def _send_spans(trace: _RequestTrace, spans: _Spans, record: ExplainRecord, now: float) -> None:
    """Send the spans of a request that is over here.

    decode.request            from the decision, or the read before it, to the last token
      decode.prefix_fetch     the read of a prefix from another decode worker
      decode.remote_prefill   from the decision until vLLM knows how the remote prefill has ended
        queue.wait            one for each attempt: from the decision to its claim
        prefill.attempt       the prefill worker's
        decode.commit         from the commit until vLLM schedules the request"""
    send, decided = tracing.record, trace.decided_at
    fetch_began = trace.fetched_at - trace.timings.get("fetch", 0.0) / 1e3
    if trace.fetched_at < math.inf:
        send(
            "decode.prefix_fetch", spans.request.child(), spans.request, fetch_began,
            trace.fetched_at,
            {
                "pullfill.fetched_from": record.fetched_from,
                "pullfill.outcome": record.fetch,
                "pullfill.kv_bytes": trace.fetch_bytes,
            },
            error="" if record.fetch == FetchOutcome.FETCHED.value else record.fetch or "",
            kind="CLIENT",
        )  # fmt: skip
    for attempt, instance, at in trace.claims:
        told: dict[str, Any] = {"pullfill.attempt": attempt, "pullfill.prefill_instance": instance}
        send("queue.wait", spans.remote.child(), spans.remote, decided, at, told, kind="PRODUCER")
    if trace.loaded:
        began, ended = trace.committed_at, trace.ended_at
        send("decode.commit", spans.remote.child(), spans.remote, began, ended, {})
    if trace.decision.remote or trace.outcome:
        # Without an outcome its client has left. The prefill worker's spans name this one.
        outcome = trace.outcome or Outcome.CANCELLED.value
        send(
            "decode.remote_prefill", spans.remote, spans.request, decided, trace.ended_at or now,
            {"pullfill.outcome": outcome, "pullfill.attempts": record.attempts},
            error="" if trace.loaded else outcome,
        )  # fmt: skip
    send(
        "decode.request", spans.request, spans.above, min(decided, fetch_began), now,
        {
            "gen_ai.request.id": record.request_id,
            "gen_ai.usage.prompt_tokens": record.prompt_tokens,
            **{f"pullfill.{name}": getattr(record, name) for name in _IN_SPAN},
        },
        kind="SERVER",
    )  # fmt: skip
