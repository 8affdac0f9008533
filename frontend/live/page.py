"""The live page at /pullfill/ui, and the snapshots that it and `pullfill top` show.

    /pullfill/ui               the page
    /pullfill/ui/NAME          its style, scripts and icon
    /pullfill/ui/events        server-sent events: each is a `LiveSnapshot` (pullfill/snapshot.py)
    /pullfill/ui/requests/ID   as /pullfill/requests/ID

All paths are relative to the page, so a proxy may serve it below a prefix. `http_auth` decides who
may see it. The page loads nothing from elsewhere and has no inline script or style, which its
Content-Security-Policy enforces. What requests and workers are called is shown as text only.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    JSONResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import Message, Send

from pullfill.errors import OverloadedError
from pullfill.frontend import counters
from pullfill.frontend.cluster_view import ClusterView
from pullfill.frontend.flight import Flight
from pullfill.frontend.live.history import Marks, Series, TokenMeter
from pullfill.frontend.live.rows import ended_of, flows_of
from pullfill.frontend.request_log import RequestLog
from pullfill.runtime import log
from pullfill.snapshot import HISTORY_S, RECENT, Ended, LiveSnapshot, WorkerPoint

# Each viewer gets something this often, at least. `pullfill top` gives up after 10 s.
QUIET_S = 5.0
# With more workers the snapshots are made less often, so that the cost stays the same.
WORKERS_A_SECOND = 16
MAX_VIEWERS = 32
# So many records of the past are counted before other callbacks of the event loop run.
_SLICE = 256
FILES = Path(__file__).parent.parent / "ui"
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

_log = log.get("frontend.live")


@dataclass(slots=True, eq=False)
class _Viewer:
    """pending: what it has not taken yet. behind: it needs a whole snapshot next."""

    fresh: asyncio.Event = field(default_factory=asyncio.Event)
    pending: bytes | None = None
    behind: bool = True

    def put(self, part: bytes, whole: Callable[[], bytes]) -> None:
        if self.behind:
            self.pending, self.behind = whole(), False
        elif self.pending is not None:
            self.behind = True
        else:
            self.pending = part
        self.fresh.set()


class LiveView:
    """Makes the snapshots, while somebody looks.

    The first viewer starts one task for all viewers. Each second it asks every worker for its
    report, takes what has ended from the request log, and gives every viewer the new snapshot as
    JSON, made once. When the last viewer has gone, the task ends. Then nothing is asked.

    A viewer that has not taken the last snapshot in time misses the next ones. It gets a whole one
    later, so what waits for a viewer is bounded.

    Single event loop. `close` ends all viewers: a frontend that drains does not wait for them.

    frontend: instance id of this frontend. since: when it started, in seconds since 1970.
    targets_ms: returns the targets of requests that name none.
    flights: returns the requests under way.
    frontends: returns how many frontends there are."""

    def __init__(
        self,
        view: ClusterView,
        requests: RequestLog,
        flights: Callable[[], Collection[Flight]],
        targets_ms: Callable[[], tuple[float, float]],
        *,
        frontend: str,
        model: str,
        since: float,
        frontends: Callable[[], int] = lambda: 1,
        period_s: float = 1.0,
        quiet_s: float = QUIET_S,
    ) -> None:
        self._view = view
        self._requests = requests
        self._flights = flights
        self._targets_ms = targets_ms
        self._frontends = frontends
        self._period_s, self._quiet_s = period_s, quiet_s
        self._frontend, self._model, self._since = frontend, model, since
        self.marks = Marks()
        self._series = Series()
        self._viewers: set[_Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._broken = False  # the last look has failed
        self._serial = 0
        self._ended: deque[Ended] = deque(maxlen=RECENT)
        self._meter = TokenMeter()

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    def watch(self) -> AsyncGenerator[bytes, None]:
        """Return snapshots as JSON until `close`. The first one is whole.

        If there is no snapshot for `quiet_s`, empty bytes are sent to show that the connection is
        alive. While snapshots fail nothing is sent, so viewers time out.
        Raises OverloadedError if there are too many viewers."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise OverloadedError(f"{MAX_VIEWERS} viewers look already: close another page")
        return self._watch()

    async def _watch(self) -> AsyncGenerator[bytes, None]:
        viewer = _Viewer()
        self._viewers.add(viewer)
        if self._task is None and not self._closed:
            self._task = asyncio.create_task(self._run(), name="live view")
        try:
            while not self._closed:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._quiet_s):
                        await viewer.fresh.wait()
                viewer.fresh.clear()
                body, viewer.pending = viewer.pending, None
                if body is not None or not (self._closed or self._broken):
                    yield body or b""
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self._stop()

    def close(self) -> None:
        """End all viewers. Later ones end at once."""
        self._closed = True
        self._stop()
        for viewer in self._viewers:
            viewer.fresh.set()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task = None
        self._meter.reset()

    # ---------------------------------------------------------------- the task

    async def _run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self._look()
                self._broken = False
            except Exception:
                self._broken = True
                _log.exception("no snapshot for the live page")
            workers = len(self._view.records())
            period_s = max(self._period_s, workers / WORKERS_A_SECOND)
            await asyncio.sleep(max(0.1 * period_s, period_s - (time.monotonic() - began)))

    async def _look(self) -> None:
        """Make one snapshot and give it to all viewers."""
        reports = await self._view.reports(jobs=True)
        ended = await self._take_ended()
        now, flights = time.time(), list(self._flights())
        answers = ((f.worker.instance_id, len(f.tokens)) for f in flights if f.worker is not None)
        seconds, tokens = self._meter.look(time.monotonic(), answers, ended)
        rates = {name: count / seconds for name, count in tokens.items()}
        cluster = self._view.cluster(reports, rates)
        self.marks.seen(cluster)
        points = {
            row.instance_id: WorkerPoint(row.kv, row.running, row.waiting, row.tokens_per_s)
            for row in cluster.workers
        }
        if seconds:
            self._series.sampled(now, seconds, sum(tokens.values()), cluster.backlog_s, points)
        flows, hidden = flows_of(flights, reports, time.monotonic())
        figures = self._series.now(now, sum(rates.values()))
        snapshot = LiveSnapshot(
            at=now,
            frontend=self._frontend,
            model=self._model,
            since=self._since,
            frontends=max(1, self._frontends()),
            targets_ms=self._targets_ms(),
            **msgspec.structs.asdict(cluster),
            now=msgspec.structs.replace(
                figures,
                backlog_s=cluster.backlog_s,
                in_flight=len(flights),
                failed=int(next(iter(counters.FAILED.collect())).samples[0].value),
            ),
            flows=flows,
            hidden=hidden,
            ended=tuple(ended[-RECENT:]),
            points=self._series.points(now, 2),
            marks=self.marks.marks(),
        )
        self._publish(snapshot)

    def _publish(self, snapshot: LiveSnapshot) -> None:
        @cache
        def whole() -> bytes:
            """The snapshot with the history, made at most once."""
            return msgspec.json.encode(
                msgspec.structs.replace(
                    snapshot,
                    whole=True,
                    ended=tuple(self._ended),
                    points=self._series.points(snapshot.at),
                )
            )

        part = msgspec.json.encode(snapshot)
        for viewer in self._viewers:
            viewer.put(part, whole)

    async def _take_ended(self) -> list[Ended]:
        """Return the requests that have ended since the last look, oldest first, and count them."""
        targets, oldest = self._targets_ms(), time.time() - HISTORY_S
        found, rows = list(self._requests.since(self._serial)), list[Ended]()
        # Before the first pause: a request that goes on elsewhere gets a new serial.
        self._serial = found[0].serial if found else self._serial
        for number, record in enumerate(found, 1):
            row = ended_of(record, targets)
            if row.at is not None and row.at < oldest:
                break
            self._series.ended(row)
            rows.append(row)
            if number % _SLICE == 0:
                await asyncio.sleep(0)  # streams go on
        rows.reverse()
        self._ended.extend(rows)
        return rows


