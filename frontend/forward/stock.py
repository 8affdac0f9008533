"""`--forwarder staged` and `parallel`: prefill at one stock vLLM server, decode at another.

    staged     prefill server → its answer → the decode server that suits best now
    parallel   both are asked at once

A stage that fails is repeated at another server, with a new prefill, until the first byte of the
answer has been sent. After a server broke off, or after a 500, a request is repeated once only: it
may be why.

Bytes of a stream go on unchanged and at once, but only up to the end of an event. So if the server
breaks off in the middle of one, the client gets whole events, then vLLM's error event and `[DONE]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from starlette.types import Receive, Scope, Send

from pullfill.frontend.admission import error_of, respond, send_json
from pullfill.frontend.forward.protocols import Stages
from pullfill.frontend.forward.servers import Pick, Server, Servers, prompt_of, to_json
from pullfill.frontend.request_log import RequestRecord, error_in
from pullfill.frontend.routing.choice import Prompt
from pullfill.options import ForwarderName
from pullfill.runtime.lifecycle import end
from pullfill.wire import ForwardStage

ATTEMPTS = 4
# So often a request is sent that servers break off at, and so often one that they answer with
# 500. A prefill server that ends causes one of each: its KV cannot be read, then it breaks off.
RISKY = 2
# A decode server may be silent for so much longer if the answer is not streamed.
WHOLE = 10
MAX_ID = 128
_BUSY = (429, 503)
_ERROR_EVENT = b'data: {"error"'
NEEDS_PREFILL = (
    "servers of this protocol need a prefill for each request, and this one can have none ({}): "
    "send one prompt with one choice to /v1/completions or /v1/chat/completions"
)
# Paths whose requests may have a prefill stage of their own, and how the ids of answers begin.
_TWO_STAGES = {"/v1/completions": "cmpl-", "/v1/chat/completions": "chatcmpl-"}
# Headers of the client's that vLLM reads. No others are passed on: they may hold keys, cookies or
# tokens of a proxy, and those are for this frontend.
_PASSED_ON = frozenset({
    b"traceparent", b"tracestate", b"x-session-id", b"x-vllm-priority", b"x-data-parallel-rank",
    b"endpoint-load-metrics-format",
})  # fmt: skip
# Headers of a server's answer that are not passed back.
_NOT_BACK = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "date", "server", "trailer"}
)
# The end of an event.
END = b"\n\n"
_DROPPED = (
    "stream_options", "min_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "best_of", "n",
    "echo", "return_token_ids", "return_tokens_as_token_ids", "stop", "stop_token_ids",
)  # fmt: skip


@dataclass(eq=False)
class StageFailed(Exception):
    """A server has not answered as it must.

    server: the server. None: there is none.
    again: whether another server may do better.
    lost: it could not be reached, or broke off. Then it gets no more requests for now.
    unsent: it has not got the request.
    status, body: its answer, if it is one of vLLM's errors. status is 504 if it was too slow."""

    server: Server | None
    why: str
    again: bool = True
    lost: bool = False
    unsent: bool = False
    status: int = 0
    body: bytes = b""


@dataclass(slots=True)
class Answer:
    """An answer whose head and first bytes have come.

    status: that of the error, if the first event of a stream is one of vLLM's of 500 or more.
    first: its first bytes; all of it unless `events`. events: it is a stream of events."""

    server: Server
    response: aiohttp.ClientResponse
    status: int
    first: bytes
    events: bool

    async def blocks(self, silence_s: float) -> AsyncGenerator[bytes, None]:
        """Yield the answer as it comes, in blocks of whole events. Raises StageFailed if it breaks
        off. What came of an event is dropped then."""
        held = self.first
        self.server.streams += 1
        try:
            while self.events:
                if (end := held.rfind(END) + len(END)) >= len(END):
                    yield held[:end]
                    held = held[end:]
                # Not around `yield`: there the caller waits for its client.
                async with self.server.watched():
                    chunk = await self.response.content.readany()
                if not chunk:
                    break
                held += chunk
            if held or not self.events:
                yield held
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise failure(self.server, exc, silence_s) from exc
        finally:
            self.server.streams -= 1


# --------------------------------------------------------------------------- requests


