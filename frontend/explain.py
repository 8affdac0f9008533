"""Why and how recent requests were served, for `pullfill explain` and GET /pullfill/requests/ID.

A `Call` is one HTTP request. The engine sees a request, our `Trace`, for each of its prompts,
choices and beams. `Admission` opens the call in the context of the HTTP request, so each engine
request finds its call there. Clients know a call by its X-Request-Id and by the `id` of its answer,
which vLLM notes in the state of the HTTP request. Thus no id is guessed from another.

Bounded: the oldest call goes first. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pullfill.engine import front_app, front_wire, request_targets
from pullfill.engine.migration import choice_of
from pullfill.snapshot import Explained
from pullfill.wire import MAX_TEXT, DecodeChoice, ExplainRecord

MAX_RECORDS = 10_000
MAX_PARTS = 32
"""Engine requests of one call that are kept. A beam search makes one for each beam and token."""
MAX_SAME = 20
"""Calls that one id finds. A client may send all its requests with the same X-Request-Id."""
MAX_ERROR = 1000
WAIT_S = 0.5
"""A worker tells of an answer that a stop string has ended after its next step. Less than other
frontends wait (`cluster.FETCH_TIMEOUT_S`)."""
_HEADER = b"x-request-id"
_ERROR_EVENTS = (b'data: {"error"', b"event: error", b"event: response.failed")
"""How an event begins that ends a stream with an error."""
_MOST = max(map(len, _ERROR_EVENTS))

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

_call: ContextVar[Call | None] = ContextVar("call", default=None)
"""The HTTP request that is being served."""


@dataclass(slots=True, eq=False)
class Call:
    """One HTTP request that needs an engine. Without HTTP: one engine request.

    request_id: its X-Request-Id. We make one if the client sent none, and add it to the answer.
    response_id: the `id` of its answer. Empty: not known yet.
    state: ASGI's, until it has ended.
    status: of HTTP. 0: no answer has begun.
    error: what the client was told.
    traces: its first engine requests. more: number of the others.
    filed: the ids that find it."""

    request_id: str
    response_id: str = ""
    state: MutableMapping[str, Any] | None = None
    status: int = 0
    error: str = ""
    ended: bool = False
    arrived_at: float = field(default_factory=time.time)
    traces: list[Trace] = field(default_factory=list)
    more: int = 0
    filed: set[str] = field(default_factory=set)

    def names(self) -> set[str]:
        if self.state is not None:
            self.response_id = front_app.answer_id(self.state)[:MAX_TEXT] or self.response_id
        return {name for name in (self.request_id, self.response_id) if name}

    def noting(self, send: Send, begun: Callable[[Call], None], *, made: bool) -> Send:
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
                self.error = self.error or _reason(body)
            return send(message)

        return noted

    @property
    def state_now(self) -> str:
        """`running`, `failed`, `cancelled` (its client has left) or `answered`."""
        if not self.ended or any(trace.over_at is None for trace in self.traces):
            return "running"
        if self.status >= 400 or self.error or any(trace.error for trace in self.traces):
            return "failed"
        cut = any(trace.answer_ms is None for trace in self.traces)
        return "cancelled" if cut or not (self.traces or self.status) else "answered"


def _reason(body: bytes) -> str:
    """Return what an error says that a client gets: JSON, or an event with it."""
    text = bytes(body).decode("utf-8", "replace")
    try:
        found = json.JSONDecoder().raw_decode(text, max(0, text.find("{")))[0]
        told = found.get("error") or found.get("response", {}).get("error") or found
        text = told["message"] if isinstance(told, dict) else told
    except (ValueError, KeyError, AttributeError):
        pass  # a text
    return str(text)[:MAX_ERROR]


@dataclass(slots=True, eq=False)
class Trace:
    """What the frontend itself knows of one engine request.

    key: see `key_of`.
    migrated_from: the decode workers that it has left.
    migrated_tokens: number of tokens that were out when it left the last one.
    decode_choice: how its last decode worker was chosen.
    arrived_at: when it came, in seconds since 1970.
    answer_ms: from then to the end of its answer. None: it has not ended, or was cancelled.
    answer_tokens: length of its answer.
    targets_ms: what it names for TTFT and ITL. None: nothing.
    serial: number of its record in the order of their coming.
    record: its worker's. None: it has not come.
    worker: the last decode worker that it was sent to. Empty: none.
    over_at: `time.monotonic` when it had ended.
    error: why it failed. Empty: it did not. failed_at: when, in seconds since 1970."""

    key: str
    route_ms: float | None = None
    first_token_ms: float | None = None
    migrated_from: list[str] = field(default_factory=list)
    migrated_tokens: int = 0
    decode_choice: DecodeChoice | None = None
    arrived_at: float = 0.0
    answer_ms: float | None = None
    answer_tokens: int = 0
    targets_ms: tuple[float | None, float | None] = (None, None)
    serial: int = 0
    call: Call | None = field(default=None, repr=False)
    prompt_tokens: int = 0
    record: ExplainRecord | None = None
    worker: str = ""
    over_at: float | None = None
    error: str = ""
    failed_at: float | None = None

    @property
    def owed(self) -> bool:
        """Whether its worker's record is still to come."""
        if self.record is not None or self.error or not self.worker or self.over_at is None:
            return False
        return time.monotonic() - self.over_at < WAIT_S

    def ended(self, arrived: float, tokens: int, params: Any) -> None:
        """Note that its answer has ended.

        arrived: `time.monotonic` when it came. params: vLLM's SamplingParams."""
        self.answer_ms = (time.monotonic() - arrived) * 1000.0
        self.answer_tokens = tokens
        self.targets_ms = request_targets.targets(params)


