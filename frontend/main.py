"""`pullfill frontend`: one process that serves OpenAI HTTP for the decode workers of a cluster.

Start: bind the socket (a taken port must fail before anything slow) → connect etcd → load vLLM's
frontend half in a thread → follow the registry, connect to decode workers → register → serve.
It is up as soon as it can answer; /ready says whether it can serve.

Stop: SIGTERM or a revoked lease = drain: /ready is 503 and requests are still served, until load
balancers have seen it (--ready-grace) → no new connections, open responses finish → what is left at
the drain deadline, or at a second SIGTERM, ends with an error → exit 0. Before it serves there is
nothing to drain: now.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from uvicorn.config import LOGGING_CONFIG

from pullfill.config import ClusterRef, restarts_so_far
from pullfill.engine import check, environment, front_app, front_wire
from pullfill.errors import ConfigError, NotNow, PullfillError, exit_code
from pullfill.frontend.admission import Admission
from pullfill.frontend.cluster_view import ROLES, ClusterView
from pullfill.frontend.decode_pool import WorkerPool, refuse_other_models
from pullfill.frontend.dispatch import Dispatcher
from pullfill.frontend.flight import Waits
from pullfill.frontend.forward import layer
from pullfill.frontend.http_auth import HttpAuth, Keys
from pullfill.frontend.live.page import LiveView
from pullfill.frontend.request_log import RequestLog
from pullfill.frontend.routes import Admin
from pullfill.frontend.routing.balancer import Balancer
from pullfill.frontend.routing.prefixes import Prefixes
from pullfill.ids import new_instance_id
from pullfill.net.security import FrontendSecurity
from pullfill.net.this_host import allow_open_files, host_id
from pullfill.options import FrontendOptions, LogFormat
from pullfill.registry.adapter_board import AdapterBoard
from pullfill.registry.client import EtcdClient
from pullfill.registry.directory import Directory
from pullfill.registry.live_settings import Settings
from pullfill.registry.membership import Membership
from pullfill.registry.suspect_records import SuspectBoard
from pullfill.runtime import log, tracing
from pullfill.runtime.lifecycle import EXIT_S, Stop, exit_within, leave, until
from pullfill.runtime.watched_files import WatchedFiles
from pullfill.wire import RouterConfig, WorkerRecord, WorkerState

_log = log.get("frontend")
_BACKLOG = 2048
# How long clients have for the error that ends their answers: some do not read. Less than `down`
# leaves a process between its second SIGTERM and SIGKILL.
_TELL_S = 2.0
_STOPPING = "this frontend stops before the answer has ended: send the request again"


def run(cluster: ClusterRef, options: FrontendOptions, vllm_args: Sequence[str]) -> int:
    """Run until told to stop. 0: drained; 1: failed; 2: wrong flags, other vLLM.

    Once vLLM is loaded this does not return: it leaves through os._exit, so that no library's
    thread or exit hook can hold the process or write to its last lines.
    """
    log.setup("frontend", as_json=options.log_format is LogFormat.JSON)
    try:
        check.require_version()
        layer.check(options)
        listeners = listeners_of(options)
    except PullfillError as exc:
        log.complain(exc)
        return exit_code(exc)
    allow_open_files()
    environment.begin_imports()
    front_app.set_environment(options.model)
    import uvloop  # comes with vLLM, which is there

    instance_id = options.instance_id or new_instance_id("frontend")
    log.identify(instance_id)
    uvloop.run(_end(_Frontend(cluster, options, vllm_args, listeners, instance_id)))


def listeners_of(options: FrontendOptions) -> list[socket.socket]:
    """Return the sockets to serve at. The first one is this frontend's alone. Raises ConfigError.

    The second one, if there is one, shares `--port` with other frontends."""
    if options.own_port is None:
        return [bind(options.host, options.port)]
    if not options.port:
        raise ConfigError("--own-port needs a shared port that is not 0: give --port a number")
    own = bind(options.host, options.own_port)
    return [own, bind(options.host, options.port, shared=True)]


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a socket that is bound, and listens unless it is shared. Raises NotNow.

    Connections wait in its backlog until the server is up. It listens at once, because two
    processes may bind one port as long as neither listens.

    shared: share the port with processes of this user that do the same. The kernel gives each
    listening one its part of the connections. So this socket must not listen before the server is
    up."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        if not shared:
            listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        raise NotNow(
            f"cannot listen on {host}:{port}: {exc.strerror or exc}; choose another --port "
            "(0 lets the system pick one) or --host"
        ) from None
    return listener


def url_of(listener: socket.socket, *, tls: bool) -> str:
    """Return the URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http{'s' * tls}://{f'[{host}]' if ':' in host else host}:{port}"


async def _end(frontend: _Frontend) -> NoReturn:
    """End the process from inside the loop: closing the loop would wait for its threads."""
    code = 1
    try:
        code = await frontend.serve()
    except PullfillError as exc:
        log.complain(exc)
        code = exit_code(exc)
    except Exception:
        _log.exception("frontend failed")
    tracing.close()
    leave(code)


