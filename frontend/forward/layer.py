"""What a forwarder gets and promises, and the layer that picks the one of each request.

`router.stock_share` says which share of the requests the stock servers get: 0 none, 1 all. A side
that can take no request leaves all to the other one. So a fleet is moved over in steps, and back.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from pullfill.frontend.admission import (
    ENGINE_PATHS,
    App,
    Message,
    Receive,
    Scope,
    Send,
    respond,
    route_of,
)
from pullfill.frontend.dispatch import NO_WORKER
from pullfill.frontend.request_log import RequestLog, RequestRecord
from pullfill.wire import ExplainRecord, ForwardStage, Timings

PATHS = frozenset({
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses",
    "/v1/messages",
})  # fmt: skip
_MAX_ID = 128
# Result of the prefill stage with single dispatch: the decode server was told to start it.
NAMED = "named"


@dataclass(slots=True)
class ClientCall:
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
    """Answers one HTTP request on ASGI's `receive` and `send`: `Pull` adds nothing to the path of a
    token. tests/contract/test_forwarders.py checks each forwarder for these promises:

    1. The client gets one whole answer of one run. A stage is repeated only before the first byte
       of the answer has been sent. The token of a prefill stage is never shown.
    2. Bytes of a stream are passed on unchanged and at once, one event or more at a time.
    3. Errors have vLLM's form: a JSON object with `error`, or an event of that form in a stream
       that has begun, and then `[DONE]`.
    4. No request hangs: each wait has a limit, and a server that is lost ends its waits.
    5. When the client leaves, or the task is cancelled, all connections that were opened for the
       request are closed before `forward` returns. vLLM aborts a request whose connection is
       closed.
    6. `ClientCall.stages` says what was tried, in order."""

    name: str

    def trouble(self) -> str:
        """Return why it can take no request now. Empty: it can."""
        ...

    def suits(self, call: ClientCall) -> bool:
        """Return whether it can serve such a request at all."""
        ...

    async def forward(self, call: ClientCall, receive: Receive, send: Send) -> None:
        """Answer the request. receive: what comes after the body, so it tells of a disconnect."""
        ...


class Pull:
    """`--forwarder pull`: vLLM's app in this process, over pullfill's decode workers.

    has_worker: returns whether a decode worker can take requests now."""

    name = "pull"

    def __init__(self, app: App, has_worker: Callable[[], bool]) -> None:
        self._app = app
        self._has_worker = has_worker

    def trouble(self) -> str:
        return "" if self._has_worker() else NO_WORKER

    def suits(self, call: ClientCall) -> bool:
        return True

    async def forward(self, call: ClientCall, receive: Receive, send: Send) -> None:
        if why := self.trouble():
            await respond(send, 503, why, "ServiceUnavailableError", retry_after_s=1)
            return
        told = False

        async def read() -> Message:
            nonlocal told
            if told:
                return await receive()
            told = True
            return {"type": "http.request", "body": call.body, "more_body": False}

        await self._app(call.scope, read, send)


class Layer:
    """ASGI middleware that decides for each request: our workers, or a stock server.

    It stands between `Admission` and vLLM's app, and only if stock servers may be known. Requests
    on other paths than PATHS go to vLLM's app as before: it renders, tokenizes and lists models.

    share: returns `router.stock_share`. requests: gets a record of each request that `stock`
    serves."""

    def __init__(
        self,
        app: App,
        pull: Forwarder,
        stock: Forwarder,
        share: Callable[[], float],
        requests: RequestLog,
    ) -> None:
        self._app = app
        self._pull = pull
        self._stock = stock
        self._share = share
        self._requests = requests
        self._due = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_of(scope) if scope["type"] == "http" and scope["method"] == "POST" else ""
        if path not in PATHS:
            if path in ENGINE_PATHS and (why := self._pull.trouble()):
                await respond(send, 503, why, "ServiceUnavailableError", retry_after_s=1)
            else:
                await self._app(scope, receive, send)
            return
        body = await _read(receive)
        if body is None:
            return
        forwarder = self.choose()
        if why := forwarder.trouble():
            await respond(send, 503, why, "ServiceUnavailableError", retry_after_s=1)
            return
        call = _call(scope, body)
        if forwarder is not self._pull:
            call.json = _object(body)
            if not forwarder.suits(call) and not self._pull.trouble():
                forwarder = self._pull
        if forwarder is self._pull:
            await forwarder.forward(call, receive, send)
            return
        if call.json is None:
            call.body = _without_kv(body)
        answered_ms = None
        try:
            await forwarder.forward(call, receive, send)
            answered_ms = call.ms()
        finally:
            self._tell(forwarder, call, answered_ms)

    async def wait_ready(self, timeout_s: float) -> bool:
        """Return True: whoever serves a request says itself why it cannot, if so.

        Waits until either side can serve, for `timeout_s` at most."""
        end = time.monotonic() + timeout_s
        while (  # noqa: ASYNC110 - two sides, and neither can take requests: a rare case
            self._pull.trouble() and self._stock.trouble() and time.monotonic() < end
        ):
            await asyncio.sleep(0.05)
        return True

    def choose(self) -> Forwarder:
        """Return the forwarder of the next request. Shares are kept exactly, not by chance."""
        if self._stock.trouble():
            # If neither can, the stock servers' reason is told unless `pull` is to serve all.
            return self._pull if self._share() <= 0 or not self._pull.trouble() else self._stock
        if self._pull.trouble():
            return self._stock
        self._due += self._share()
        if self._due < 1.0 - 1e-9:
            return self._pull
        self._due -= 1.0
        return self._stock

    def _tell(self, forwarder: Forwarder, call: ClientCall, answered_ms: float | None) -> None:
        """Keep the record for `explain`, under the answer's id.

        answered_ms: how long it took. None: it was cancelled."""
        key = call.response_id or call.request_id
        done = {stage.stage: stage for stage in call.stages if stage.result in ("ok", NAMED)}
        prefill, decode = done.get("prefill"), done.get("decode")
        spent = None
        if prefill is not None and prefill.result != NAMED:
            spent = prefill.end_ms - prefill.begin_ms
        told = ExplainRecord(
            request_id=key,
            path=forwarder.name,
            reason=call.reason,
            prompt_tokens=call.prompt_tokens,
            prefix_hit_tokens=0,
            remote_tokens=call.prompt_tokens if prefill else 0,
            decode_instance=decode.server if decode else "",
            prefill_instance=prefill.server if prefill else None,
            attempts=sum(stage.stage == "decode" for stage in call.stages),
            timings_ms=Timings(prefill=spent),
            decode_choice=decode.choice if decode else None,
            stages=tuple(call.stages),
        )
        arrived_at = time.time() - call.ms() / 1e3
        record = RequestRecord(
            key,
            first_token_ms=call.first_byte_ms,
            arrived_at=arrived_at,
            decode_choice=told.decode_choice,
            answer_ms=answered_ms,
        )
        self._requests.begin(record).response_id = call.response_id
        self._requests.tell(record, told)
        self._requests.over(record)


def _call(scope: Scope, body: bytes) -> ClientCall:
    call = ClientCall(scope, route_of(scope), body, None, "")
    asked = call.header(b"x-request-id")
    good = 0 < len(asked) <= _MAX_ID and asked.isascii() and asked.isprintable()
    call.request_id = asked if good else uuid.uuid4().hex
    return call


def _object(body: bytes) -> dict[str, Any] | None:
    """The JSON object of a body. None: it is none, and vLLM will say so."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) else None


def _without_kv(body: bytes) -> bytes:
    """Return a body that is no strict JSON, without parameters for the KV connector.

    vLLM also reads NaN and UTF-16. Parameters of a client's would end its engine."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(found, dict) or "kv_transfer_params" not in found:
        return body
    del found["kv_transfer_params"]
    return json.dumps(found).encode()


async def _read(receive: Receive) -> bytes | None:
    """All of the body, whose size `Admission` has bounded. None: the client left."""
    parts: list[bytes] = []
    while True:
        message: Message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)
