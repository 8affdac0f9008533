"""The live page without a frontend: `pullfill page`. Also for `pullfill top`, where none answers.

It shows the requests that no frontend has sent, such as those of stock `vllm serve`. Others are on
the page of the frontend that has sent them. Read-only: this process joins no cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pullfill.config import ClusterRef
from pullfill.frontend.admission import error_of
from pullfill.frontend.cluster_view import ROLES, ClusterView
from pullfill.frontend.http_auth import PAGE, HttpAuth
from pullfill.frontend.live.page import LiveView, routes
from pullfill.frontend.main import Server, bind, url_of
from pullfill.frontend.request_log import RequestLog
from pullfill.registry.client import EtcdClient
from pullfill.registry.directory import Directory
from pullfill.registry.live_settings import Settings
from pullfill.runtime.lifecycle import Stop
from pullfill.wire import RouterConfig


@asynccontextmanager
async def view_of(cluster: ClusterRef, wait_s: float) -> AsyncIterator[LiveView]:
    """Follow a cluster by what etcd and its workers tell.

    wait_s: how long etcd has to answer. Raises RegistryUnavailable, ConfigError."""
    async with AsyncExitStack() as stack:
        etcd = await EtcdClient.connect(
            cluster.etcd_url, wait_s=wait_s, security=cluster.security.etcd
        )
        stack.push_async_callback(etcd.close)
        directory = Directory(etcd, cluster.namespace, (*ROLES, "frontend"))
        settings = Settings(etcd, cluster.namespace, RouterConfig)
        for follower in (directory, settings):
            stack.push_async_callback(follower.close)
            await follower.start(wait_s)
        view = ClusterView(directory, etcd.health, cluster.namespace)
        stack.push_async_callback(view.close)

        def targets_ms() -> tuple[float, float]:
            return settings.current.ttft_ms, settings.current.itl_ms

        live = LiveView(view, RequestLog(), tuple, targets_ms, dict, model="")
        stack.callback(live.close)
        yield live


async def serve(cluster: ClusterRef, host: str, port: int, wait_s: float) -> None:
    """Serve the page until SIGTERM or SIGINT. Raises as `view_of`, NotNow if the port is taken."""
    stop = Stop()
    stop.install()
    listener = bind(host, port)
    async with view_of(cluster, wait_s) as live:

        async def request(found: Request) -> Response:
            request_id = found.path_params["request_id"]
            if (told := await live.view.record_kept(request_id)) is not None:
                return Response(msgspec.json.encode(told), media_type="application/json")
            why = f"no decode worker has kept a record of request {request_id!r}"
            return JSONResponse({"error": error_of(404, why)}, status_code=404)

        app, keys = Starlette(routes=routes(live, request)), cluster.security.frontend
        auth = HttpAuth(app, keys.api_keys(), keys.admin_keys())
        # As in a frontend, no client may choose the address that `HttpAuth` believes it has.
        config = uvicorn.Config(auth, log_config=None, access_log=False, proxy_headers=False)
        server = Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        print(f"live page: {url_of(listener, tls=False)}{PAGE} (Ctrl-C ends it)", flush=True)
        for record in live.view.directory.workers("frontend").values():
            print(f"requests of {record.instance_id}: {record.http}{PAGE}", flush=True)
        if not live.view.records():
            print(
                f"no worker is in namespace {cluster.namespace} yet: start one, or name another "
                "cluster by --etcd and --namespace",
                flush=True,
            )
        await stop.drain.wait()
        live.close()
        server.should_exit = True
        await serving
