"""The live page at /pullfill/ui, and the events that it and `pullfill top` show.

    /pullfill/ui               the page
    /pullfill/ui/NAME          its style, scripts and icon
    /pullfill/ui/events        server-sent events: each is a `Snapshot` (pullfill/snapshot.py)
    /pullfill/ui/requests/ID   as /pullfill/requests/ID

All paths are relative to the page, so a proxy may serve it below a prefix. `http_auth` decides who
may see it. The page loads nothing from elsewhere and has no inline script or style, which its
Content-Security-Policy enforces. What requests and workers are called is shown as text only.

`EventStream` is ours because sse-starlette, once used, looks twice a second for ever whether the
server ends, and replaces a method of uvicorn's server. Here nothing may run when nobody looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pullfill.errors import OverloadedError
from pullfill.frontend.live_view import LiveView
from pullfill.runtime import log

_log = log.get("frontend.live_page")

FILES = Path(__file__).parent / "ui"
SEND_S = 10.0
"""A viewer that takes nothing for so long is disconnected."""
RETRY_MS = 1000
"""How soon a browser connects again when the frontend has gone."""
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    # After an upgrade the page must not run with the scripts of before.
    "cache-control": "no-cache",
}
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class EventStream(Response):
    """Server-sent events, one for each body of JSON in one line. Ends with its source.

    An empty body becomes a comment, which viewers ignore: the connection is alive.
    It ends at once when the client disconnects, or takes nothing for SEND_S seconds."""

    def __init__(self, source: AsyncIterator[bytes]) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )
        del self.headers["content-length"]
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        tasks = [asyncio.create_task(self._events(send)), asyncio.create_task(_gone(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _events(self, send: Send) -> None:
        try:
            await _send(send, b"retry: %d\n\n" % RETRY_MS)
            async for body in self._source:
                await _send(send, b"data: %b\n\n" % body if body else b": \n\n")
            await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            _log.warning("disconnected a viewer that read nothing for %g s", SEND_S)
        except OSError:
            pass  # it has gone
        finally:
            await self._source.aclose()  # type: ignore[attr-defined]


async def _send(send: Send, body: bytes) -> None:
    async with asyncio.timeout(SEND_S):
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _gone(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def routes(live: LiveView, request: Callable[[Request], Awaitable[Response]]) -> list[Route]:
    """Return the routes of the page. request: answers /pullfill/requests/ID."""

    async def page(_: Request) -> Response:
        return FileResponse(FILES / "index.html", media_type="text/html", headers=HEADERS)

    async def slash(_: Request) -> Response:
        return RedirectResponse("../ui", headers=HEADERS)

    async def file(found: Request) -> Response:
        name = found.path_params["name"]
        path = FILES / name
        if path.suffix not in _TYPES or path not in FILES.iterdir():
            return JSONResponse({"error": f"the page has no file {name!r}"}, status_code=404)
        return FileResponse(path, media_type=_TYPES[path.suffix], headers=HEADERS)

    async def events(_: Request) -> Response:
        try:
            return EventStream(live.watch())
        except OverloadedError as exc:
            headers = {"retry-after": "5"}
            return JSONResponse({"error": str(exc)}, status_code=503, headers=headers)

    return [
        Route("/pullfill/ui", page),
        Route("/pullfill/ui/", slash),
        Route("/pullfill/ui/events", events),
        Route("/pullfill/ui/requests/{request_id:path}", request),
        Route("/pullfill/ui/{name}", file),
    ]
