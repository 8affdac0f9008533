"""What a forwarder gets, and what it promises.

A forwarder answers one HTTP request: method, path, headers and body in; status, headers and bytes
out. It works on ASGI's `receive` and `send`, so `pull` adds nothing to the path of a token.

Promises, for which tests/contract/test_forwarders.py checks each forwarder:

1. The client gets one whole answer of one run. A stage is repeated only before the first byte of
   the answer has been sent. The token of a prefill stage is never shown.
2. Bytes of a stream are passed on unchanged and at once, one event or more at a time.
3. Errors have vLLM's form: a JSON object with `error`, or an event of that form in a stream that
   has begun, and then `[DONE]`.
4. No request hangs: each wait has a limit, and a server that is lost ends its waits.
5. When the client leaves, or the task is cancelled, all connections that were opened for the
   request are closed before `forward` returns. vLLM aborts a request whose connection is closed.
6. `Call.stages` says what was tried, in order.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from pullfill.frontend.admission import Receive, Scope, Send
from pullfill.wire import ForwardStage


@dataclass(slots=True)
class Call:
    """One request.

    scope: ASGI's.
    path: without the root path.
    body: the whole body. json: its object, or None if it is something else.
    request_id: id for both stages, without dashes. The client's `X-Request-Id`, if it sent one.
    response_id: the `id` of the answer. Empty: unknown.
    stages: what was done, filled by the forwarder.
    prompt_tokens: length of the prompt. 0: unknown.
    arrived: `time.monotonic` when it came."""

    scope: Scope
    path: str
    body: bytes
    json: dict[str, Any] | None
    request_id: str
    response_id: str = ""
    reason: str = ""
    stages: list[ForwardStage] = field(default_factory=list)
    prompt_tokens: int = 0
    arrived: float = field(default_factory=time.monotonic)
    first_byte_ms: float | None = None

    @property
    def stream(self) -> bool:
        """Whether the answer is to be streamed."""
        return self.json is not None and self.json.get("stream") is True

    def ms(self) -> float:
        """Return the milliseconds since it came."""
        return round((time.monotonic() - self.arrived) * 1000.0, 3)

    def header(self, name: bytes) -> str:
        """Return the value of a header of the request. Empty: there is none."""
        for key, value in self.scope["headers"]:
            if key == name:
                return str(value.decode("latin-1"))
        return ""


class Forwarder(Protocol):
    """See the module."""

    name: str

    def trouble(self) -> str:
        """Return why it can take no request now. Empty: it can."""
        ...

    def suits(self, call: Call) -> bool:
        """Return whether it can serve such a request at all."""
        ...

    async def forward(self, call: Call, receive: Receive, send: Send) -> None:
        """Answer the request. receive: what comes after the body, so it tells of a disconnect."""
        ...
