"""OpenTelemetry spans of this process, sent to the address of vLLM's `--otlp-traces-endpoint`.

    frontend.request → frontend.dispatch → decode.request → decode.prefix_fetch
                                                          → decode.remote_prefill
                                                            ├ queue.wait
                                                            ├ prefill.attempt → prefill.claim, ...
                                                            └ decode.commit

Spans are made when their request or job is over, from the times in its record. So nothing is open
while it runs. A thread of the SDK encodes and sends them; if the endpoint hangs, spans are dropped.
A `Context` names a span before it is made: whoever works below it gets `Context.header`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pullfill import redact
from pullfill.errors import ConfigError
from pullfill.runtime import log

_log = log.get("tracing")

PARENT = "traceparent"
_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Context:
    """A span of a trace that is recorded, by its ids. Neither is 0."""

    trace_id: int
    span_id: int

    @property
    def header(self) -> str:
        """The W3C `traceparent` for those who work below this span."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"

    def child(self) -> Context:
        """Return a new span below this one."""
        return Context(self.trace_id, random.getrandbits(64) or 1)

    def attempt(self, job_id: str, number: int) -> Context:
        """Return the span of an attempt below this one.

        Everybody who knows the job knows the ids of its attempts, and can link to them."""
        digest = hashlib.blake2b(f"{job_id}/{number}".encode(), digest_size=8).digest()
        return Context(self.trace_id, int.from_bytes(digest) or 1)


def read(header: str | None) -> Context | None:
    """Return the span of a `traceparent`.

    None: there is none, it cannot be read, it is not sampled, or this process traces nothing."""
    if not header or (sdk := _exporting) is None:
        return None
    above = sdk.propagator.extract({PARENT: header})
    found = sdk.api.get_current_span(above).get_span_context()
    return Context(found.trace_id, found.span_id) if found.trace_flags.sampled else None


def root(headers: Mapping[str, str] | None) -> tuple[Context, Context | None] | None:
    """Return (a new span, the client's span above it). None: the request is not traced.

    headers: `traceparent` and `tracestate` of the client, if it sent them."""
    if (sdk := _exporting) is None:
        return None
    above = sdk.propagator.extract(headers or {})
    client = sdk.api.get_current_span(above).get_span_context()
    trace_id = client.trace_id or random.getrandbits(128) or 1
    decision = sdk.sampler.should_sample(above, trace_id, "frontend.request").decision
    if not decision.is_sampled():
        return None
    parent = Context(trace_id, client.span_id) if client.is_valid else None
    return Context(trace_id, random.getrandbits(64) or 1), parent


def record(
    name: str,
    context: Context,
    above: Context | None,
    began: float,
    ended: float,
    attributes: Mapping[str, Value | None],
    *,
    links: Sequence[Context] = (),
    error: str = "",
    kind: str = "INTERNAL",
) -> None:
    """Send a span that is over. Any thread, and no I/O.

    above: the span above it. began, ended: by `time.monotonic`. attributes: without those that are
    None. error: why it failed. kind: a name of OpenTelemetry's SpanKind."""
    if (sdk := _exporting) is None:
        return
    offset = sdk.offset()
    code = sdk.api.StatusCode.ERROR if error else sdk.api.StatusCode.UNSET
    sdk.processor.on_end(
        sdk.span(
            name,
            context=sdk.named(context),
            parent=None if above is None else sdk.named(above, remote=True),
            resource=sdk.resource,
            attributes={key: value for key, value in attributes.items() if value is not None},
            links=[sdk.api.Link(sdk.named(one, remote=True)) for one in links],
            kind=sdk.api.SpanKind[kind],
            status=sdk.api.Status(code, error or None),
            start_time=int(began * 1e9) + offset,
            end_time=int(max(began, ended) * 1e9) + offset,
            instrumentation_scope=sdk.scope,
        )
    )


