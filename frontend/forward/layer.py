"""The ASGI layer that picks the forwarder of each request, and keeps what `explain` shows.

It stands between `Admission` and vLLM's app, and only if stock servers may be known. Requests on
other paths than PATHS go to vLLM's app as before: it renders, tokenizes and lists models.

`router.stock_share` says which share of the requests the stock servers get: 0 none, 1 all. A side
that can take no request leaves all to the other one. So a fleet is moved over in steps, and back.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from typing import Any

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
from pullfill.frontend.forward.contract import Call, Forwarder
from pullfill.frontend.forward.run import NAMED
from pullfill.frontend.request_log import RequestLog, RequestRecord
from pullfill.wire import ExplainRecord, Timings

PATHS = frozenset({
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses",
    "/v1/messages",
})  # fmt: skip
_MAX_ID = 128
_LOOK_S = 0.05


class Layer:
    """ASGI middleware. See the module.

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
            await asyncio.sleep(_LOOK_S)
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

    def _tell(self, forwarder: Forwarder, call: Call, answered_ms: float | None) -> None:
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


def _call(scope: Scope, body: bytes) -> Call:
    call = Call(scope, route_of(scope), body, None, "")
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
