"""HTTP admission control: refuses requests before vLLM sees them.

Only requests that need an engine or the tokenizer are checked. Health, metrics and status pass.
429: `max_inflight` requests are being served, from their headers to the end of their answers, or
their bodies have ALL_BYTES. 503: the request needs an engine, and no decode worker can take it.
413: vLLM's checks would take seconds for its body.

ASGI middleware. Single event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pullfill.engine import request_limits
from pullfill.frontend import counters
from pullfill.frontend.flight import WAITS
from pullfill.frontend.request_log import RequestLog
from pullfill.runtime import log

_log = log.get("frontend.admission")

ENGINE_PATHS = frozenset({
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses",
    "/v1/messages", "/cohere/v2/chat", "/v1/systemone", "/generative_scoring", "/generate",
    "/inference/v1/generate", "/invocations", "/pooling", "/classify", "/score", "/v1/score",
    "/rerank", "/v1/rerank", "/v2/rerank", "/v1/embeddings", "/v2/embed",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/decisions",
})  # fmt: skip
# Routes that need the tokenizer, but no engine.
TEXT_PATHS = frozenset({
    "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/chat/completions/render",
    "/v1/completions/render", "/v1/messages/render", "/v1/responses/render",
    "/cohere/v2/chat/render", "/v1/chat/completions/derender", "/v1/completions/derender",
})  # fmt: skip
BODY_BYTES = 256 << 20
# Most bytes of the bodies of all counted requests. vLLM keeps each until its answer has ended.
ALL_BYTES = 1 << 30
# Reading so many values takes about a second.
MOST_COMMAS = 1 << 23
# Elements of lists and members of objects, except for those in `_PLAIN`.
MOST_VALUES = 1 << 15
# Members that may hold many numbers or prompts, of which vLLM checks each in a moment.
_PLAIN = frozenset({
    "prompt", "tokens", "token_ids", "prompt_token_ids", "stop_token_ids", "allowed_token_ids",
    "logit_bias",
})  # fmt: skip
# Members that may hold many texts. Too many get 400 and the reason later (request_limits.py).
_TEXTS = frozenset({"stop", "bad_words"})
_REPORTS = "derender"
# The same for bodies that hold an answer with its log probabilities. Each has only one type.
_MOST_REPORTED = 1 << 20


@dataclass(slots=True, eq=False)
class Admission:
    """See the module.

    trouble: returns why nobody can take requests that need an engine. Empty: somebody can.
    wait_s: how long a request waits for somebody who can take it.
    body_s: how long a client may take to send its request.
    send_s: clients that read nothing for so long while their connection's buffers are full are
    disconnected. This frees their admission slot.
    max_inflight: most HTTP requests that are being served. One request may ask for several prompts
    and choices.
    requests: keeps what came of each request that needs an engine.
    in_flight: requests that have a place."""

    app: ASGIApp
    trouble: Callable[[], str]
    max_inflight: int
    wait_s: float = WAITS.first
    body_s: float = 60.0
    send_s: float = 120.0
    requests: RequestLog = field(default_factory=RequestLog)
    in_flight: int = 0
    _bytes: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = posted_to(scope)
        if path in ENGINE_PATHS:
            call, send = self.requests.arrived(scope, send)
            try:
                await self._admit(path, scope, receive, send)
            finally:
                self.requests.ended(call)
        elif path in TEXT_PATHS:
            await self._admit(path, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _admit(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if self.in_flight >= self.max_inflight:
            await self._refuse(
                send, 429, "full",
                f"{self.in_flight} requests are being served, and this frontend takes no more: "
                "send it again later, or to another frontend (--max-inflight sets the limit)",
            )  # fmt: skip
            return
        request_limits.begin(scope.get("headers", ()))
        parts: list[bytes] = []
        self.in_flight += 1
        try:
            async with unless_deaf(send, self.send_s) as timed:
                await self._serve(path, scope, receive, timed, parts)
        finally:
            self.in_flight -= 1
            self._bytes -= sum(map(len, parts))

    async def _serve(
        self, path: str, scope: Scope, receive: Receive, send: Send, parts: list[bytes]
    ) -> None:
        if not await self._read(receive, send, parts):
            return
        body = b"".join(parts)
        parts[:] = [body]
        if why := why_too_much(path, body):
            await self._refuse(send, 413, "too_large", why)
            return
        if half := lone_surrogate(body):
            await self._refuse(
                send, 400, "not_text",
                f"the request has {half}, half of a surrogate pair: no text can hold it. Send both "
                "halves, or leave it out",
            )  # fmt: skip
            return
        if path in ENGINE_PATHS:
            end = time.monotonic() + self.wait_s
            # Without this check a streamed request would get 200 before vLLM finds no worker.
            while (why := self.trouble()) and time.monotonic() < end:  # noqa: ASYNC110 - rare
                await asyncio.sleep(0.05)
            if why:
                await self._refuse(send, 503, "no_worker", why)
                return
        await self.app(scope, replay(body, receive), send)

    async def _read(self, receive: Receive, send: Send, parts: list[bytes]) -> bool:
        """Read all of the body into `parts`. False: the client went away, or was refused."""
        size, more = 0, True
        try:
            async with asyncio.timeout(self.body_s):
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        return False
                    parts.append(message.get("body", b""))
                    more, came = message.get("more_body", False), len(parts[-1])
                    size, self._bytes = size + came, self._bytes + came
                    if size > BODY_BYTES:
                        text = f"a request may have {BODY_BYTES >> 20} MiB"
                        await self._refuse(send, 413, "too_large", text)
                        return False
                    if self._bytes > ALL_BYTES:
                        text = (
                            f"the requests being served have {ALL_BYTES >> 20} MiB, and this "
                            "frontend takes no more: send it again later, or to another frontend"
                        )
                        await self._refuse(send, 429, "full", text)
                        return False
        except TimeoutError:
            text = f"the request did not arrive within {self.body_s:g} s"
            await self._refuse(send, 408, "too_slow", text)
            return False
        return True

    async def _refuse(self, send: Send, status: int, reason: str, message: str) -> None:
        counters.REFUSED.labels(reason).inc()
        await respond(send, status, message)


# --------------------------------------------------------------------------- bodies

# In JSON: an escaped backslash, or both halves of a pair.
_PAIR = re.compile(rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\xed[\xa0-\xbf][\x80-\xbf]")


def lone_surrogate(data: bytes) -> str:
    """Return the first unpaired surrogate in a JSON body. Empty: there is none.

    Python's JSON parser accepts it. But it cannot be encoded as UTF-8, nor tokenized."""
    coding = json.detect_encoding(data)
    if coding not in ("utf-8", "utf-8-sig"):
        with contextlib.suppress(UnicodeError):  # else vLLM says that it is no JSON
            data = data.decode(coding, "surrogatepass").encode("utf-8", "surrogatepass")
    if not (b"\\ud" in data or b"\\uD" in data or b"\xed" in data):
        return ""
    found = _HALF.search(_PAIR.sub(b"_", data))
    if found is None:
        return ""
    code = found[0].decode("utf-8", "surrogatepass")
    return code if len(code) > 1 else f"\\u{ord(code):04x}"


