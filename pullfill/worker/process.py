"""`pullfill decode`, `pullfill prefill`: one worker process, from flags to exit code.

It has an engine, its KV memory, and a decode side, a prefill side, or both:

    engine thread loads the model ┐
                                  ├─▶ sides are built ─▶ registered ─▶ serving ─▶ drain ─▶ closed
    etcd is dialled ──────────────┘

A role is which sides serve. `pullfill decode` and `pullfill prefill` have one side. With
`--elastic` a worker has both, and orders in etcd say which of them serve (switch.py). The rooms of
the sides say how each is made (sides.py). What was opened is closed in the opposite order.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from pullfill.config import ClusterRef, pod_name, ranks_of, restarts_so_far
from pullfill.engine import args, check, compat, environment, kv_offloading
from pullfill.engine.host import EngineHost
from pullfill.engine.life import EngineLife, EngineWatchdog
from pullfill.engine.view import View
from pullfill.errors import BadMessage, ConfigError, PullfillError, exit_code
from pullfill.ids import new_instance_id
from pullfill.net.this_host import allow_open_files, host_id
from pullfill.options import LogFormat, WorkerOptions
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from pullfill.registry.live_settings import Settings
from pullfill.registry.membership import Membership
from pullfill.registry.watch import Delete, Follower, Put
from pullfill.runtime import log, metrics, tracing
from pullfill.runtime.health import UP
from pullfill.runtime.lifecycle import EXIT_S, STEP_FAILED, Stop, end, exit_within, leave, until
from pullfill.runtime.probe import ProbeServer
from pullfill.transfer.shm.files import RegionFiles
from pullfill.wire import (
    QueueSettings,
    RegionDescriptor,
    RoleOrder,
    WorkerRecord,
    WorkerState,
    decode,
)
from pullfill.worker import context as contexts
from pullfill.worker import memory
from pullfill.worker.own_loop import OwnLoop
from pullfill.worker.sides import Engine, Role, Service
from pullfill.worker.switch import Side, Switch

# By name, as vLLM gets the connector: the rooms of the sides import this one.
ROLES = {
    "decode": ("pullfill.decode_worker.side", "DecodeRole"),
    "prefill": ("pullfill.prefill_worker.side", "PrefillRole"),
}


def run(
    first: str, cluster: ClusterRef, options: WorkerOptions, vllm_args: Sequence[str]
) -> NoReturn:
    """Run one worker that begins as `first`, until told to leave. Does not return: it ends the
    process, so that no thread of a library can hold it.

    Exit codes: 0: drained. 1: failed. 2: wrong flags or an incompatible peer
    (`errors.exit_code`)."""
    log.setup(first, as_json=options.log_format is LogFormat.JSON)
    allow_open_files()
    environment.begin_imports()
    eager = "--enforce-eager" in vllm_args
    core = options.cores[0] if len(options.cores) == 1 else None
    ranks = ranks_of(list(vllm_args))
    environment.prepare(cpu=core, model=options.model, eager=eager, ranks=ranks)

    async def serve() -> int:
        names = [first]
        if options.elastic:
            names = list(ROLES)
            if options.advertise_kv:
                raise ConfigError(
                    "--elastic needs a KV port for each role, and --advertise-kv names one: leave "
                    "it out"
                )
        name = options.instance_id or new_instance_id("worker" if options.elastic else first)
        roles: list[Any] = []
        for number, role in enumerate(names):
            module, kind = ROLES[role]
            own = replace(options, instance_id=name, kv_port=kv_port_of(options, number))
            # The prefill side gets the decode side beside it.
            roles.append(getattr(import_module(module), kind)(cluster, own, *roles))
        process = WorkerProcess(roles, first, name, cluster, options, list(vllm_args))
        return await process.serve()

    asyncio.run(_serve(first, serve))
    raise AssertionError("unreachable")


def kv_port_of(options: WorkerOptions, number: int) -> int:
    """Return where a side listens for KV. Of two sides the second one takes the next port.

    Raises ConfigError: a worker that changes its role hours later could not open that port."""
    port = options.kv_port and options.kv_port + number
    taken = options.control_port, options.data_port, options.http_port, 1 << 16
    if number and port and port in taken:
        raise ConfigError(
            f"--elastic with --kv-port {options.kv_port} also needs port {port}, but another flag "
            "names it, or it is too high: choose another --kv-port"
        )
    return port


async def _serve(role: str, serve: Callable[[], Coroutine[Any, Any, int]]) -> NoReturn:
    """Serve, and end the process from inside the loop."""
    # Closing the loop would wait for whatever its threads still do.
    try:
        check.require_version()
        code = await serve()
    except PullfillError as exc:
        log.complain(exc)
        code = exit_code(exc)
    except Exception:
        log.get(f"{role}_worker").exception("%s worker failed", role)
        code = 1
    tracing.close()
    leave(code)


class WorkerProcess:
    """One worker, on the process's asyncio loop. The engine has its own thread.

    roles: the sides that it has. With two the worker follows orders.
    first: name of the one in which it begins."""

    def __init__(
        self,
        roles: Sequence[Role[Any]],
        first: str,
        instance_id: str,
        cluster: ClusterRef,
        options: WorkerOptions,
        vllm_args: list[str],
    ) -> None:
        self._roles = roles
        self._elastic = len(roles) > 1
        self._first = next(role for role in roles if role.name == first)
        self._cluster = cluster
        self._options = options
        self._vllm_args = vllm_args
        self._instance_id = instance_id
        log.identify(instance_id)
        self._log = log.get(f"{first}_worker")
        self._stop = Stop()
        self._started_at = time.time()
        self._state = WorkerState.READY

    async def serve(self) -> int:
        """Build everything, serve, leave. Returns the exit code."""
        self._stop.starting = True  # a model may take minutes to load
        self._stop.install()
        self._life = life = EngineLife(self._load, self._built)
        life.start()
        options, namespace = self._options, self._cluster.namespace
        async with AsyncExitStack() as parts:
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
            self._engine: Engine[Any] = await life.ready
            kv = memory.KvMemory(self._contexts, [role.copiers for role in self._roles])
            parts.push_async_callback(memory.end, life, kv)
            for role, context in zip(self._roles, self._contexts, strict=True):
                await role.build(self._engine.of(context), queue, parts)
            self._guard = EngineWatchdog(life, options.engine_stall_s, self._on_stuck)
            as_role = partial(self._as_role, etcd)
            sides = [Side(role, as_role) for role in self._roles]
            self._switch = Switch(sides, self._first.name, options.drain_timeout_s)
            probe = ProbeServer(
                options.host, self._ready, self._status, self._refresh_metrics, self._jobs
            )
            await probe.start(options.http_port)
            parts.push_async_callback(probe.stop)
            self._http = probe.url
            parts.push_async_callback(self._switch.leave)
            self._stop.starting = False
            await self._switch.join(options.connect_timeout_s)
            self._guard.start()
            parts.push_async_callback(self._guard.stop)
            orders = await self._follow_orders(etcd) if self._elastic else AsyncExitStack()
            parts.push_async_callback(orders.aclose)
            name, model = self._instance_id, self._engine.served_name
            elastic = " (elastic)" if self._elastic else ""
            self._log.info("%s %s%s (%s)", name, self._first.serving, elastic, model)
            await until(self._stop.drain, self._switch.revoked, life.dead)
            await orders.aclose()
            code = await self._leave(life)
            exit_within(EXIT_S, code)
        return code

    async def _leave(self, life: EngineLife[Any]) -> int:
        """Finish the work, or let others do the rest. Returns the exit code."""
        if self._switch.revoked.is_set():
            self._stop.ask("lease revoked")
        services = self._switch.services
        if not life.dead.is_set():
            self._state = WorkerState.DRAINING
            await self._switch.stop_taking()
            finished = await self._stop.race(
                _all(service.finished() for service in services), self._options.drain_timeout_s
            )
            if not finished and not life.dead.is_set():
                await _all(service.give_up() for service in services)
        if life.dead.is_set():
            self._log.error("the engine has ended (%r): exiting", life.failure)
            await _all(service.engine_gone(life.hangs) for service in services)
            return 1 if life.hangs else STEP_FAILED
        self._log.info("drained")
        return 0

    def _on_stuck(self, stuck: bool) -> None:
        """Take no work while the engine is stuck. What is in the engine stays there, and goes
        elsewhere if this process has to leave."""
        if self._stop.drain.is_set() or self._switch.revoked.is_set():
            return  # it leaves anyway
        self._state = WorkerState.DRAINING if stuck else WorkerState.READY
        for service in self._switch.services:
            service.engine_stuck(stuck)
        self._switch.note_state(self._state)

    # ------------------------------------------------------------------ orders

    async def _follow_orders(self, etcd: EtcdClient) -> AsyncExitStack:
        """Change the role as `RoleOrder`s in etcd say. Closing what this returns ends that."""
        key = keys.role_order(self._cluster.namespace, self._instance_id)

        def on_order(event: Put | Delete) -> None:
            if not isinstance(event, Put) or event.key != key.encode():
                return
            try:
                self._switch.order(decode(event.value, RoleOrder).role.names)
            except BadMessage as exc:
                self._log.warning("an order to change the role cannot be read: %s", exc)

        orders = AsyncExitStack()
        switching = asyncio.create_task(self._switch.run(), name="role switch")
        orders.push_async_callback(end, switching)
        follower = Follower(etcd, key, "the role orders", on_order)
        orders.push_async_callback(follower.close)
        await follower.start()
        return orders

    # ------------------------------------------------------------------ engine thread

    def _load(self) -> EngineHost:
        environment.bound_compute_threads()
        name, role = self._instance_id, self._first
        # One engine has one KV memory. The second side has a fence file of its own: so a new
        # incarnation of the one side does not void what the other side has granted.
        files = [RegionFiles(name + end) for end in ("", "-r")[: len(self._roles)]]
        self._config, self._served_name = args.build_config(
            self._options.model,
            self._vllm_args,
            kv_role="kv_both" if self._elastic else role.kv_role,
            engine_id=name,
            extra={"instance_id": name, "directory": str(files[0].directory)},
        )
        tracing.begin(self._config.observability_config.otlp_traces_endpoint, role.name, name)
        self._fingerprint = compat.fingerprint_as_run(self._config)
        if self._elastic:
            refuse_offloading(self._config)
        for one in self._roles:
            one.adjust(self._config)
        host = EngineHost(self._config, log_stats=any(one.log_stats for one in self._roles))
        self._contexts = [
            one.make_context(host.wake, of_it)
            for one, of_it in zip(self._roles, files, strict=True)
        ]
        sides = zip(self._contexts, self._roles, strict=True)
        self._halves = [one.make_half(context) for context, one in sides]
        contexts.install(*zip(self._contexts, self._halves, strict=True))
        return host

    def _built(self, host: EngineHost, core: Any) -> Engine[Any]:
        first = self._contexts[0]
        if first.geometry is None:
            raise RuntimeError("vLLM registered no KV cache with the connector")
        described = compat.describe(
            self._config, self._served_name, self._fingerprint, first.geometry
        )
        view = View(core)
        for half in self._halves:
            half.built(view)
        loop = OwnLoop(host, core, self._life, first.adapters, self._halves)
        host.use(loop)
        return Engine(
            view, loop, loop, loop, self._served_name, described, first, self._life.dead,
            self._life.fail,
        )  # fmt: skip

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
        told: dict[str, Any] = {"role": switch.roles} if self._elastic else {}
        for service in services:
            told |= service.told()
        told |= {"degraded": bool(reasons), "reasons": reasons}
        detail = {"state": self._shown_state, **told, **self._guard.detail()}
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
        return {"state": self._shown_state, "pod": pod_name(), **status, "load": load}

    def _jobs(self) -> dict[str, Any]:
        return {key: told for one in self._switch.services for key, told in one.jobs().items()}

    def _refresh_metrics(self) -> None:
        metrics.RESTARTS.set(restarts_so_far())
        # These gauges belong to the process. A side that rests has closed its connection to NATS,
        # and that has set the gauge to 0.
        for name, server in self._status().get("servers", {}).items() if self._elastic else ():
            UP.labels(name).set(server["up"])
        for side in self._switch.sides:
            if side.last is not None:  # gauges of a side that rests must not keep old values
                side.last.refresh_metrics()


def refuse_offloading(config: Any) -> None:
    """Raise ConfigError if vLLM's config offloads KV, by whatever flag or file of flags."""
    if kv_offloading.size_of(config):
        raise ConfigError(
            "--elastic does not work with vLLM's KV offloading: leave out one of them"
        )


async def _all(work: Any) -> None:
    await asyncio.gather(*work)
