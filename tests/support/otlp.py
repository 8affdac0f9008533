"""A receiver of traces that speaks OTLP over gRPC, as a collector does."""

from __future__ import annotations

from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_grpc

from tests.support.waiting import until

TRACE, ABOVE = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{ABOVE}-01"}
"""Of a request that a frontend traces."""


@dataclass(frozen=True, slots=True)
class Span:
    """As received. Ids in hex; the parent of a root is empty. links: ids of spans."""

    name: str
    trace: str
    id: str
    parent: str
    links: tuple[str, ...]
    start_ns: int
    end_ns: int
    error: str
    attributes: dict[str, Any]
    resource: dict[str, Any]

    def within(self, outer: Span) -> bool:
        """Up to the few microseconds between two looks at the wall clock."""
        slack = 10_000_000
        return outer.start_ns - slack <= self.start_ns <= self.end_ns <= outer.end_ns + slack


class Receiver(service_grpc.TraceServiceServicer):
    """Keeps all spans. A context manager. `url` is for --otlp-traces-endpoint."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def __enter__(self) -> Receiver:
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        service_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def Export(self, request: Any, context: Any) -> Any:
        for group in request.resource_spans:
            resource = _values(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [_span(one, resource) for one in scope.spans]
        return service.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        """Spans of this name, in the order of their start."""
        return sorted((s for s in self.spans if s.name == name), key=lambda s: s.start_ns)

    def one(self, name: str) -> Span:
        (span,) = self.named(name)
        return span

    def wait_for(self, *names: str, trace: str) -> None:
        """Return as soon as there is a span of each name in the trace."""

        def there() -> bool:
            return set(names) <= {s.name for s in list(self.spans) if s.trace == trace}

        until(there, 30, f"all of {names}")


def _span(one: Any, resource: dict[str, Any]) -> Span:
    return Span(
        name=one.name,
        trace=one.trace_id.hex(),
        id=one.span_id.hex(),
        parent=one.parent_span_id.hex(),
        links=tuple(link.span_id.hex() for link in one.links),
        start_ns=one.start_time_unix_nano,
        end_ns=one.end_time_unix_nano,
        error=one.status.message if one.status.code == 2 else "",
        attributes=_values(one.attributes),
        resource=resource,
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {p.key: getattr(p.value, p.value.WhichOneof("value")) for p in pairs}
