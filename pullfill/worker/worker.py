"""One worker of the cluster around an engine: its sides, their registration and its probe.

    etcd is dialled ┐
                    ├─▶ sides are built ─▶ registered ─▶ serving ─▶ drain ─▶ closed
    engine is ready ┘

Who steps the engine does not matter here: our own loop (process.py), or stock `vllm serve`
(stock_core.py). What was opened is closed in the opposite order. asyncio thread only.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from pullfill.config import ClusterRef, pod_name, restarts_so_far
from pullfill.engine import compat
from pullfill.engine.host import EngineHost
from pullfill.engine.life import EngineWatchdog, Life
from pullfill.engine.view import View
from pullfill.net.this_host import host_id
from pullfill.options import WorkerOptions
from pullfill.queue.nats_connection import NatsConnection
from pullfill.registry.client import EtcdClient
from pullfill.registry.live_settings import Settings
from pullfill.registry.membership import Membership
from pullfill.registry.self_checks import SelfChecks
from pullfill.runtime import log, metrics
from pullfill.runtime.lifecycle import end
from pullfill.runtime.probe import ProbeServer
from pullfill.wire import QueueSettings, WorkerRecord, WorkerState
from pullfill.worker import memory
from pullfill.worker.context import SchedulerHalf, WorkerContext
from pullfill.worker.engine_loop import EngineLoop
from pullfill.worker.sides import Engine, Role, Servers, Service

logger = log.get("worker")


def engine_of(
    life: Any, context: WorkerContext, halves: Sequence[SchedulerHalf], fingerprint: str
) -> Engine:
    """Make the ports of an engine that is built. Engine thread.

    life: of the engine. halves: of the sides. fingerprint: from `compat.fingerprint_as_run`."""
    host: EngineHost = life.host
    core = host.core
    if context.geometry is None:
        raise RuntimeError("vLLM registered no KV cache with the connector")
    described = compat.describe(core.vllm_config, fingerprint, context.geometry)
    context.in_flight = core.scheduler._inflight_prefills
    view = View(core)
    for half in halves:
        half.built(view)
    loop = EngineLoop(host, life, context.adapters, halves)
    host.use(loop)
    return Engine(view, loop, described, context, life.dead, life.fail)


class Worker:
    """See the module.

    roles: how its sides are made, decode first. They are fixed: both, or one of them.
    stays: see `Report`.
    revoked: set when somebody has revoked the lease. There once it is built."""

    def __init__(
        self,
        roles: Sequence[Role],
        cluster: ClusterRef,
        options: WorkerOptions,
        *,
        stays: bool = False,
    ) -> None:
        self._roles, self._stays = roles, stays
        self._cluster = cluster
        self._options = options
        self._instance_id = str(options.instance_id)
        log.identify(self._instance_id)
        self._started_at = time.time()
        self._state = WorkerState.READY
        self._leaving = False
        self._sides: dict[str, Service] = {}

    async def build(self, life: Life[Engine], parts: AsyncExitStack) -> None:
        """Make the sides once the engine is ready. What it opens, it pushes onto `parts`.

        Raises PullfillError."""
        options, namespace = self._options, self._cluster.namespace
        etcd = await EtcdClient.connect(
            self._cluster.etcd_url,
            wait_s=options.connect_timeout_s,
            on_retry=logger.warning,
            security=self._cluster.security.etcd,
        )
        parts.push_async_callback(etcd.close)
        for role in self._roles:
            await role.watch(etcd, parts)
        queue = await Settings(etcd, namespace, QueueSettings).start()
        parts.push_async_callback(queue.close)
        kept = await SelfChecks(etcd, namespace).start()
        parts.push_async_callback(kept.close)
        security = self._cluster.security.nats
        nats = NatsConnection(self._cluster.nats_url, self._instance_id, security.options())
        parts.push_async_callback(nats.close)
        servers = Servers(etcd, nats, queue, kept)
        self._engine = engine = await life.ready
        copiers = [role.copiers for role in self._roles]
        parts.push_async_callback(memory.end, life, engine.context, copiers)
        decodes = any(role.name == "decode" for role in self._roles)
        key = self._cluster.security.cluster.load()
        memory.open_to_peers(engine.context, options, key, decodes=decodes)
        for role in self._roles:
            self._sides[role.name] = await role.build(engine, servers, parts)
        self._membership = Membership(
            etcd,
            namespace,
            options.lease_ttl_s,
            self._describe,
            checking=lambda side: bool(self._sides[side].checking()),
        )
        self.revoked = self._membership.revoked
        await nats.start(options.connect_timeout_s)
        self._guard = EngineWatchdog(life, options.engine_stall_s, self._on_stuck)
        probe = ProbeServer(options.host, self._ready, self._status, self._refresh_metrics)
        await probe.start(options.http_port)
        parts.push_async_callback(probe.stop)
        self._http = probe.url

    async def register(self, parts: AsyncExitStack) -> None:
        """Serve, so that others find this worker. See `build`."""
        parts.push_async_callback(self._membership.leave)
        await self._membership.join(self._options.connect_timeout_s)
        for service in self.services:
            await service.start(self._membership.refresh)
        watch = asyncio.create_task(self._guard.run(), name="engine-watchdog")
        parts.push_async_callback(end, watch)
        serving = " and ".join(role.serving for role in self._roles)
        logger.info("%s %s (%s)", self._instance_id, serving, self._engine.compat.model)

    @property
    def services(self) -> list[Service]:
        """Those of its sides, decode first."""
        return list(self._sides.values())

    async def stop_taking(self) -> None:
        """Take no new work, and tell everybody. There is no way back."""
        self._leaving, self._state = True, WorkerState.DRAINING
        self._membership.note_state(self._state)
        await asyncio.gather(*(one.stop_taking() for one in self.services))

    def _on_stuck(self, stuck: bool) -> None:
        """Take no work while the engine is stuck. What is in the engine stays there, and goes
        elsewhere if this process has to leave."""
        if self._leaving or self.revoked.is_set():
            return  # it leaves anyway
        self._state = WorkerState.DRAINING if stuck else WorkerState.READY
        for service in self.services:
            service.engine_stuck(stuck)
        self._membership.note_state(self._state)

    def _describe(self, incarnation: str) -> list[WorkerRecord]:
        sides = self._sides.items()
        return [side.describe(self._record(name, incarnation)) for name, side in sides]

    def _record(self, role: str, incarnation: str) -> WorkerRecord:
        engine = self._engine
        return WorkerRecord(
            instance_id=self._instance_id,
            incarnation=incarnation,
            role=role,
            state=self._state,
            model=engine.compat.model,
            model_path=self._options.model,
            compat=engine.compat,
            host=self._options.host,
            host_id=host_id(),
            pid=os.getpid(),
            started_at=self._started_at,
            http=self._http,
            max_model_len=engine.view.config.model_config.max_model_len,
            restarts=restarts_so_far(),
        )

    @property
    def _checking(self) -> list[str]:
        return [why for service in self.services if (why := service.checking())]

    @property
    def _shown_state(self) -> WorkerState:
        ready = self._state is WorkerState.READY
        return WorkerState.CHECKING if ready and self._checking else self._state

    def _ready(self) -> tuple[bool, dict[str, Any]]:
        told = [reason for service in self.services for reason in service.reasons()]
        reasons = [*dict.fromkeys(told), *self._checking]  # two sides have the same servers
        detail = {"state": self._shown_state, "degraded": bool(reasons), "reasons": reasons}
        detail |= self._guard.detail()
        # Frontends send it nothing yet. An upgrade must not end the worker before it meanwhile.
        decode = self._sides.get("decode")
        checked = decode is not None and decode.checking()
        return self._state is WorkerState.READY and not checked, detail

    def _status(self, query: Mapping[str, str]) -> dict[str, Any]:
        status: dict[str, Any] = {}
        load: dict[str, Any] = {}
        for service in self.services:
            found = service.status(query)
            load |= found.pop("load", {})  # of two sides, those of the prefill side win
            status = {**found, **status}
        own = {"state": self._shown_state, "pod": pod_name(), "stays": self._stays}
        return {**own, **status, "load": load}

    def _refresh_metrics(self) -> None:
        metrics.RESTARTS.set(restarts_so_far())
        for service in self.services:
            service.refresh_metrics()
