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
from functools import partial
from typing import Any

from pullfill.config import ClusterRef, pod_name, restarts_so_far
from pullfill.engine.host import EngineHost
from pullfill.engine.life import EngineWatchdog, Life
from pullfill.engine.view import View
from pullfill.errors import BadMessage
from pullfill.net.this_host import host_id
from pullfill.options import WorkerOptions
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from pullfill.registry.live_settings import Settings
from pullfill.registry.membership import Membership
from pullfill.registry.watch import Delete, Follower, Put
from pullfill.runtime import log, metrics
from pullfill.runtime.health import UP
from pullfill.runtime.lifecycle import end
from pullfill.runtime.probe import ProbeServer
from pullfill.wire import (
    Compat,
    QueueSettings,
    RegionDescriptor,
    RoleOrder,
    WorkerRecord,
    WorkerState,
    decode,
)
from pullfill.worker import memory
from pullfill.worker.context import SchedulerHalf, WorkerContext
from pullfill.worker.engine_loop import EngineLoop
from pullfill.worker.sides import Engine, Role, Service
from pullfill.worker.switch import Side, Switch


def engines_of(
    host: EngineHost,
    life: Any,
    contexts: Sequence[WorkerContext],
    halves: Sequence[SchedulerHalf],
    served_name: str,
    described: Compat,
) -> list[Engine[Any]]:
    """Make the ports of an engine that is built. Returns it as each side sees it. Engine thread.

    life: of the engine. contexts, halves: of the sides."""
    view, first = View(host.core), contexts[0]
    for half in halves:
        half.built(view)
    loop = EngineLoop(host, host.core, life, first.adapters, halves)
    host.use(loop)
    engine: Engine[Any] = Engine(view, loop, served_name, described, first, life.dead, life.fail)
    return [engine.of(context) for context in contexts]


