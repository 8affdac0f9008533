"""Makes the snapshots of the live page and of `pullfill top`, while somebody looks.

The first viewer starts one task for all viewers. Each PERIOD_S it asks every worker for its report,
takes what has ended from the explain store, and gives every viewer the new snapshot as JSON, made
once. When the last viewer has gone, the task ends. Then nothing is asked and nothing is computed.

A viewer that has not taken the last snapshot in time misses the next ones. It gets a whole one
later, so what waits for a viewer is bounded.

Single event loop. `close` ends all viewers: a frontend that drains does not wait for them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

import msgspec

from pullfill.errors import OverloadedError
from pullfill.frontend import metrics
from pullfill.frontend.cluster import ClusterView
from pullfill.frontend.explain import ExplainStore
from pullfill.frontend.flight import Flight
from pullfill.frontend.live_flows import flows_of
from pullfill.frontend.live_marks import Marks
from pullfill.frontend.live_rows import ended_of
from pullfill.frontend.live_series import Series, TokenMeter
from pullfill.runtime import log
from pullfill.snapshot import HISTORY_S, RECENT, Ended, Snapshot, WorkerPoint

PERIOD_S = 1.0
QUIET_S = 5.0
"""Each viewer gets something this often, at least. `pullfill top` gives up after 10 s."""
WORKERS_PER_S = 16
"""With more workers the snapshots are made less often, so that the cost stays the same."""
MAX_VIEWERS = 32
_SLICE = 256
"""So many records of the past are counted before other callbacks of the event loop run."""

_log = log.get("frontend.live_view")


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
    """See the module.

    frontend: instance id of this frontend. since: when it started, in seconds since 1970.
    targets_ms: returns the targets of requests that name none.
    flights: returns the requests under way.
    frontends: returns how many frontends there are."""

    def __init__(
        self,
        view: ClusterView,
        explain: ExplainStore,
        flights: Callable[[], Collection[Flight]],
        targets_ms: Callable[[], tuple[float, float]],
        *,
        frontend: str,
        model: str,
        since: float,
        frontends: Callable[[], int] = lambda: 1,
    ) -> None:
        self._view = view
        self._explain = explain
        self._flights = flights
        self._targets_ms = targets_ms
        self._frontends = frontends
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

    def watch(self) -> AsyncIterator[bytes]:
        """Return snapshots as JSON until `close`. The first one is whole.

        If there is no snapshot for QUIET_S, empty bytes are sent to show that the connection is
        alive. While snapshots fail nothing is sent, so viewers time out.
        Raises OverloadedError if there are too many viewers."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise OverloadedError(f"{MAX_VIEWERS} viewers look already: close another page")
        return self._watch()

    async def _watch(self) -> AsyncIterator[bytes]:
        viewer = _Viewer()
        self._viewers.add(viewer)
        if self._task is None and not self._closed:
            self._task = asyncio.create_task(self._run(), name="live view")
        try:
            while not self._closed:
                with suppress(TimeoutError):
                    async with asyncio.timeout(QUIET_S):
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
        self._view.with_jobs = False
        self._meter.reset()

    # ---------------------------------------------------------------- the task

    async def _run(self) -> None:
        self._view.with_jobs = True
        while True:
            began = time.monotonic()
            try:
                await self._look()
                self._broken = False
            except Exception:
                self._broken = True
                _log.exception("no snapshot for the live page")
            workers = len(self._view.records())
            period_s = max(PERIOD_S, workers / WORKERS_PER_S)
            await asyncio.sleep(max(0.1 * period_s, period_s - (time.monotonic() - began)))

    async def _look(self) -> None:
        """Make one snapshot and give it to all viewers."""
        reports = await self._view.reports()
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
        snapshot = Snapshot(
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
                failed=int(next(iter(metrics.FAILED.collect())).samples[0].value),
            ),
            flows=flows,
            hidden=hidden,
            ended=tuple(ended[-RECENT:]),
            points=self._series.points(now, 2),
            marks=self.marks.marks(),
        )
        self._publish(snapshot)

    def _publish(self, snapshot: Snapshot) -> None:
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
        found, rows = list(self._explain.since(self._serial)), list[Ended]()
        # Before the first pause: a request that goes on elsewhere gets a new serial.
        newest = found[0][1].serial if found else self._serial
        for number, (record, trace) in enumerate(found, 1):
            row = ended_of(record, trace, targets)
            if row.at is not None and row.at < oldest:
                break
            rows.append(row)
            if number % _SLICE == 0:
                await asyncio.sleep(0)  # streams go on
        self._serial = newest
        rows.reverse()
        for number, row in enumerate(rows, 1):
            self._series.ended(row)
            if number % _SLICE == 0:
                await asyncio.sleep(0)
        self._series.recent(rows)
        self._ended.extend(rows)
        return rows