def whole_because(path: str, body: dict[str, Any] | None) -> str:
    """Return why a request has no prefill stage and goes to a decode server as it came.

    Empty: it can have one. Parameters of a prefill are for one prompt and one choice: with more,
    vLLM would give those of the first to all."""
    if path not in _TWO_STAGES:
        return "path"
    if body is None:
        return "not_json"
    if body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1):
        return "choices"
    if body.get("use_beam_search"):
        return "beam_search"
    # KV that comes from elsewhere has no log probabilities of the prompt's tokens.
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if body.get("echo"):
        return "echo"
    if path == "/v1/completions":
        prompt = body.get("prompt")
        if body.get("prompt_embeds") is not None:
            return "prompt_embeds"
        if isinstance(prompt, list) and not all(type(item) is int for item in prompt):
            return "prompts"
    return ""


def prefill_body(body: dict[str, Any], kv: dict[str, Any]) -> bytes:
    """Return the body of the prefill stage: one token, not streamed.

    A token that ends the answer is ignored here. Most connectors give no KV of a prompt whose
    answer has ended by itself: MoRI-IO, Mooncake, and NIXL in older releases."""
    changed = {key: value for key, value in body.items() if key not in _DROPPED}
    changed |= {"stream": False, "max_tokens": 1, "ignore_eos": True, "kv_transfer_params": kv}
    if "max_completion_tokens" in body:
        changed["max_completion_tokens"] = 1
    return to_json(changed)


def decode_body(body: dict[str, Any], kv: dict[str, Any] | None) -> bytes:
    """Return the body of the decode stage. Parameters of the client's are dropped.

    kv: None: it has no prefill stage."""
    changed = {key: value for key, value in body.items() if key != "kv_transfer_params"}
    if kv is not None:
        changed["kv_transfer_params"] = kv
    return to_json(changed)


@dataclass(slots=True)
class ClientCall:
    """One request.

    scope: ASGI's.
    path: without the root path.
    body: the whole body. json: its object, or None if it is something else.
    request_id: id for both stages, without dashes. The client's `X-Request-Id`, if it sent one.
    prompt: what the policies need of it.
    whole: why it has no prefill stage. Empty: it has one.
    record: what is told of it. Its key becomes the `id` of the answer, once that is known. Without
    `first_token_ms` no byte of an answer was sent.
    stages: what was done.
    bad: servers that failed it. risky: how often, by whether they answered (RISKY).
    picks: what counts in the load of servers until the attempt has ended."""

    scope: Scope
    path: str
    body: bytes
    json: dict[str, Any] | None
    request_id: str
    prompt: Prompt
    whole: str
    record: RequestRecord
    stages: list[ForwardStage] = field(default_factory=list)
    bad: set[Server] = field(default_factory=set)
    picks: list[Pick] = field(default_factory=list)
    risky: Counter[bool] = field(default_factory=Counter)

    @classmethod
    def of(cls, scope: Scope, path: str, body: bytes) -> ClientCall:
        """Return the call for an HTTP request whose body has come."""
        asked = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        good = 0 < len(asked) <= MAX_ID and asked.isascii() and asked.isprintable()
        try:
            found = json.loads(body)  # as vLLM does: it also reads NaN and UTF-16
        except (ValueError, RecursionError):
            found = None
        read = found if isinstance(found, dict) else None
        request_id = asked if good else uuid.uuid4().hex
        record = RequestRecord(request_id, arrived_at=time.time())
        whole = whole_because(path, read)
        return cls(scope, path, body, read, request_id, prompt_of(read or {}), whole, record)

    def ms(self) -> float:
        """Return the milliseconds since it came."""
        return round((time.monotonic() - self.record.arrived) * 1000.0, 3)

    @contextlib.contextmanager
    def noted(self, stage: str, pick: Pick) -> Iterator[None]:
        """Note in `stages` what becomes of a stage."""
        begin, result = self.ms(), "ok"
        try:
            yield
        except StageFailed as exc:
            result = exc.why
            raise
        except asyncio.CancelledError:
            result = "cancelled"
            raise
        finally:
            self.stages.append(
                ForwardStage(
                    stage=stage,
                    server=pick.server.url,
                    result=result,
                    begin_ms=begin,
                    end_ms=self.ms(),
                    choice=pick.choice,
                )
            )