def key_of(request_id: str, external_id: str | None) -> str:
    """`0_cmpl-x-0-1234abcd` with external id `cmpl-x-0` → `0_cmpl-x-0`. MAX_TEXT at most."""
    if not external_id:
        return request_id[:MAX_TEXT]
    choice = choice_of(request_id, external_id)
    return (f"{choice}_{external_id}" if choice else external_id)[:MAX_TEXT]


def refused_id(request_id: str) -> str:
    """Return why a request with this id is refused. Empty: it is not. Clients choose ids."""
    if len(request_id) <= MAX_TEXT:
        return ""
    return f"the request's id has {len(request_id)} characters: give one of at most {MAX_TEXT}"


class ExplainStore:
    """The calls of the last `limit` engine requests, and the last `limit` calls that had none."""

    def __init__(self, limit: int = MAX_RECORDS) -> None:
        self._limit = limit
        self._open: OrderedDict[str, Trace] = OrderedDict()
        # A flood of refusals pushes out no request that was served.
        self._served: OrderedDict[Call, None] = OrderedDict()
        self._refused: OrderedDict[Call, None] = OrderedDict()
        self._by_id: dict[str, list[Call]] = {}
        self._by_key: dict[str, Trace] = {}
        self._told: OrderedDict[Trace, None] = OrderedDict()
        self._serial = 0
        self._news = asyncio.Event()

    # ---------------------------------------------------------------- calls

    def arrived(self, scope: MutableMapping[str, Any], send: Send) -> tuple[Call, Send]:
        """Open the call of an HTTP request, in its context. Returns the `send` to use for it."""
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        name = given.decode("latin-1")[:MAX_TEXT] or uuid.uuid4().hex
        call = Call(name, state=scope.setdefault("state", {}))
        _call.set(call)
        return call, call.noting(send, self._file, made=not given)

    def ended(self, call: Call) -> None:
        """Note that an HTTP request has its whole answer, or that its client has left."""
        call.ended = True
        self._file(call)
        call.state = None
        self._news.set()

    def begin(self, trace: Trace) -> Call:
        """Enter an engine request into its call. Returns the call."""
        trace.call = call = _call.get() or Call(trace.key, ended=True)
        if len(call.traces) < MAX_PARTS:
            call.traces.append(trace)
            self._file(call)
        else:
            call.more += 1
        return call

    def _file(self, call: Call) -> None:
        """Let all its ids find a call, and make it the newest."""
        self._drop(call)
        (self._served if call.traces else self._refused)[call] = None
        self._by_key.update((trace.key, trace) for trace in call.traces)
        for name in call.names():
            same = self._by_id.setdefault(name, [])
            same.append(call)
            call.filed.add(name)
            if len(same) > MAX_SAME:
                oldest = same.pop(0)
                oldest.filed.discard(name)
                if not oldest.filed:
                    self._drop(oldest)
        while max(len(self._served), len(self._by_key)) > self._limit:
            self._drop(next(iter(self._served)))
        while len(self._refused) > self._limit:
            self._drop(next(iter(self._refused)))

    def _drop(self, call: Call) -> None:
        self._served.pop(call, None)
        self._refused.pop(call, None)
        for name in call.filed:
            self._by_id[name].remove(call)
            if not self._by_id[name]:
                del self._by_id[name]
        call.filed.clear()
        for trace in call.traces:
            if self._by_key.get(trace.key) is trace:
                del self._by_key[trace.key]

    # ---------------------------------------------------------------- engine requests

    def open(self, wire_id: str, trace: Trace) -> None:
        """Remember what request goes by `wire_id` at a worker, until its record comes."""
        if trace.call is None:
            self.begin(trace)
        self._open[wire_id] = trace
        if len(self._open) > self._limit:
            self._open.popitem(last=False)

    def over(self, trace: Trace, error: str = "") -> None:
        """Note that an engine request has ended. error: why it failed."""
        trace.over_at, trace.error = time.monotonic(), error[:MAX_ERROR]
        if error:
            trace.failed_at = time.time()
            self._tell(trace)

    def take(self, payload: Any) -> None:
        """Keep the records that a worker sent. Raises BadMessage."""
        for record in front_wire.decode_explain(payload):
            self.put(record)

    def put(self, record: ExplainRecord) -> None:
        """Keep a worker's record. Unknown requests are dropped."""
        trace = self._open.pop(record.request_id, None)
        if trace is not None:
            trace.record = record
            self._tell(trace)
            self._news.set()

    def _tell(self, trace: Trace) -> None:
        self._serial += 1
        trace.serial = self._serial
        self._told.pop(trace, None)
        self._told[trace] = None
        if len(self._told) > self._limit:
            self._told.popitem(last=False)

    # ---------------------------------------------------------------- reading

    def since(self, serial: int) -> Iterator[tuple[ExplainRecord, Trace]]:
        """Yield the records that came after the one with this number, newest first."""
        for trace in reversed(self._told):
            if trace.serial <= serial:
                return
            yield _record_of(trace), trace

    async def settled(self, request_id: str) -> None:
        """Wait until everything is known of the requests with this id that have just ended."""
        try:
            async with asyncio.timeout(WAIT_S):
                while any(map(_unsettled, self._calls(request_id[:MAX_TEXT]))):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pass

    def _calls(self, request_id: str) -> Sequence[Call]:
        if calls := self._by_id.get(request_id):
            return calls
        trace = self._by_key.get(request_id)
        return [] if trace is None or trace.call is None else [trace.call]

    def get(self, request_id: str) -> Explained | None:
        """Return the record of the newest call with this id, with those of the other calls.

        Logs and the live page name engine requests. Such an id finds that one, if no call has it.
        """
        request_id = request_id[:MAX_TEXT]
        calls = self._by_id.get(request_id)
        if not calls:
            trace = self._by_key.get(request_id)
            return None if trace is None else _of_trace(trace)
        found = [_of_call(call, request_id) for call in reversed(calls)]
        others = tuple(msgspec.structs.replace(one, parts=()) for one in found[1:])
        return msgspec.structs.replace(found[0], same_id=others)


