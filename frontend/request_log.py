"""What this frontend knows of its recent requests: one record each. The spans, the rows of the live
page and what `pullfill explain` shows are views of it.

An `HttpCall` is one HTTP request. The engine sees a request, a `RequestRecord`, for each of its
prompts, choices and beams. `Admission` opens the call in the context of the HTTP request, so each
engine request finds its call there. Clients know a call by its X-Request-Id and by the `id` of its
answer, which vLLM notes in the state of the HTTP request. Thus no id is guessed from another.

Bounded: the oldest call goes first. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import Message, Send

from pullfill.engine import front_app, front_wire, request_limits
from pullfill.engine.migration import choice_of
from pullfill.runtime import tracing
from pullfill.runtime.tracing import PARENT, Context
from pullfill.snapshot import MAX_PARTS, MAX_RECORDS, Explained
from pullfill.wire import MAX_TEXT, DecodeChoice, ExplainRecord

MAX_ERROR = 1000
_HEADER = b"x-request-id"
# How an event begins that ends a stream with an error.
_ERROR_EVENTS = (b'data: {"error"', b"event: error", b"event: response.failed")
_MOST = max(map(len, _ERROR_EVENTS))

# The HTTP request that is being served.
_call: ContextVar[HttpCall | None] = ContextVar("call", default=None)


# --------------------------------------------------------------------------- the records


@dataclass(slots=True, eq=False)
class SentTo:
    """One dispatch to a decode worker. Times are those of `time.monotonic`.

    span: None: the request is not traced. left_at: 0: the request is there.
    error: why it left too soon."""

    worker: str
    span: Context | None
    sent_at: float = field(default_factory=time.monotonic)
    left_at: float = 0.0
    error: str = ""

    def headers(self, given: Mapping[str, str] | None) -> Mapping[str, str] | None:
        """Return the trace headers for the worker. given: the client's."""
        return given if self.span is None else {**(given or {}), PARENT: self.span.header}


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One engine request, from its arrival to its end.

    key: see `key_of`.
    arrived, submitted, over_at: `time.monotonic` of its arrival, of `Dispatcher.submit`, and of its
    end. arrived_at: seconds since 1970.
    spans: its own span, and the client's above it. None: it is not traced.
    sent: its dispatches to decode workers, in order.
    migrated_tokens: number of tokens that were out when it left the last worker but one.
    decode_choice: how its last decode worker was chosen.
    answer_ms: from its arrival to its end. None: it has not ended, or was cancelled.
    targets_ms: what it names for TTFT and ITL. None: nothing.
    told: its worker's record. None: it has not come.
    serial: number of its record in the order of their coming.
    error: why it failed. Empty: it did not."""

    key: str
    route_ms: float | None = None
    first_token_ms: float | None = None
    arrived: float = field(default_factory=time.monotonic)
    submitted: float = field(default_factory=time.monotonic)
    arrived_at: float = 0.0
    prompt_tokens: int = 0
    spans: tuple[Context, Context | None] | None = None
    sent: list[SentTo] = field(default_factory=list)
    migrated_tokens: int = 0
    decode_choice: DecodeChoice | None = None
    answer_ms: float | None = None
    answer_tokens: int = 0
    targets_ms: tuple[float | None, float | None] = (None, None)
    told: ExplainRecord | None = None
    serial: int = 0
    over_at: float | None = None
    error: str = ""

    def unsettled(self, wait_s: float) -> bool:
        """Whether its worker's record is still to come, in so many seconds after its end."""
        if self.told is not None or self.error or not self.sent or self.over_at is None:
            return False
        return time.monotonic() - self.over_at < wait_s

    def to(self, worker: str) -> SentTo:
        """Return a new entry for sending the request to `worker`.

        The record does not have it yet: `RequestLog.sent` adds it once the request is sent."""
        return SentTo(worker, self.spans and self.spans[0].child())

    def left(self, error: str) -> None:
        """Note that its worker has it no more, and why."""
        self.sent[-1].left_at, self.sent[-1].error = time.monotonic(), error

    def answered(self, params: Any) -> None:
        """Note that its answer is complete. params: vLLM's SamplingParams."""
        self.answer_ms = (time.monotonic() - self.arrived) * 1000.0
        self.targets_ms = request_limits.targets_of(params)

    def explained(self) -> Explained:
        """Combine what its worker and this frontend know."""
        record = self.told or ExplainRecord(
            request_id=self.key,
            path="unknown" if self.sent else "none",
            prompt_tokens=self.prompt_tokens,
            decode_instance=self.sent[-1].worker if self.sent else "",
        )
        # A request that waits for another worker has left the last one too.
        waits = self.over_at is None and bool(self.sent) and self.sent[-1].left_at > 0
        left = self.sent if waits else self.sent[:-1]
        return Explained.of(
            record,
            timings_ms=msgspec.structs.replace(
                record.timings_ms, route=self.route_ms, first_token=self.first_token_ms
            ),
            request_id=self.key,
            error=self.error or None,
            arrived_at=self.arrived_at,
            answer_ms=self.answer_ms,
            answer_tokens=self.answer_tokens,
            targets_ms=self.targets_ms,
            migrated_from=tuple(sent.worker for sent in left),
            migrated_tokens=self.migrated_tokens,
            decode_choice=self.decode_choice,
        )