# --------------------------------------------------------------------------- HTTP


# sse-starlette, once used, looks twice a second for ever whether the server ends, and replaces a
# method of uvicorn's server. Here nothing may run when nobody looks.
class EventStream(StreamingResponse):
    """Server-sent events, one for each body of JSON in one line. Ends with its source.

    An empty body becomes a comment, which viewers ignore: the connection is alive.
    It ends at once when the client disconnects, or takes nothing for `send_s` seconds."""

    def __init__(self, source: AsyncGenerator[bytes, None], send_s: float = 10.0) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(_events(source), headers=headers, media_type="text/event-stream")
        self._source = source
        self._send_s = send_s

    async def stream_response(self, send: Send) -> None:
        async def in_time(message: Message) -> None:
            async with asyncio.timeout(self._send_s):
                await send(message)

        try:
            await super().stream_response(in_time)
        except TimeoutError:
            _log.warning("disconnected a viewer that read nothing for %g s", self._send_s)
        except OSError:
            pass  # it has gone
        finally:
            await self._source.aclose()


async def _events(source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    # A browser connects again so many ms after the frontend has gone.
    yield b"retry: 1000\n\n"
    async for body in source:
        yield b"data: %b\n\n" % body if body else b": \n\n"


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

    async def events(asked: Request) -> Response:
        if asked.method == "HEAD":
            return Response(media_type="text/event-stream")
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