# vLLM reads and checks a body on the event loop. Meanwhile all streams wait, and after six seconds
# their workers take the frontend for dead. Valid values cost little. For each wrong one pydantic
# collects several errors. A body of 256 KiB, `"messages": [1, 1, …]`, takes seconds and gigabytes.
def why_too_much(path: str, body: bytes) -> str:
    """Return why the JSON body is refused, for the user. Empty: it is not.

    path: the route. A body that is no JSON passes: vLLM refuses it at once."""
    commas = body.count(b",")
    if commas > MOST_COMMAS:
        return f"a request may hold at most {MOST_COMMAS} commas: send it in parts"
    most = _MOST_REPORTED if path.endswith(_REPORTS) else MOST_VALUES
    if commas + body.count(b"{") + body.count(b"[") <= most:
        return ""  # each value has a comma before it, or is the first in its list or object
    if _values(_read(body), most) <= most:
        return ""
    return (
        f"the request holds more than {most} values, not counting tokens and prompts: send it in "
        "parts"
    )


def _read(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(body)  # reads more than JSON, such as NaN, and so does vLLM
    except (ValueError, RecursionError):
        return None


def _values(read: Any, most: int) -> int:
    """Count elements and members, in depth. Stops soon after `most`."""
    count, todo = 0, [read]
    while todo and count <= most:
        one = todo.pop()
        if isinstance(one, dict):
            count += len(one)
            todo += [value for key, value in one.items() if not _costs_little(key, value)]
        elif isinstance(one, list):
            count += len(one)
            if not set(map(type, one)) <= {int, float, str}:
                todo += one
    return count


def _costs_little(key: str, value: Any) -> bool:
    """Whether vLLM checks this member in a moment, however much it holds."""
    if key in _TEXTS:
        return isinstance(value, list) and set(map(type, value)) <= {str}
    return key in _PLAIN and _is_plain(value)


def _is_plain(value: Any) -> bool:
    """Whether it holds only numbers, only texts, or only lists of numbers."""
    if isinstance(value, dict):
        return set(map(type, value.values())) <= {int, float}
    if not isinstance(value, list):
        return True
    kinds = set(map(type, value))
    if kinds == {list}:
        return all(set(map(type, one)) <= {int} for one in value)
    return kinds <= {int} or kinds <= {str}


# --------------------------------------------------------------------------- ASGI


def route_of(scope: Scope) -> str:
    """Return the path without the scope's root path, as Starlette matches it with routes."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :]
    return path


def posted_to(scope: Scope) -> str:
    """Return `route_of` of a POST. Empty: it is none."""
    return route_of(scope) if scope["type"] == "http" and scope["method"] == "POST" else ""


@contextlib.asynccontextmanager
async def unless_deaf(send: Send, send_s: float) -> AsyncIterator[Send]:
    """Give a `send`. A client that takes none of its parts within `send_s` seconds ends the block.

    A part costs one read of the clock: a deadline that is moved for each costs ten times that."""
    loop, since, deaf = asyncio.get_running_loop(), math.inf, asyncio.timeout(None)
    timer = loop.call_later(send_s / 4, lambda: look())

    async def timed(message: Message) -> None:
        nonlocal since
        if deaf.expired():
            raise ConnectionError("the client reads nothing")
        since = loop.time()
        await send(message)
        since = math.inf

    def look() -> None:
        nonlocal timer
        if since < loop.time() - send_s:
            deaf.reschedule(loop.time())
        else:
            timer = loop.call_later(send_s / 4, look)

    try:
        async with deaf:
            yield timed
    except Exception:  # once it has expired, whatever the app makes of its end
        if not deaf.expired():
            raise
        _log.warning("disconnected a client that read nothing for %g s", send_s)
    finally:
        timer.cancel()


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first gives this whole body."""
    whole = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def read() -> Message:
        for message in whole:
            return message
        return await receive()

    return read


KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


def error_of(status: int, message: str) -> dict[str, Any]:
    """Return an error as OpenAI clients expect it, for JSON."""
    return {"message": message, "type": KINDS[status], "param": None, "code": status}


async def respond(
    send: Send, status: int, message: str, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Send an error."""
    retry = [(b"retry-after", b"1")] if status in (429, 503) else []
    body = json.dumps({"error": error_of(status, message)}).encode()
    await send_json(send, status, body, [*retry, *headers])


async def send_json(
    send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Send a whole answer."""
    length = b"%d" % len(body)
    head = [(b"content-type", b"application/json"), (b"content-length", length), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