def _send_spans(record: RequestRecord, error: str) -> None:
    """Send the spans of a request that is over: its own, below it one for each dispatch."""
    if record.spans is None:
        return
    own, above = record.spans
    now, before = time.monotonic(), None
    for number, sent in enumerate(record.sent, 1):
        assert sent.span is not None
        tracing.record(
            "frontend.dispatch",
            sent.span,
            own,
            sent.sent_at,
            sent.left_at or now,
            {"pullfill.decode_instance": sent.worker, "pullfill.dispatch": number},
            links=() if before is None else (before,),
            error=sent.error if sent.left_at else error,
            kind="CLIENT",
        )
        before = sent.span
    tracing.record(
        "frontend.request",
        own,
        above,
        record.arrived,
        now,
        {
            "gen_ai.request.id": record.key,
            "gen_ai.usage.completion_tokens": record.answer_tokens,
        },
        error=error,
        kind="SERVER",
    )


def key_of(request_id: str, external_id: str) -> str:
    """`0_cmpl-x-0-1234abcd` with external id `cmpl-x-0` → `0_cmpl-x-0`. MAX_TEXT at most."""
    choice = choice_of(request_id, external_id)
    return (f"{choice}_{external_id}" if choice else external_id)[:MAX_TEXT]


@dataclass(slots=True, eq=False)
class HttpCall:
    """One HTTP request that needs an engine. Without HTTP: one engine request.

    request_id: its X-Request-Id. We make one if the client sent none, and add it to the answer.
    response_id: the `id` of its answer. Empty: not known yet.
    state: ASGI's. None: it has ended.
    status: of HTTP. 0: no answer has begun.
    error: what the client was told.
    records: its first engine requests. more: number of the others.
    filed: the ids that find it."""

    request_id: str
    response_id: str = ""
    state: MutableMapping[str, Any] | None = None
    status: int = 0
    error: str = ""
    arrived_at: float = field(default_factory=time.time)
    records: list[RequestRecord] = field(default_factory=list)
    more: int = 0
    filed: set[str] = field(default_factory=set)

    def noting(self, send: Send, begun: Callable[[HttpCall], None], *, made: bool) -> Send:
        """Return a `send` that notes status and error.

        begun: is called when the answer begins. made: the client does not know its id."""

        # No coroutine: it is called for each part of a stream.
        def noted(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                known = [value for name, value in message["headers"] if name == _HEADER]
                if known:  # vLLM makes one with --enable-request-id-headers
                    self.request_id = known[0].decode("latin-1")[:MAX_TEXT]
                elif made:
                    added = (_HEADER, self.request_id.encode())
                    message = {**message, "headers": [*message["headers"], added]}
                begun(self)
            elif (body := message.get("body")) and (
                self.status >= 400 or bytes(body[:_MOST]).startswith(_ERROR_EVENTS)
            ):
                told = error_in(body).get("message") or bytes(body).decode("utf-8", "replace")
                self.error = self.error or str(told)[:MAX_ERROR]
            return send(message)

        return noted

    @property
    def state_now(self) -> str:
        """`running`, `failed`, `cancelled` (its client has left) or `answered`."""
        if self.state is not None or any(record.over_at is None for record in self.records):
            return "running"
        if self.status >= 400 or self.error or any(record.error for record in self.records):
            return "failed"
        cut = any(record.answer_ms is None for record in self.records)
        return "cancelled" if cut or not (self.records or self.status) else "answered"

    def unsettled(self, wait_s: float) -> bool:
        """Whether more will be known of it in a moment."""
        if any(record.unsettled(wait_s) for record in self.records):
            return True
        # The client may have its last byte, and the application not have returned yet.
        begun = self.status and self.state is not None
        return bool(begun) and all(one.over_at for one in self.records)

    def explained(self, request_id: str) -> Explained:
        """Return what is known of it, in the record of its first engine request."""
        parts = tuple(record.explained() for record in self.records)
        return msgspec.structs.replace(
            parts[0] if parts else RequestRecord(request_id).explained(),
            request_id=request_id,
            state=self.state_now,
            status=self.status,
            error=self.error or next((part.error for part in parts if part.error), None),
            arrived_at=self.arrived_at,
            parts=parts[1:],
            more_parts=self.more,
        )


def error_in(body: bytes) -> dict[str, Any]:
    """Return the error that is in JSON, or in an event with it. Empty: it is none of vLLM's."""
    text = bytes(body).decode("utf-8", "replace")
    try:
        found = json.JSONDecoder().raw_decode(text, max(0, text.find("{")))[0]
        told = found.get("error") or found.get("response", {}).get("error") or found
    except (ValueError, RecursionError, AttributeError):
        return {}
    return told if isinstance(told, dict) else {"message": told}


# --------------------------------------------------------------------------- all of them


class RequestLog:
    """The calls of the last `limit` engine requests, and the last `limit` calls that had none."""

    # A worker tells of an answer that a stop string has ended after its next step. wait_s is less
    # than other frontends wait (`ClusterView`).
    def __init__(self, limit: int = MAX_RECORDS, wait_s: float = 0.5) -> None:
        self._limit, self._wait_s = limit, wait_s
        self._open: OrderedDict[str, RequestRecord] = OrderedDict()
        # Apart: a flood of refusals (429) pushes out no request that was served.
        self._served: OrderedDict[HttpCall, None] = OrderedDict()
        self._refused: OrderedDict[HttpCall, None] = OrderedDict()
        # A client may send all its requests with the same X-Request-Id. It finds the last one, and
        # the `id` of its answer finds each.
        self._by_id: dict[str, HttpCall] = {}
        self._by_key: dict[str, RequestRecord] = {}
        # The records that were told, and their serials then. One may be told again.
        self._told: deque[tuple[int, RequestRecord]] = deque(maxlen=limit)
        self._serial = 0
        self._news = asyncio.Event()

    # ---------------------------------------------------------------- HTTP requests

    def arrived(self, scope: MutableMapping[str, Any], send: Send) -> tuple[HttpCall, Send]:
        """Open the call of an HTTP request, in its context. Returns the `send` to use for it."""
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        name = given.decode("latin-1")[:MAX_TEXT] or uuid.uuid4().hex
        call = HttpCall(name, state=scope.setdefault("state", {}))
        _call.set(call)
        return call, call.noting(send, self._file, made=not given)

    def ended(self, call: HttpCall) -> None:
        """Note that an HTTP request has its whole answer, or that its client has left."""
        self._file(call)
        call.state = None
        self._news.set()

    def _file(self, call: HttpCall) -> None:
        """Let all its ids find a call, and make it the newest."""
        self._drop(call)
        (self._served if call.records else self._refused)[call] = None
        self._by_key.update((record.key, record) for record in call.records)
        if call.state is not None:
            call.response_id = front_app.answer_id(call.state)[:MAX_TEXT] or call.response_id
        call.filed = {name for name in (call.request_id, call.response_id) if name}
        self._by_id.update(dict.fromkeys(call.filed, call))
        while max(len(self._served), len(self._by_key)) > self._limit:
            self._drop(next(iter(self._served)))
        if len(self._refused) > self._limit:
            self._drop(next(iter(self._refused)))

    def _drop(self, call: HttpCall) -> None:
        self._served.pop(call, None)
        self._refused.pop(call, None)
        for name in call.filed:
            if self._by_id.get(name) is call:
                del self._by_id[name]
        for record in call.records:
            if self._by_key.get(record.key) is record:
                del self._by_key[record.key]

    # ---------------------------------------------------------------- engine requests

    def begin(self, record: RequestRecord) -> HttpCall:
        """Enter an engine request into its call. Returns the call."""
        call = _call.get() or HttpCall(record.key)
        if len(call.records) < MAX_PARTS:
            call.records.append(record)
            self._file(call)
        else:
            call.more += 1
        return call

    def sent(self, wire_id: str, record: RequestRecord, to: SentTo) -> None:
        """Note a dispatch. wire_id: of the request at the worker, by which its record will come."""
        record.sent.append(to)
        self._open[wire_id] = record
        if len(self._open) > self._limit:
            self._open.popitem(last=False)

    def over(self, record: RequestRecord, made: int = 0, error: str = "") -> None:
        """Note that an engine request has ended.

        made: tokens of its answer. error: why it failed. Without an error and without
        `RequestRecord.answered` its client has left."""
        record.over_at, record.error = time.monotonic(), error[:MAX_ERROR]
        record.answer_tokens = made
        if error:
            record.answer_ms = (record.over_at - record.arrived) * 1000.0
            self._tell(record)
        _send_spans(record, error or ("aborted" if record.answer_ms is None else ""))

    def take(self, payload: Any) -> None:
        """Keep the records that a worker sent, but those of unknown requests. Raises BadMessage."""
        for told in front_wire.decode_explain(payload):
            if (record := self._open.pop(told.request_id, None)) is not None:
                self.tell(record, told)

    def tell(self, record: RequestRecord, told: ExplainRecord) -> None:
        """Keep what was told of a request."""
        record.told = told
        self._tell(record)
        self._news.set()

    def _tell(self, record: RequestRecord) -> None:
        self._serial += 1
        record.serial = self._serial
        self._told.append((self._serial, record))

    # ---------------------------------------------------------------- reading

    def since(self, serial: int) -> Iterator[RequestRecord]:
        """Yield the records that came after the one with this number, newest first."""
        for number, record in reversed(self._told):
            if number <= serial:
                return
            if number == record.serial:
                yield record

    async def settled(self, request_id: str) -> None:
        """Wait until everything is known of the request with this id that has just ended."""
        try:
            async with asyncio.timeout(self._wait_s):
                while (found := self._find(request_id)) and found.unsettled(self._wait_s):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pass

    def _find(self, request_id: str) -> HttpCall | RequestRecord | None:
        name = request_id[:MAX_TEXT]
        return self._by_id.get(name) or self._by_key.get(name)

    def get(self, request_id: str) -> Explained | None:
        """Return the record of the newest call with this id.

        Logs and the live page name engine requests. Such an id finds that one, if no call has it.
        """
        found = self._find(request_id)
        if isinstance(found, HttpCall):
            return found.explained(request_id[:MAX_TEXT])
        return None if found is None else found.explained()
