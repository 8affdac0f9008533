"""A worker's own small HTTP server: /live, /ready, /metrics, /status (docs/configuration.md).

Runs on the worker's asyncio loop. The frontend scrapes it, so one scrape of the frontend shows the
cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from prometheus_client import REGISTRY, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from pullfill.errors import NotNow

PLAIN = CONTENT_TYPE_PLAIN_0_0_4

# For all metrics of the process, vLLM's too: they would double the number of series for nothing.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(eq=False, repr=False)
class ProbeServer:
    """Serves four read-only routes.

    ready: returns whether the worker is ready, and details.
    status: takes the parameters of `/status?…`, and returns load and state, and what they ask for.
    refresh_metrics: called before the metrics are read.
    """

    host: str
    ready: Callable[[], tuple[bool, dict[str, Any]]]
    status: Callable[[Mapping[str, str]], dict[str, Any]]
    refresh_metrics: Callable[[], None] = lambda: None
    url: str = ""
    _runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        """Listen, and set `url`. Raises ConfigError if the port is taken.

        port: 0: the operating system picks one."""
        app = web.Application()
        app.router.add_get("/live", self._on_live)
        app.router.add_get("/ready", self._on_ready)
        app.router.add_get("/metrics", self._on_metrics)
        app.router.add_get("/status", self._on_status)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self.host, port).start()
        except OSError as exc:
            await self._runner.cleanup()
            raise NotNow(
                f"cannot listen on {self.host}:{port} ({exc.strerror}): choose another "
                "--http-port or --host"
            ) from exc
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _on_live(self, _: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def _on_ready(self, _: web.Request) -> web.Response:
        ok, detail = self.ready()
        return web.json_response({"ready": ok, **detail}, status=200 if ok else 503)

    async def _on_metrics(self, _: web.Request) -> web.Response:
        self.refresh_metrics()
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": PLAIN})

    async def _on_status(self, request: web.Request) -> web.Response:
        return web.json_response(self.status(request.query))