# Without the flag OpenTelemetry is not imported, and each context is None. Protocol, sampler and
# name of the service come from OpenTelemetry's environment variables, as in vLLM:
# OTEL_EXPORTER_OTLP_TRACES_PROTOCOL (grpc), OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME.
def begin(endpoint: str | None, role: str, instance_id: str) -> None:
    """Trace from now on. Does nothing without an endpoint. Raises ConfigError.

    endpoint: as vLLM takes it, like `http://localhost:4317`."""
    global _exporting
    if endpoint and _exporting is None:
        _exporting = _Exporting(endpoint, role, instance_id)


def close(within_s: float = 2.0) -> None:
    """Send what waits, for `within_s` at most. Traces end with this."""
    global _exporting
    exporting, _exporting = _exporting, None
    if exporting is not None:
        exporting.close(within_s)


class _Exporting:
    """What needs the SDK."""

    def __init__(self, endpoint: str, role: str, instance_id: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as exc:
            raise ConfigError(
                f"--otlp-traces-endpoint needs OpenTelemetry ({exc}): pip install 'pullfill[otel]'"
            ) from exc
        # The exporters log each try. `_Watched` says once what matters.
        for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.api: Any = trace
        self.span: Any = ReadableSpan
        self.scope: Any = InstrumentationScope("pullfill")
        self.propagator: Any = TraceContextTextMapPropagator()
        self.resource: Any = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME") or "pullfill",
                "service.instance.id": instance_id,
                "pullfill.role": role,
            }
        )
        self.sampler: Any = TracerProvider(resource=self.resource).sampler
        self.processor: Any = BatchSpanProcessor(_watched(_exporter(endpoint), endpoint))
        self.flags: Any = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        self._measured, self._measured_until = 0, 0.0

    def offset(self) -> int:
        """Return what to add to `time.monotonic`, in ns. It stays for a minute: spans of one
        request must not move against each other."""
        now = time.monotonic()
        if now >= self._measured_until:
            self._measured_until = now + 60.0
            # The largest of several: this thread may be stopped between the two clocks.
            self._measured = max(time.time_ns() - time.monotonic_ns() for _ in range(5))
        return self._measured

    def named(self, context: Context, remote: bool = False) -> Any:
        return self.api.SpanContext(context.trace_id, context.span_id, remote, self.flags)

    def close(self, within_s: float) -> None:
        # In threads, because their own limits are not kept while an exporter waits for an answer.
        vllms = getattr(self.api.get_tracer_provider(), "shutdown", None)
        ends = [end for end in (self.processor.shutdown, vllms) if end is not None]
        threads = [threading.Thread(target=end, daemon=True) for end in ends]
        until = time.monotonic() + within_s
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))


def _exporter(endpoint: str) -> Any:
    """Return what vLLM would take for this endpoint. Raises ConfigError."""
    protocol = os.environ.get(_PROTOCOL) or "grpc"
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_exporter

            return grpc_exporter.OTLPSpanExporter(endpoint=endpoint, insecure=True)
        if protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_exporter

            return http_exporter.OTLPSpanExporter(endpoint=endpoint)
    except ImportError as exc:
        raise ConfigError(f"{_PROTOCOL}={protocol} needs another package: {exc}") from exc
    raise ConfigError(f"{_PROTOCOL}={protocol!r}: use grpc or http/protobuf")


def _watched(inner: Any, endpoint: str) -> Any:
    """Return an exporter that says once that the endpoint does not take spans, and once that it
    does again."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    where = redact.url(endpoint)

    class Watched(SpanExporter):
        failing = False

        def export(self, spans: Sequence[Any]) -> Any:
            result = inner.export(spans)
            failed = result is not SpanExportResult.SUCCESS
            if failed and not self.failing:
                _log.warning(
                    "%s takes no traces: they are dropped until it does; requests go on", where
                )
            elif self.failing and not failed:
                _log.info("%s takes traces again", where)
            self.failing = failed
            return result

        def shutdown(self) -> None:
            inner.shutdown()

    return Watched()


_exporting: _Exporting | None = None