def _take_keys(args: Any, security: FrontendSecurity) -> Callable[[], Keys]:
    """Return what reads the keys of the command line and of files. Takes vLLM's own check away.

    What is returned raises ConfigError if a file cannot be used."""
    named = args.api_key or [os.environ.get("VLLM_API_KEY", "")]
    # Our check is the only one: vLLM's cannot take new keys, nor `x-api-key`.
    args.api_key = [""]

    def read() -> Keys:
        return list(filter(None, [*named, *security.api_keys()])), list(security.admin_keys())

    return read


class Server(uvicorn.Server):
    """uvicorn without its own signal handlers: this process decides when it drains."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(slots=True, eq=False)
class _Frontend:
    """One run of the process."""

    cluster: ClusterRef
    options: FrontendOptions
    vllm_args: Sequence[str]
    listeners: list[socket.socket]
    instance_id: str
    _url: str = ""
    _stop: Stop = field(default_factory=Stop)
    _started_at: float = field(default_factory=time.time)

    async def serve(self) -> int:
        """Build everything, serve, leave. Returns the exit code."""
        self._stop.starting = True  # vLLM takes seconds to load
        self._stop.install()
        options, cluster = self.options, self.cluster
        async with AsyncExitStack() as stack:
            etcd = await EtcdClient.connect(
                cluster.etcd_url,
                wait_s=options.connect_timeout_s,
                on_retry=lambda line: _log.warning("%s", line),
                security=cluster.security.etcd,
            )
            stack.push_async_callback(etcd.close)
            prepared = await asyncio.to_thread(front_app.prepare, options.model, self.vllm_args)
            tracing.begin(prepared.args.otlp_traces_endpoint, "frontend", self.instance_id)
            tls = prepared.args.ssl_certfile is not None
            self._url = options.advertise or url_of(self.listeners[0], tls=tls)
            args, key_files = prepared.args, cluster.security.frontend.key_files()
            watched = WatchedFiles(*key_files)
            # Before `_route`, which hands these arguments to vLLM's app.
            read_keys = _take_keys(args, cluster.security.frontend)
            keys = read_keys()
            app, admin, fail_all = await self._route(etcd, prepared, stack)
            known = partial(front_app.has_route, admin.app)
            auth = HttpAuth(app, *keys, args.root_path or "", known)
            if key_files:
                follow = auth.follow(watched, read_keys)
                stack.callback(asyncio.create_task(follow, name="frontend-keys").cancel)
            # Around our checks too: a browser shows a page no answer without these headers.
            cors = CORSMiddleware(
                auth,
                allow_origins=args.allowed_origins,
                allow_credentials=args.allow_credentials,
                allow_methods=args.allowed_methods,
                allow_headers=args.allowed_headers,
            )
            membership = Membership(
                etcd,
                cluster.namespace,
                options.lease_ttl_s,
                partial(self._records, prepared.names[0]),
            )
            await membership.join(options.connect_timeout_s)
            stack.push_async_callback(membership.leave)
            return await self._http(cors, prepared, admin, membership, fail_all)

    async def _route(
        self, etcd: EtcdClient, prepared: front_app.Prepared, stack: AsyncExitStack
    ) -> tuple[ASGIApp, Admin, Callable[[], None]]:
        """Build what takes requests and sends them to workers, in reading order.

        Returns the ASGI app, our own routes in it, and what ends all requests with an error."""
        options, cluster, model = self.options, self.cluster, prepared.names[0]
        ttl_s = float(options.lease_ttl_s)
        directory = Directory(etcd, cluster.namespace, (*ROLES, "frontend"), ttl_s=ttl_s)
        await directory.start()
        stack.push_async_callback(directory.close)
        view = ClusterView(directory, etcd.health, cluster.namespace, self.instance_id)
        stack.push_async_callback(view.close)
        settings = Settings(etcd, cluster.namespace, RouterConfig)
        await settings.start(options.connect_timeout_s)
        stack.push_async_callback(settings.close)

        names = (*prepared.names, options.model)
        refuse_other_models(directory, names, model, cluster.namespace)
        board = SuspectBoard(etcd, cluster.namespace, lambda: settings.current.refuse_s)
        await board.start(options.connect_timeout_s)
        stack.push_async_callback(board.close)
        prefixes = Prefixes(options.prefix_index_blocks)
        balancer = Balancer(lambda: settings.current, prefixes)
        requests = RequestLog()
        adapters = AdapterBoard(etcd, cluster.namespace)
        stack.push_async_callback(adapters.close)
        front = await front_app.FrontApp.build(
            prepared,
            lambda client: Dispatcher(
                client,
                front_wire.FrontendCodec(),
                balancer,
                requests,
                board,
                never=prepared.never,
                waits=Waits(restart=options.restart_wait_s),
            ),
            adapters,
        )
        stack.push_async_callback(front.close)
        dispatcher = front.client.port
        assert isinstance(dispatcher, Dispatcher)
        if prepared.args.enable_lora:
            adapters.subscribe(front.client.adapters.on_change)
            await adapters.start(options.connect_timeout_s)
        hello = front_wire.FrontendHello(
            frontend_instance=self.instance_id,
            vllm_version=check.require_version(),
            model=model,
        )
        key = cluster.security.cluster.load()
        pool = WorkerPool(directory, hello, names, dispatcher, prefixes, key)
        pool.start()
        stack.push_async_callback(pool.stop)
        live = LiveView(
            view,
            requests,
            dispatcher.flights.values,
            lambda: (settings.current.ttft_ms, settings.current.itl_ms),
            pool.made,
            model=model,
        )
        stock_key = cluster.security.frontend.stock_key()
        stock = await stack.enter_async_context(
            layer.forwarding(options, prepared.names, lambda: settings.current, stock_key)
        )
        app: ASGIApp = front.app
        trouble = pool.trouble
        if stock is not None:
            app = both = layer.Layer(
                app,
                lambda: bool(dispatcher.workers),
                stock,
                lambda: settings.current.stock_share,
                requests,
            )
            trouble = both.trouble
        admin = Admin(front.app, pool, view, requests, board.listed, live, trouble, stock)
        admin.attach()

        def fail_all() -> None:
            dispatcher.fail_all(_STOPPING)
            if stock is not None:
                stock.servers.fail_all(_STOPPING)

        return Admission(app, trouble, options.max_inflight, requests=requests), admin, fail_all

    def _records(self, model: str, incarnation: str) -> list[WorkerRecord]:
        """Return what this frontend says of itself in the registry."""
        record = WorkerRecord(
            instance_id=self.instance_id,
            incarnation=incarnation,
            role="frontend",
            state=WorkerState.READY,
            model=model,
            model_path=self.options.model,
            host=self.options.host,
            host_id=host_id(),
            pid=os.getpid(),
            started_at=self._started_at,
            http=self._url,
            restarts=restarts_so_far(),
        )
        return [record]

    async def _http(
        self,
        app: Any,
        prepared: Any,
        admin: Admin,
        membership: Membership,
        fail_all: Callable[[], None],
    ) -> int:
        args = prepared.args
        as_json = self.options.log_format is LogFormat.JSON
        config = uvicorn.Config(
            app,
            log_level=args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log,
            # None: its lines go through our handler.
            log_config=None if as_json else LOGGING_CONFIG,
            # A request that meets the close of its connection gets no answer, so the client must
            # close first: httpx does after 5 s, most load balancers after 60 s.
            timeout_keep_alive=75,
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
            ssl_ca_certs=args.ssl_ca_certs,
            ssl_cert_reqs=args.ssl_cert_reqs,
            ssl_ciphers=args.ssl_ciphers,
            # A client must not choose the address that `HttpAuth` believes it has.
            proxy_headers=False,
            backlog=_BACKLOG,
        )
        environment.end_imports()
        files = [os.fspath(path) for path in (config.ssl_certfile, config.ssl_keyfile) if path]
        certificate = WatchedFiles(*files)
        config.load()
        refreshing = asyncio.create_task(_refresh(config, certificate, files), name="certificate")
        server = Server(config)
        serving = asyncio.create_task(server.serve(sockets=self.listeners))
        self._stop.starting = False
        _log.info("%s serves %s at %s", self.instance_id, prepared.names[0], self._url)
        asked = asyncio.create_task(until(self._stop.drain, membership.revoked))
        await asyncio.wait({serving, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not serving.done():
            if not self._stop.drain.is_set():
                self._stop.ask("lease revoked")
            drain_s = self.options.drain_timeout_s
            # If nobody can serve, /ready has been 503 already.
            grace_s = self.options.ready_grace_s if not admin.trouble() else 0.0
            exit_within(grace_s + drain_s + EXIT_S, 1)
            admin.drain()
            membership.note_state(WorkerState.DRAINING)
            await self._stop.race(asyncio.shield(serving), grace_s)
            server.should_exit = True
            await self._stop.race(asyncio.shield(serving), drain_s)
            fail_all()
            await asyncio.wait({serving}, timeout=_TELL_S)
        refreshing.cancel()
        exit_within(EXIT_S, 0)
        if serving.done():
            serving.result()
        return 0


async def _refresh(config: uvicorn.Config, watched: WatchedFiles, files: list[str]) -> None:
    """Show new connections the certificate that its files hold now."""
    while config.ssl is not None:
        await watched.wait()
        try:
            # A pair that does not fit would leave the live context without a usable one.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*files)
            config.ssl.load_cert_chain(*files)
        except (OSError, ValueError) as exc:
            _log.warning("%s cannot be used (%s): the last certificate stays", files[0], exc)
        else:
            _log.info("%s holds another certificate: new connections get it", files[0])
