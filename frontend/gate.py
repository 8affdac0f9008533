"""HTTP admission: requests that need an engine wait briefly for one, then get 503.

Without this a streamed request would be answered 200 before vLLM finds that there is nobody to
send it to. ASGI middleware: one extra call per request, none per streamed chunk. The bound on
requests in flight (429) belongs here too.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from pullfill.frontend import metrics
from pullfill.frontend.dispatch import NO_WORKER, NO_WORKER_WAIT_S

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ENGINE_PATHS = frozenset({
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses",
    "/v1/messages", "/v1/embeddings", "/v1/score", "/v1/rerank", "/generate",
    "/inference/v1/generate", "/invocations", "/pooling", "/classify", "/score", "/rerank",
})  # fmt: skip


class Gate:
    """wait_ready(seconds): whether a decode worker can take requests, waiting up to that long."""

    def __init__(self, app: App, wait_ready: Callable[[float], Awaitable[bool]]) -> None:
        self._app = app
        self._wait_ready = wait_ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and scope["method"] == "POST"
            and scope["path"] in ENGINE_PATHS
            and not await self._wait_ready(NO_WORKER_WAIT_S)
        ):
            metrics.REFUSED.inc()
            await respond(send, 503, NO_WORKER, "ServiceUnavailableError", retry_after_s=1)
            return
        await self._app(scope, receive, send)


async def respond(
    send: Send, status: int, message: str, kind: str, *, retry_after_s: int | None = None
) -> None:
    """Send an error as OpenAI clients expect it."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % retry_after_s))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
