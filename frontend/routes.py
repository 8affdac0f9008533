"""The frontend's own routes: /live, /ready, /pullfill/status, /pullfill/requests/ID, /metrics. And
those of the live page (live/page.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET
from prometheus_client import REGISTRY, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pullfill.frontend.admission import error_of
from pullfill.frontend.cluster_view import ASKED_BY, ClusterView
from pullfill.frontend.counters import WORKERS_NEEDED
from pullfill.frontend.decode_pool import WorkerPool
from pullfill.frontend.forward.sources import ROLES
from pullfill.frontend.forward.stock import Stock
from pullfill.frontend.live import page as live_page
from pullfill.frontend.request_log import RequestLog
from pullfill.needs import PlanSettings, observe, plan
from pullfill.runtime.probe import PLAIN
from pullfill.snapshot import MAX_RECORDS, Cluster, WorkerRow
from pullfill.wire import WorkerState

NO_PREFILL = (
    "no prefill worker: every prompt is prefilled locally; start one with `pullfill prefill`"
)


@dataclass(slots=True)
class Admin:
    """Serves the routes. All are read-only.

    app: vLLM's.
    refused: returns the entries of `suspects`.
    page: makes what the live page shows.
    trouble: as of `Admission`.
    stock: the stock vLLM servers, if there may be any.
    draining: the process takes no new requests. See `drain`."""

    app: Starlette
    pool: WorkerPool
    view: ClusterView
    requests: RequestLog
    refused: Callable[[], list[dict[str, Any]]]
    page: live_page.LiveView
    trouble: Callable[[], str]
    stock: Stock | None = None
    draining: bool = False

    def attach(self) -> None:
        """Put our routes before vLLM's, whose /metrics shows one process only."""
        self.app.router.routes[:0] = [
            Route("/live", self.live),
            Route("/ready", self.ready),
            Route("/pullfill/status", self.status),
            Route("/pullfill/requests/{request_id:path}", self.request),
            Route("/metrics", self.metrics),
            *live_page.routes(self.page, self.request),
        ]

    def drain(self) -> None:
        """Take no new requests, and end the streams of the live page."""
        self.draining = True
        self.page.close()

    async def live(self, _: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(self, _: Request) -> Response:
        away = await self.view.reasons()  # first, so that all else is of one moment
        records = self.view.records()
        decode = len(self.pool.dispatcher.workers)
        prefill = sum(r.role == "prefill" and r.state is WorkerState.READY for r in records)
        stock, troubles = self.stock, [] if self.stock is None else self.stock.servers.troubles()
        why = self.trouble()
        reasons = ["this frontend drains"] if self.draining else []
        if why:
            reasons.append(why)
        # Stock servers alone are a whole fleet.
        alone = stock is not None and not decode
        if not prefill and not alone:
            reasons.append(NO_PREFILL)
        reasons += troubles
        unknown = self.pool.prefixes.troubles(asyncio.get_running_loop().time())
        away += [f"{name}: {trouble}" for name, trouble in unknown.items()]
        reasons += away + self.pool.refusals()
        reasons += [f"{r.instance_id} is {r.state}" for r in records if r.state != "ready"]
        ok = not why and not self.draining
        body = {
            "ready": ok,
            "degraded": bool((not prefill and (why or not alone)) or away or troubles),
            "reasons": reasons,
            "decode": decode,
            "prefill": prefill,
        }
        if stock is not None:
            body["stock"] = {role: len(stock.servers.ready(role)) for role in ROLES}
        return JSONResponse(body, status_code=200 if ok else 503)

    async def status(self, _: Request) -> Response:
        cluster = await self.view.status()
        now = asyncio.get_running_loop().time()
        told = msgspec.structs.replace(
            cluster,
            workers=tuple(self._with_routing(row, now) for row in cluster.workers),
            stock=UNSET if self.stock is None else self.stock.servers.status(),
            suspects=self.refused(),
        )
        return Response(msgspec.json.encode(told), media_type="application/json")

    def _with_routing(self, row: WorkerRow, now: float) -> WorkerRow:
        """Add what this frontend knows of a decode worker when it chooses one."""
        if row.role != "decode":
            return row
        prefixes, name = self.pool.prefixes, row.instance_id
        trouble = prefixes.troubles(now).get(name)
        view = self.pool.dispatcher.balancer.placer.views.get(name)
        return msgspec.structs.replace(
            row,
            troubles=(*row.troubles, trouble) if trouble else row.troubles,
            routing={
                "load": msgspec.to_builtins(view and view.told),
                "prefix": prefixes.status(name, now),
            },
        )

    async def request(self, request: Request) -> Response:
        request_id = request.path_params["request_id"]
        await self.requests.settled(request_id)
        record = self.requests.get(request_id)
        if record is not None:
            return Response(msgspec.json.encode(record), media_type="application/json")
        if ASKED_BY not in request.headers:
            key = request.headers.get("authorization", "")
            if (told := await self.view.record_elsewhere(request_id, key)) is not None:
                return Response(told, media_type="application/json")
        message = (
            f"no record of request {request_id!r}: use the `id` of an answer, or its X-Request-Id; "
            f"each frontend keeps the last {MAX_RECORDS}"
        )
        return JSONResponse({"error": error_of(404, message)}, status_code=404)

    async def metrics(self, _: Request) -> Response:
        text = await self.view.metrics(self._own_metrics())
        return Response(text, headers={"Content-Type": PLAIN})

    async def _own_metrics(self) -> str:
        show_needed(await self.view.status())
        return generate_latest(REGISTRY).decode()


def show_needed(cluster: Cluster) -> None:
    """Set the gauge for autoscalers. While no decode worker tells its demand, it has no series."""
    WORKERS_NEEDED.clear()
    if (seen := observe(cluster)).demands:
        for need in plan(seen, PlanSettings()).needs:
            WORKERS_NEEDED.labels(need.kind).set(need.right)
