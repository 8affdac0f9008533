"""The spans of a frontend: one for each request, below it one for each worker that it was sent to.

Event loop only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from pullfill.runtime import tracing
from pullfill.runtime.tracing import PARENT, Context


class NoSpans:
    """Those of a request that is not traced."""

    def sent(self, worker: str, headers: Mapping[str, str] | None) -> Mapping[str, str] | None:
        return headers

    def left(self, error: str = "") -> None:
        pass

    def ended(self, tokens: int, error: str = "") -> None:
        pass


@dataclass(slots=True)
class RequestSpans(NoSpans):
    """Those of one request.

    key: its id for people (`explain.key_of`). above: the client's span.
    worker, sent_at: where it is. The worker is empty while it is nowhere.
    dispatch: the span of its last dispatch. before: that of the one before."""

    key: str
    context: Context
    above: Context | None
    began: float
    worker: str = ""
    sent_at: float = 0.0
    count: int = 0
    dispatch: Context | None = None
    before: Context | None = None

    def sent(self, worker: str, headers: Mapping[str, str] | None) -> Mapping[str, str]:
        """Note that it goes to a worker now. Returns its trace headers for the worker.

        headers: the client's."""
        self.worker, self.sent_at = worker, time.monotonic()
        self.count += 1
        self.before, self.dispatch = self.dispatch, self.context.child()
        return {**(headers or {}), PARENT: self.dispatch.header}

    def left(self, error: str = "") -> None:
        """Note that its worker has it no more. error: why, if that was too soon."""
        if not self.worker or self.dispatch is None:
            return
        tracing.record(
            "frontend.dispatch",
            self.dispatch,
            self.context,
            self.sent_at,
            time.monotonic(),
            {"pullfill.decode_instance": self.worker, "pullfill.dispatch": self.count},
            links=() if self.before is None else (self.before,),
            error=error,
            kind="CLIENT",
        )
        self.worker = ""

    def ended(self, tokens: int, error: str = "") -> None:
        """Note that its answer is complete, or failed."""
        self.left(error)
        tracing.record(
            "frontend.request",
            self.context,
            self.above,
            self.began,
            time.monotonic(),
            {"gen_ai.request.id": self.key, "gen_ai.usage.completion_tokens": tokens},
            error=error,
            kind="SERVER",
        )


OFF = NoSpans()


def begin_spans(headers: Mapping[str, str] | None, key: str, arrived: float) -> NoSpans:
    """Return the spans of a new request.

    headers: trace headers of the client. arrived: when the request came, by `time.monotonic`."""
    if (found := tracing.root(headers)) is None:
        return OFF
    return RequestSpans(key, *found, arrived)