@dataclass(slots=True, eq=False)
class Stock:
    """Forwards requests to stock servers. tests/contract/test_forwarders.py checks its promises:

    1. The client gets one whole answer of one run. A stage is repeated only before the first byte
       of the answer has been sent. The token of a prefill stage is never shown.
    2. Bytes of a stream are passed on unchanged and at once, one event or more at a time.
    3. Errors have vLLM's form: a JSON object with `error`, or an event of that form in a stream
       that has begun, and then `[DONE]`.
    4. No request hangs: each wait has a limit, and a server that is lost ends its waits.
    5. When the client leaves, or the task is cancelled, all connections that were opened for the
       request are closed before `forward` returns. vLLM aborts a request whose connection is
       closed.
    6. `ClientCall.stages` says what was tried, in order.

    silence_s: longest silence of a server during a stage."""

    name: ForwarderName
    servers: Servers
    silence_s: float

    def trouble(self) -> str:
        """Return why no request can be served now: no decode server, or wrong prefill servers."""
        if not self.servers.ready("decode"):
            return self.servers.none_ready("decode")
        return "" if self._may_skip() else self.servers.none_ready("prefill")

    def suits(self, call: ClientCall) -> bool:
        """Return whether the decode servers can serve it: see `KvProtocol.pairs`."""
        return not (self.servers.protocol.pairs and call.whole)

    async def forward(self, call: ClientCall, receive: Receive, send: Send) -> None:
        """Answer the request. receive: what comes after the body, so it tells of a disconnect."""
        # In a task of its own, which is cancelled when the client leaves. All it has opened is
        # closed on its way out.
        work = asyncio.create_task(self._serve(call, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            await end(work, gone)

    # ---------------------------------------------------------------- attempts

    async def _serve(self, call: ClientCall, send: Send) -> None:
        failed: StageFailed | None = None
        for _ in range(ATTEMPTS):
            try:
                await self._attempt(call, send)
                return
            except StageFailed as exc:
                # That no server is left, or that one is lost after its error, tells less.
                lost = failed is not None and exc.lost and exc.server is failed.server
                if failed is None or not (lost or exc.server is None):
                    failed = exc
                self._failed(call, exc)
                if call.record.first_token_ms is not None:
                    await send({"type": "http.response.body", "body": broken(exc, call.path)})
                    return
                risky = max(call.risky.values(), default=0) >= RISKY
                if not exc.again or risky or not self.servers.ready("decode"):
                    break
            finally:
                for pick in call.picks:
                    pick.share.end()
                call.picks.clear()
        assert failed is not None
        if failed.body and message_of(failed.body):  # a server's own error
            await send_json(send, failed.status, failed.body)
        else:
            await respond(send, _status(failed), failed.why)

    async def _attempt(self, call: ClientCall, send: Send) -> None:
        """Go through the stages once, and pass the answer on. Raises StageFailed."""
        # These have no prefill stage and go to a decode server as they came: those that one prefill
        # cannot stand for (`whole_because`); those that a prefill server refuses as wrong (4xx), so
        # that the client gets the decode server's words; and all while every prefill server is
        # down. One that is only wrongly set up is no reason: then the error says what to change.
        if not call.whole and not self.servers.ready("prefill") and self._may_skip():
            call.whole = "no_prefill"
        if not self.suits(call):
            raise StageFailed(None, NEEDS_PREFILL.format(call.whole), again=False, status=400)
        if call.whole:
            await self._decode(call, None, self._pick(call, "decode"), send)
            return
        prefill, decode = self._pick(call, "prefill"), None
        if self.name is ForwarderName.PARALLEL or self.servers.protocol.pairs:
            decode = self._pick(call, "decode")
        stages = Stages(uuid.uuid4().hex, prefill.server, decode.server if decode else None)
        if self.name is ForwarderName.PARALLEL:
            assert decode is not None
            if await self._both(call, stages, prefill, decode, send):
                return
            computed = False
        else:
            computed = await self._prefill(call, stages, prefill)
        decode = decode or self._pick(call, "decode")
        await self._decode(call, stages if computed else None, decode, send)

    async def _both(
        self, call: ClientCall, stages: Stages, prefill: Pick, decode: Pick, send: Send
    ) -> bool:
        """Ask both at once. The first one that fails before the answer begins ends the other one.

        Returns False if the prefill has left no KV, and so no answer has begun."""
        first = asyncio.create_task(self._prefill(call, stages, prefill))
        second = asyncio.create_task(self._decode(call, stages, decode, send))
        try:
            await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            # A prefill server may say that it is done after the decode server has begun to answer.
            if call.record.first_token_ms is None and first.done() and not first.result():
                return False
            await second
            return True
        finally:
            await end(first, second)

    # ---------------------------------------------------------------- stages

    async def _prefill(self, call: ClientCall, stages: Stages, pick: Pick) -> bool:
        """Run the prefill stage. False: there is no KV, or the server calls the request wrong."""
        server = pick.server
        assert call.json is not None
        body = prefill_body(call.json, self.servers.protocol.prefill(stages))
        request_id = self.servers.protocol.request_id(stages, call.request_id)
        with call.noted("prefill", pick):
            async with self._ask(call, server, request_id, body) as answer:
                status, told = answer.status, answer.first
            pick.share.end()
            if status != 200:
                if self.servers.protocol.pairs:
                    text = f"{server.role} server {server.url} answers {status}"
                    raise StageFailed(None, text, again=False, status=status, body=told)
                call.whole = "prefill_refused"
                return False
            try:
                read = json.loads(told)
                stages.returned = read.get("kv_transfer_params")
                call.record.prompt_tokens = int(read["usage"]["prompt_tokens"])
            except (ValueError, KeyError, TypeError, AttributeError):
                raise self._lacks(server, "answered what vLLM does not answer") from None
            if lack := self.servers.protocol.lacks(stages):
                raise self._lacks(server, lack)
        if self.servers.protocol.empty(stages):
            call.whole = "no_kv"
        return not call.whole

    async def _decode(
        self, call: ClientCall, stages: Stages | None, pick: Pick, send: Send
    ) -> None:
        """Run the decode stage, and pass its answer on. stages: None: it has no prefill stage."""
        request_id, body, source = call.request_id, call.body, None
        if stages is not None:
            stages.decode, source = pick.server, stages.prefill
            assert call.json is not None
            body = decode_body(call.json, self.servers.protocol.decode(stages))
            request_id = self.servers.protocol.request_id(stages, request_id)
        elif call.json is not None and "kv_transfer_params" in call.json:
            body = decode_body(call.json, None)
        if prefix := _TWO_STAGES.get(call.path):
            call.record.key = prefix + request_id
        try:
            with call.noted("decode", pick):
                async with self._ask(call, pick.server, request_id, body, source) as answer:
                    await self._relay(call, answer, pick, send)
        except StageFailed as exc:
            begun = call.record.first_token_ms is not None
            if stages is not None and exc.status in (500, 504) and not begun:
                call.bad.add(stages.prefill)  # perhaps its KV cannot be read
                where = f"{stages.prefill.url} at {self.servers.protocol.kv_address(stages)}"
                exc.body = b""
                exc.why = (
                    f"{exc.why.rstrip('.')}. If its log tells of KV, look whether it reaches "
                    f"{where}; if it has another connector, {self.servers.protocol.start_with}"
                )
            raise

    @contextlib.asynccontextmanager
    async def _ask(
        self,
        call: ClientCall,
        server: Server,
        request_id: str,
        body: bytes,
        source: Server | None = None,
    ) -> AsyncIterator[Answer]:
        """Send a request to a server. Yields its answer: of a stream, as far as its first bytes.

        The connection stays open for the next request if the answer was read to its end. Else it
        is closed. Raises StageFailed.

        source: the prefill server whose KV the server reads before it answers."""
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in call.scope["headers"]
            if name in _PASSED_ON
        ]
        headers += [("content-type", "application/json"), ("x-request-id", request_id)]
        # An answer that is not streamed may be a long one.
        streamed = call.json is not None and call.json.get("stream") is True
        long = server.role == "decode" and not streamed
        silence_s = WHOLE * self.silence_s if long else self.silence_s
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=3.0, sock_read=silence_s)
        kv = source.watched(server) if source is not None else contextlib.nullcontext()
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with server.watched(), kv:
                    response = await self.servers.session.post(
                        server.url + call.path,
                        data=body,
                        headers=headers,
                        timeout=timeout,
                        allow_redirects=False,
                    )
                    stack.callback(response.close)
                    events = response.content_type == "text/event-stream"
                    first = await (response.content.readany() if events else response.read())
                    if events and not first:
                        raise aiohttp.ClientPayloadError("the answer is empty")
            except (aiohttp.ClientError, TimeoutError, OSError) as exc:
                raise failure(server, exc, silence_s, source) from exc
            status = response.status
            if events and first.startswith(_ERROR_EVENT):
                event = first.partition(b"\n")[0].removeprefix(b"data: ")
                code = error_in(event).get("code")
                if isinstance(code, int) and code >= 500:
                    status, events, first = code, False, event
            if status >= 500 or status in _BUSY:
                why = f"{server.role} server {server.url} answers {status}: {message_of(first)}"
                raise StageFailed(server, why, status=status, body=first)
            yield Answer(server, response, status, first, events)

    async def _relay(self, call: ClientCall, answer: Answer, pick: Pick, send: Send) -> None:
        """Pass an answer on to the client. Raises StageFailed if the server breaks off."""
        headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in answer.response.headers.items()
            if name.lower() not in _NOT_BACK
        ]
        head = {"type": "http.response.start", "status": answer.status, "headers": headers}
        events = 0  # about one for each token
        async with contextlib.aclosing(answer.blocks(self.silence_s)) as blocks:
            async for block in blocks:
                if call.record.first_token_ms is None:
                    pick.share.first()
                    call.record.first_token_ms = call.ms()
                    await send(head)
                events += block.count(END) or 1
                await send({"type": "http.response.body", "body": block, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        pick.share.end(events)

    # ---------------------------------------------------------------- inside

    def _pick(self, call: ClientCall, role: str) -> Pick:
        if (pick := self.servers.pick(role, call.prompt, call.bad)) is None:
            raise StageFailed(None, self.servers.none_ready(role), again=False, status=503)
        call.picks.append(pick)
        return pick

    def _failed(self, call: ClientCall, exc: StageFailed) -> None:
        """Take note of a failure, for the next choice."""
        if exc.server is None:
            return
        call.bad.add(exc.server)
        if exc.lost:
            self.servers.failed(exc.server, exc.why)
        if not exc.unsent and exc.status not in _BUSY:
            call.risky[exc.status > 0] += 1

    def _lacks(self, server: Server, what: str) -> StageFailed:
        """A prefill server is not set up for the protocol."""
        why = f"{server.role} server {server.url} {what}: {self.servers.protocol.start_with}"
        self.servers.lacks(server, why)
        return StageFailed(server, why, status=500)

    def _may_skip(self) -> bool:
        """Whether requests may come now: a prefill server is ready, or they may do without."""
        if self.servers.ready("prefill"):
            return True
        return not (self.servers.protocol.pairs or self.servers.count("prefill", "refused"))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# --------------------------------------------------------------------------- failures


def failure(
    server: Server, exc: Exception, silence_s: float, source: Server | None = None
) -> StageFailed:
    """Say in words why a server did not answer. exc: of aiohttp, or of `Server.watched`.

    source: the prefill server whose KV the server was to read, if any."""
    who = f"{server.role} server {server.url}"
    if isinstance(exc, aiohttp.ServerTimeoutError) and not isinstance(
        exc, aiohttp.ConnectionTimeoutError
    ):
        # Never again: it may be a request that each server is too slow for.
        text = f"{who} sent nothing for {silence_s:g} s"
        return StageFailed(server, text, again=False, status=504)
    if isinstance(exc, TimeoutError) and not isinstance(exc, aiohttp.ClientError):
        if source is not None and source.state != "ready":
            who, server = f"{who} waits for KV, and prefill server {source.url}", source
        return StageFailed(server, f"{who} is {server.state}: {server.why}")
    text = str(exc) or type(exc).__name__
    if isinstance(exc, aiohttp.ClientPayloadError):
        text = "in the middle of its answer"
    unsent = isinstance(exc, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    what = "cannot be reached" if unsent else "broke off"
    why = f"{who} {what} ({text}): look whether it runs, and at its log"
    return StageFailed(server, why, lost=True, unsent=unsent)


def message_of(body: bytes) -> str:
    """Return the text of vLLM's error. Empty: it is none."""
    return str(error_in(body).get("message", ""))[:300]


# --------------------------------------------------------------------------- to the client


def _status(failed: StageFailed) -> int:
    return failed.status if failed.status in (400, 500, 504) else 503


def broken(failed: StageFailed, path: str) -> bytes:
    """Return the end of a stream that cannot go on, as vLLM writes it."""
    error = error_of(_status(failed), failed.why)
    if path == "/v1/messages":  # Anthropic's form
        told = {"type": "error", "error": {key: error[key] for key in ("type", "message")}}
        return b"event: error\ndata: " + json.dumps(told).encode() + b"\n\n"
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n"
