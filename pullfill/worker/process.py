"""One worker process, whatever its role: build everything, then serve, then leave.

    engine thread loads the model ┐
                                  ├─▶ Role.build ─▶ registered ─▶ Service.start ─▶ drain ─▶ closed
    etcd is dialled ──────────────┘

A role (decode, prefill) brings a `Role`: its connector, what runs on its engine thread, and how its
parts are built. `Role.build` returns a `Service`: all parts, ready to serve. What was opened is
closed in the opposite order.
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pullfill.config import ClusterRef, pod_name, restarts_so_far
from pullfill.engine import args, compat, environment
from pullfill.engine.host import EngineHooks, EngineHost
from pullfill.engine.thread import EngineThread
from pullfill.engine.watchdog import EngineWatchdog
from pullfill.net.this_host import host_id
from pullfill.options import WorkerOptions
from pullfill.registry.client import EtcdClient
from pullfill.registry.live_settings import Settings
from pullfill.registry.membership import Membership
from pullfill.runtime import log, tracing
from pullfill.runtime.lifecycle import EXIT_S, STEP_FAILED, Stop, exit_within, until
from pullfill.runtime.probe import ProbeServer
from pullfill.transfer.shm.files import RegionFiles
from pullfill.wire import Compat, QueueSettings, RegionDescriptor, WorkerRecord, WorkerState
from pullfill.worker import context as contexts
from pullfill.worker.context import WorkerContext

C = TypeVar("C", bound=WorkerContext)
H = TypeVar("H", bound=EngineHooks)
AsRole = Callable[[str, "Service"], Membership]
"""Makes a membership of this process, from the name of a role and the service that it publishes."""


@dataclass(frozen=True, slots=True)
class Engine(Generic[C]):
    """An engine that is built, with its KV cache in memory that the context describes."""

    host: EngineHost
    core: Any
    config: Any
    served_name: str
    compat: Compat
    context: C


class Service(Protocol):
    """All parts of a worker that serve. asyncio thread.

    Each method is called by `WorkerProcess` only."""

    def describe(self, record: WorkerRecord) -> tuple[WorkerRecord, list[RegionDescriptor]]:
        """Return what to publish: the record with the role's own fields, and descriptors.

        Everything granted under another incarnation than the record's is void from now on."""

    async def start(self, note: Callable[[], None]) -> None:
        """Begin to take work. The worker is registered.

        note: called when `checking` changes."""

    def checking(self) -> str:
        """Why the record says `checking`, for people. Empty: it does not."""

    def reasons(self) -> list[str]:
        """Why this worker is degraded, for /ready."""

    def told(self) -> dict[str, Any]:
        """Further entries of /ready."""

    def status(self) -> dict[str, Any]:
        """Further entries of /status."""

    def jobs(self) -> dict[str, Any]:
        """Further entries of /status?jobs: `jobs`, `held` (pullfill/snapshot.py)."""

    def refresh_metrics(self) -> None:
        """Set the gauges that nothing else sets."""

    def engine_stuck(self, stuck: bool) -> None:
        """Note that the engine takes no steps, or takes steps again."""

    async def stop_taking(self) -> None:
        """Take no new work, and tell the peers."""

    async def finished(self) -> None:
        """Return when all work is done, or the engine is dead."""

    async def give_up(self) -> None:
        """Let other workers do the work that is not done: migrate requests, nak jobs."""

    async def engine_gone(self) -> None:
        """As `give_up`, as far as possible without the engine, which is dead."""


class Registration(Protocol):
    """How the process is known to the cluster: `Membership`, or several of them.

    revoked: set when a lease was revoked. The process then drains."""

    revoked: asyncio.Event

    async def join(self, wait_s: float = 0.0) -> None: ...

    async def set_state(self, state: WorkerState) -> bool: ...

    def note_state(self, state: WorkerState) -> None: ...

    def refresh(self) -> None: ...

    async def leave(self) -> None: ...