def _unsettled(call: Call) -> bool:
    if any(trace.owed for trace in call.traces):
        return True
    # The client may have its last byte, and the application not have returned yet.
    return bool(call.status) and not call.ended and all(trace.over_at for trace in call.traces)


def _of_call(call: Call, request_id: str) -> Explained:
    """What is known of a call, in the record of its first engine request."""
    parts = tuple(map(_of_trace, call.traces))
    return msgspec.structs.replace(
        parts[0] if parts else _of_trace(Trace(request_id)),
        request_id=request_id,
        state=call.state_now,
        status=call.status,
        error=call.error or next((part.error for part in parts if part.error), None),
        arrived_at=call.arrived_at,
        parts=parts[1:],
        more_parts=call.more,
    )


def _record_of(trace: Trace) -> ExplainRecord:
    """Its worker's record, or what this frontend knows of it."""
    return trace.record or ExplainRecord(
        request_id=trace.key,
        path="unknown" if trace.worker else "none",
        reason="",
        prompt_tokens=trace.prompt_tokens,
        prefix_hit_tokens=0,
        remote_tokens=0,
        decode_instance=trace.worker,
    )


def _of_trace(trace: Trace) -> Explained:
    """Combine what a worker and this frontend know about one engine request."""
    record = _record_of(trace)
    told = {name: getattr(record, name) for name in record.__struct_fields__}
    told["timings_ms"] = msgspec.structs.replace(
        record.timings_ms, route=trace.route_ms, first_token=trace.first_token_ms
    )
    left = trace.migrated_from
    if trace.error and left and left[-1] == trace.worker:
        left = left[:-1]  # it has left this worker, but no other has continued it
    return Explained(**told | {
        "request_id": trace.key,
        "error": trace.error or None,
        "migrated_from": tuple(left),
        "migrated_tokens": trace.migrated_tokens,
        "decode_choice": trace.decode_choice,
    })  # fmt: skip


def to_json(record: Explained) -> bytes:
    """The JSON of `GET /pullfill/requests/ID` (docs/wire.md)."""
    return msgspec.json.encode(record)