class Worker:
    """See the module.

    roles: the sides that it has. With two the worker follows orders.
    first: name of the one in which it begins.
    stays: see `Report`."""

    def __init__(
        self,
        roles: Sequence[Role[Any]],
        first: str,
        instance_id: str,
        cluster: ClusterRef,
        options: WorkerOptions,
        *,
        stays: bool = False,
    ) -> None:
        self._roles, self._stays = roles, stays
        self._elastic = len(roles) > 1
        self._first = next(role for role in roles if role.name == first)
        self._cluster = cluster
        self._options = options
        self._instance_id = instance_id
        log.identify(instance_id)
        self._log = log.get(f"{first}_worker")
        self._started_at = time.time()
        self._state = WorkerState.READY
        self._leaving = False
        self._orders = AsyncExitStack()  # what follows them

    async def build(self, life: Life[list[Engine[Any]]], parts: AsyncExitStack) -> None:
        """Make the sides once the engine is ready. What it opens, it pushes onto `parts`.

        life: of the engine, as each side sees it, in the order of the roles.

        Raises PullfillError."""
        options, namespace = self._options, self._cluster.namespace
        etcd = await EtcdClient.connect(
            self._cluster.etcd_url,
            wait_s=options.connect_timeout_s,
            on_retry=self._log.warning,
            security=self._cluster.security.etcd,
        )
        parts.push_async_callback(etcd.close)
        for role in self._roles:
            await role.watch(etcd, parts)
        queue = await Settings(etcd, namespace, QueueSettings).start()
        parts.push_async_callback(queue.close)
        engines = await life.ready
        self._engine = engines[0]
        contexts = [engine.context for engine in engines]
        kv = memory.KvMemory(contexts, [role.copiers for role in self._roles])
        parts.push_async_callback(memory.end, life, kv)
        for role, engine in zip(self._roles, engines, strict=True):
            await role.build(engine, queue, parts)
        self._guard = EngineWatchdog(life, options.engine_stall_s, self._on_stuck)
        as_role = partial(self._as_role, etcd)
        sides = [Side(role, as_role) for role in self._roles]
        self._switch = Switch(sides, self._first.name, options.drain_timeout_s)
        probe = ProbeServer(
            options.host, self._ready, self._status, self._refresh_metrics, self._more
        )
        await probe.start(options.http_port)
        parts.push_async_callback(probe.stop)
        self._http = probe.url
        parts.push_async_callback(self._switch.leave)
        self._etcd = etcd

    async def register(self, parts: AsyncExitStack) -> None:
        """Serve, so that others find this worker. See `build`."""
        await self._switch.join(self._options.connect_timeout_s)
        self._guard.start()
        parts.push_async_callback(self._guard.stop)
        parts.push_async_callback(self._orders.aclose)
        if self._elastic:
            await self._follow_orders(self._etcd)
        name, model = self._instance_id, self._engine.served_name
        elastic = " (elastic)" if self._elastic else ""
        self._log.info("%s %s%s (%s)", name, self._first.serving, elastic, model)

    async def settle(self) -> list[Service]:
        """Follow no more orders. Returns the services of the sides that serve, decode first."""
        await self._orders.aclose()
        return self._switch.services

    @property
    def revoked(self) -> asyncio.Event:
        """Set when somebody has revoked the lease of a side that serves."""
        return self._switch.revoked

    async def stop_taking(self) -> None:
        """Take no new work, and tell everybody. There is no way back."""
        self._leaving, self._state = True, WorkerState.DRAINING
        await self._switch.stop_taking()

    def _on_stuck(self, stuck: bool) -> None:
        """Take no work while the engine is stuck. What is in the engine stays there, and goes
        elsewhere if this process has to leave."""
        if self._leaving or self._switch.revoked.is_set():
            return  # it leaves anyway
        self._state = WorkerState.DRAINING if stuck else WorkerState.READY
        for service in self._switch.services:
            service.engine_stuck(stuck)
        self._switch.note_state(self._state)

    # ------------------------------------------------------------------ orders

    async def _follow_orders(self, etcd: EtcdClient) -> None:
        """Change the role as `RoleOrder`s in etcd say, until `settle`."""
        key = keys.role_order(self._cluster.namespace, self._instance_id)

        def on_order(event: Put | Delete) -> None:
            if not isinstance(event, Put) or event.key != key.encode():
                return
            try:
                self._switch.order(decode(event.value, RoleOrder).role.names)
            except BadMessage as exc:
                self._log.warning("an order to change the role cannot be read: %s", exc)

        switching = asyncio.create_task(self._switch.run(), name="role switch")
        self._orders.push_async_callback(end, switching)
        follower = Follower(etcd, key, "the role orders", on_order)
        self._orders.push_async_callback(follower.close)
        await follower.start()

    # ------------------------------------------------------------------ what others are told

    def _as_role(self, etcd: EtcdClient, role: str, service: Service) -> Membership:
        return Membership(
            etcd,
            self._cluster.namespace,
            self._options.lease_ttl_s,
            partial(self._describe, role, service),
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
                max_model_len=engine.view.config.model_config.max_model_len,
                restarts=restarts_so_far(),
            )
        )

    @property
    def _checking(self) -> list[str]:
        return [why for service in self._switch.services if (why := service.checking())]

    @property
    def _shown_state(self) -> WorkerState:
        ready = self._state is WorkerState.READY
        return WorkerState.CHECKING if ready and self._checking else self._state

    def _ready(self) -> tuple[bool, dict[str, Any]]:
        services, switch = self._switch.services, self._switch
        reasons = [reason for service in services for reason in service.reasons()]
        reasons += [*self._checking, *([f"it {switch.told}"] if switch.told else [])]
        detail: dict[str, Any] = {"role": switch.roles} if self._elastic else {}
        detail |= {"state": self._shown_state, "degraded": bool(reasons), "reasons": reasons}
        detail |= self._guard.detail()
        # Frontends send it nothing yet. An upgrade must not end the worker before it meanwhile.
        checked = any(
            s.service.checking() for s in switch.sides if s.name == "decode" and s.service
        )
        return self._state is WorkerState.READY and not checked, detail

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = {}
        load: dict[str, Any] = {}
        for service in self._switch.services:
            found = service.status()
            load |= found.pop("load", {})  # of two sides, those of the prefill side win
            status = {**found, **status}
        if self._elastic:
            load["elastic"] = self._switch.roles or "none"
            if self._switch.told:
                load["switch"] = self._switch.told
        own = {"state": self._shown_state, "pod": pod_name(), "stays": self._stays}
        return {**own, **status, "load": load}

    def _more(self, query: Mapping[str, str]) -> dict[str, Any]:
        return {key: told for one in self._switch.services for key, told in one.more(query).items()}

    def _refresh_metrics(self) -> None:
        metrics.RESTARTS.set(restarts_so_far())
        # These gauges belong to the process. A side that rests has closed its connection to NATS,
        # and that has set the gauge to 0.
        for name, server in self._status().get("servers", {}).items() if self._elastic else ():
            UP.labels(name).set(server["up"])
        for side in self._switch.sides:
            if side.last is not None:  # gauges of a side that rests must not keep old values
                side.last.refresh_metrics()
