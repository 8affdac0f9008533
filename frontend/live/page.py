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
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import KW_ONLY, dataclass, field
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
from starlette.types import Send

from pullfill.frontend import counters
from pullfill.frontend.admission import unless_deaf
from pullfill.frontend.cluster_view import ClusterView
from pullfill.frontend.flight import Flight
from pullfill.frontend.live.rows import ended_at, ended_of, flows_of, minute_of
from pullfill.frontend.request_log import RequestLog
from pullfill.runtime import log
from pullfill.snapshot import FAILED, RECENT, Ended, LiveSnapshot, Reports

# Each viewer gets something this often, at least. `pullfill top` gives up after 10 s.
QUIET_S = 5.0
# With more workers the snapshots are made less often, so that the cost stays the same.
WORKERS_A_SECOND = 16
# All viewers get a snapshot at once, which keeps streams waiting for 0.25 ms each.
MAX_VIEWERS = 32
# So many records of the past are read before other callbacks of the event loop run.
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
class LiveView:
    """Makes the snapshots, while somebody looks.

    The first viewer starts one task for all viewers. Each second it asks every worker for its
    report, takes what has ended from the request log, and makes one snapshot. When the last viewer
    has gone, the task ends. Then nothing is asked.

    Each viewer takes the newest snapshot, so nothing waits for a viewer. Prometheus has the past.

    Single event loop. `close` ends all viewers: a frontend that drains does not wait for them.

    view: if this process is no frontend (alone.py), requests are those that no frontend has sent,
    as workers tell.
    model: empty: that of the workers.
    targets_ms: returns the targets of requests that name none.
    flights: returns the requests under way.
    made: returns how many tokens each decode worker has sent so far."""

    view: ClusterView
    requests: RequestLog
    flights: Callable[[], Collection[Flight]]
    targets_ms: Callable[[], tuple[float, float]]
    made: Callable[[], Mapping[str, int]]
    _: KW_ONLY
    model: str
    period_s: float = 1.0
    quiet_s: float = QUIET_S
    viewers: int = 0
    # When the last look was, and `made` at that time. None: nobody has looked.
    _made: tuple[float, Mapping[str, int]] | None = None
    _task: asyncio.Task[None] | None = None
    _closed: bool = False
    _broken: bool = False  # the last look has failed
    _serial: int = 0
    # When the last request ended that a decode worker has told. See `Report.ended`.
    _kept_until: dict[str, float] = field(default_factory=dict)
    # The last requests that ended, and those that were answered within the last minute.
    _ended: Sequence[Ended] = ()
    _minute: Sequence[Ended] = ()
    # The last snapshot as JSON. An event that is set when the next one is there.
    _body: bytes = b""
    _next: asyncio.Event = field(default_factory=asyncio.Event)

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Yield snapshots as JSON until `close`.

        Empty bytes between them show that the connection is alive. While snapshots fail nothing is
        yielded, so viewers time out."""
        self.viewers += 1
        if self._task is None and not self._closed:
            self._task = asyncio.create_task(self._run(), name="live view")
        seen = self._body
        try:
            while not self._closed:
                if seen is self._body:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self.quiet_s):
                            await self._next.wait()
                if seen is not self._body:
                    seen = self._body
                    yield seen
                elif not (self._closed or self._broken):
                    yield b""
        finally:
            self.viewers -= 1
            if not self.viewers:
                self._stop()

    def close(self) -> None:
        """End all viewers. Later ones end at once."""
        self._closed = True
        self._stop()
        self._next.set()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task = None
        self._made = None

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
            workers = len(self.view.records())
            period_s = max(self.period_s, workers / WORKERS_A_SECOND)
            await asyncio.sleep(max(0.1 * period_s, period_s - (time.monotonic() - began)))

    async def _look(self) -> None:
        """Make one snapshot and give it to all viewers."""
        self._body = msgspec.json.encode(await self.look())  # once for all viewers
        self._next.set()
        self._next = asyncio.Event()

    async def look(self) -> LiveSnapshot:
        """Make one snapshot."""
        reports, frontend = await self.view.reports(jobs=True), self.view.own_id
        await self._take_ended(reports)
        now, flights, rates = time.time(), list(self.flights()), self._rates()
        cluster = self.view.cluster(reports, rates if frontend else None)
        tokens_per_s, in_flight = sum(rates.values()), len(flights)
        if not frontend:
            # Nobody counts the tokens of streams, but those of answers that are over.
            tokens_per_s = sum(row.made for row in self._minute) / 60.0
            decode = [row for row in cluster.workers if row.role == "decode"]
            in_flight = sum((row.running or 0) + (row.waiting or 0) for row in decode)
        flows, hidden = flows_of(flights, reports, time.monotonic())
        return LiveSnapshot(
            at=now,
            frontend=frontend,
            model=self.model or next((row.model for row in cluster.workers), "no worker"),
            frontends=max(1, len(self.view.directory.workers("frontend"))),
            targets_ms=self.targets_ms(),
            **msgspec.structs.asdict(cluster),
            now=msgspec.structs.replace(
                minute_of(self._minute),
                tokens_per_s=tokens_per_s,
                backlog_s=cluster.backlog_s,
                in_flight=in_flight,
                failed=int(next(iter(counters.FAILED.collect())).samples[0].value),
            ),
            flows=flows,
            hidden=hidden,
            ended=tuple(self._ended),
        )

    def _rates(self) -> dict[str, float]:
        """Return tokens per second since the last look, by worker."""
        at, made = time.monotonic(), self.made()
        last, self._made = self._made, (at, made)
        if last is None or at <= last[0]:
            return {}
        seconds, before = at - last[0], last[1]
        # A worker that has come back begins at 0.
        new = {name: max(0, count - before.get(name, 0)) for name, count in made.items()}
        return {name: count / seconds for name, count in new.items()}

    async def _take_ended(self, reports: Reports) -> None:
        """Take the requests that have ended since the last look."""
        targets, oldest, rows = self.targets_ms(), time.time() - 60.0, list[Ended]()
        found = list(self.requests.since(self._serial))  # the newest first
        # Before the first pause: a request that goes on elsewhere gets a new serial.
        serial = found[0].serial if found else self._serial
        for number, record in enumerate(found, 1):
            row = ended_of(record.explained(), targets)
            if len(rows) >= RECENT and row.at is not None and row.at < oldest:
                break
            rows.append(row)
            if number % _SLICE == 0:
                await asyncio.sleep(0)  # streams go on
        # After the last pause: if the last viewer goes meanwhile, the next one gets all of them.
        self._serial = serial
        rows.reverse()
        kept = (one for _, report in reports if report for one in report.ended)
        for told in sorted(kept, key=ended_at):  # a worker tells its last ones each time
            if ended_at(told) > self._kept_until.get(told.decode_instance, 0.0):
                self._kept_until[told.decode_instance] = ended_at(told)
                rows.append(ended_of(told, targets))
        self._ended = [*self._ended, *rows][-RECENT:]
        self._minute = [
            row
            for row in [*self._minute, *rows]
            if row.at is not None and row.at >= oldest and row.path != FAILED
        ]


# --------------------------------------------------------------------------- HTTP


# Not sse-starlette: once used, it looks twice a second for ever whether the server ends.
class EventStream(StreamingResponse):
    """Server-sent events, one for each body of JSON in one line.

    An empty body becomes a comment, which viewers ignore: the connection is alive.
    send_s: a viewer that reads nothing for so long is disconnected."""

    def __init__(self, source: AsyncGenerator[bytes, None], send_s: float = 10.0) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(_events(source), headers=headers, media_type="text/event-stream")
        self._source = source
        self._send_s = send_s

    async def stream_response(self, send: Send) -> None:
        # A client that leaves, or reads nothing, is a viewer no longer. Else a stopped browser
        # would keep its place, and all workers would be asked for it each second.
        async with aclosing(self._source), unless_deaf(send, self._send_s) as timed:
            await super().stream_response(timed)


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
        if live.viewers >= MAX_VIEWERS:
            error = f"{MAX_VIEWERS} viewers look already: close another page"
            return JSONResponse({"error": error}, status_code=503, headers={"retry-after": "5"})
        return EventStream(live.watch())

    return [
        Route("/pullfill/ui", page),
        Route("/pullfill/ui/", slash),
        Route("/pullfill/ui/events", events),
        Route("/pullfill/ui/requests/{request_id:path}", request),
        Route("/pullfill/ui/{name}", file),
    ]