class Role(ABC, Generic[C, H]):
    """What a kind of worker brings. See the module.

    name: `decode` or `prefill`.
    module, connector, kv_role: of vLLM's KV transfer config.
    log_stats: as of EngineHost.
    serving: what the log says of a worker that serves."""

    name: str
    module: ClassVar[str]
    connector: ClassVar[str]
    kv_role: ClassVar[str]
    log_stats: ClassVar[bool] = True
    serving: ClassVar[str] = "is ready"
    instance_id: str

    def adjust(self, config: Any) -> None:
        """Change vLLM's config, from which the engine is built next. Engine thread."""

    def registration(self, as_role: AsRole, service: Service) -> Registration:
        """Return how the process joins the cluster, once its parts are built."""
        return as_role(self.name, service)

    @abstractmethod
    def make_context(self, host: EngineHost, files: RegionFiles) -> C:
        """What the connector finds when vLLM constructs it. Engine thread."""

    @abstractmethod
    def make_hooks(self, engine: Engine[C]) -> H:
        """What the engine's loop calls. Engine thread, before the first step."""

    @abstractmethod
    async def watch(self, etcd: EtcdClient, parts: AsyncExitStack) -> None:
        """Open what needs etcd, but no engine. The model loads meanwhile."""

    @abstractmethod
    async def build(
        self,
        engine: Engine[C],
        hooks: H,
        thread: EngineThread[Any],
        queue: Settings[QueueSettings],
        parts: AsyncExitStack,
    ) -> Service:
        """Build the rest. What it opens, it pushes onto `parts`."""


class WorkerProcess(Generic[C, H]):
    """One worker of a role, on the process's asyncio loop. The engine has its own thread."""

    def __init__(
        self,
        role: Role[C, H],
        cluster: ClusterRef,
        options: WorkerOptions,
        vllm_args: list[str],
    ) -> None:
        self._role = role
        self._cluster = cluster
        self._options = options
        self._vllm_args = vllm_args
        self._instance_id = role.instance_id
        log.identify(role.instance_id)
        self._log = log.get(f"{role.name}_worker")
        self._stop = Stop()
        self._started_at = time.time()
        self._state = WorkerState.READY

    async def serve(self) -> int:
        """Build everything, serve, leave. Returns the exit code."""
        self._stop.starting = True  # a model may take minutes to load
        self._stop.install()
        thread = EngineThread(self._load, self._built)
        thread.start()
        options, namespace = self._options, self._cluster.namespace
        async with AsyncExitStack() as parts:
            etcd = await EtcdClient.connect(
                self._cluster.etcd_url,
                wait_s=options.connect_timeout_s,
                on_retry=self._log.warning,
                security=self._cluster.security.etcd,
            )
            parts.push_async_callback(etcd.close)
            await self._role.watch(etcd, parts)
            queue = await Settings(etcd, namespace, QueueSettings).start()
            parts.push_async_callback(queue.close)
            self._engine, hooks = await thread.ready
            self._service = await self._role.build(self._engine, hooks, thread, queue, parts)
            self._guard = EngineWatchdog(thread, options.engine_stall_s, self._on_stuck)
            service = self._service
            probe = ProbeServer(
                options.host, self._ready, self._status, service.refresh_metrics, service.jobs
            )
            await probe.start(options.http_port)
            parts.push_async_callback(probe.stop)
            self._http = probe.url
            self._membership = self._role.registration(partial(self._as_role, etcd), self._service)
            parts.push_async_callback(self._membership.leave)
            self._stop.starting = False
            await self._membership.join(options.connect_timeout_s)
            await self._service.start(self._membership.refresh)
            self._guard.start()
            parts.push_async_callback(self._guard.stop)
            name, model = self._instance_id, self._engine.served_name
            self._log.info("%s %s (%s)", name, self._role.serving, model)
            await until(self._stop.drain, self._membership.revoked, thread.dead)
            code = await self._leave(thread)
            exit_within(EXIT_S, code)
        return code

    async def _leave(self, thread: EngineThread[Any]) -> int:
        """Finish the work, or let others do the rest. Returns the exit code."""
        if self._membership.revoked.is_set():
            self._stop.ask("lease revoked")
        if not thread.dead.is_set():
            self._state = WorkerState.DRAINING
            await asyncio.gather(
                self._service.stop_taking(), self._membership.set_state(WorkerState.DRAINING)
            )
            finished = await self._stop.race(
                self._service.finished(), self._options.drain_timeout_s
            )
            if not finished and not thread.dead.is_set():
                await self._service.give_up()
        if thread.dead.is_set():
            self._log.error("the engine has ended (%r): exiting", thread.failure)
            await self._service.engine_gone()
            return 1 if thread.hangs else STEP_FAILED
        self._log.info("drained")
        return 0

    def _on_stuck(self, stuck: bool) -> None:
        """Take no work while the engine is stuck. What is in the engine stays there, and goes
        elsewhere if this process has to leave."""
        if self._stop.drain.is_set() or self._membership.revoked.is_set():
            return  # it leaves anyway
        self._state = WorkerState.DRAINING if stuck else WorkerState.READY
        self._service.engine_stuck(stuck)
        self._membership.note_state(self._state)

    # ------------------------------------------------------------------ engine thread

    def _load(self) -> EngineHost:
        environment.bound_compute_threads()
        files = RegionFiles(self._instance_id)
        self._config, self._served_name = args.build_config(
            self._options.model,
            self._vllm_args,
            connector=self._role.connector,
            module=self._role.module,
            kv_role=self._role.kv_role,
            engine_id=self._instance_id,
            extra={"instance_id": self._instance_id, "directory": str(files.directory)},
        )
        tracing.begin(args.traces_endpoint(self._config), self._role.name, self._instance_id)
        self._fingerprint = compat.fingerprint_as_run(self._config)
        self._role.adjust(self._config)
        host = EngineHost(self._config, log_stats=self._role.log_stats)
        self._context = self._role.make_context(host, files)
        contexts.install(self._context)
        return host

    def _built(self, host: EngineHost, core: Any) -> tuple[Engine[C], H]:
        context, config = self._context, self._config
        if context.geometry is None:
            raise RuntimeError("vLLM registered no KV cache with the connector")
        described = compat.describe(config, self._served_name, self._fingerprint, context.geometry)
        engine = Engine(host, core, config, self._served_name, described, context)
        host.hooks = hooks = self._role.make_hooks(engine)
        return engine, hooks

    # ------------------------------------------------------------------ what others are told

    def _as_role(self, etcd: EtcdClient, role: str, service: Service) -> Membership:
        return Membership(
            etcd,
            self._cluster.namespace,
            self._options.lease_ttl_s,
            partial(self._describe, role, service),
            on_reregistered=lambda i: self._log.warning("registered again as %s", i[:8]),
            checking=lambda: bool(service.checking()),
        )

    def _describe(
        self, role: str, service: Service, incarnation: str
    ) -> tuple[WorkerRecord, list[RegionDescriptor]]:
        engine = self._engine
        return service.describe(
            WorkerRecord(
                instance_id=self._instance_id,
                incarnation=incarnation,
                role=role,
                state=self._state,
                model=engine.served_name,
                model_path=self._options.model,
                compat=engine.compat,
                host=self._options.host,
                host_id=host_id(),
                pid=os.getpid(),
                started_at=self._started_at,
                http=self._http,
                max_model_len=engine.config.model_config.max_model_len,
                restarts=restarts_so_far(),
            )
        )

    def _ready(self) -> tuple[bool, dict[str, Any]]:
        reasons = [*self._service.reasons(), *filter(None, [self._service.checking()])]
        told = {**self._service.told(), "degraded": bool(reasons), "reasons": reasons}
        detail = {"state": self._shown_state, **told, **self._guard.detail()}
        return self._state is WorkerState.READY, detail

    @property
    def _shown_state(self) -> WorkerState:
        ready = self._state is WorkerState.READY
        return WorkerState.CHECKING if ready and self._service.checking() else self._state

    def _status(self) -> dict[str, Any]:
        return {"state": self._shown_state, "pod": pod_name(), **self._service.status()}
