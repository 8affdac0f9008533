"""The decode worker's parts, put together (worker/process.py has the life of the process).

Start: the control server, the publisher and the request server listen; last comes the registration,
which makes frontends and prefill workers connect. A drain leaves routing at once, finishes the
streams and closes the jobs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import msgspec

from pullfill.config import ClusterRef
from pullfill.decode_worker import descriptors, leave
from pullfill.decode_worker.context import DecodeContext
from pullfill.decode_worker.control import ControlServer
from pullfill.decode_worker.kv_reader import reach_for
from pullfill.decode_worker.ledger import Ledger
from pullfill.decode_worker.load import LoadReports, demand_of, jobs_of, load_of, show_demand
from pullfill.decode_worker.offers import offer
from pullfill.decode_worker.outlook import Outlook
from pullfill.decode_worker.prefix.block_events import publish_blocks
from pullfill.decode_worker.prefix.fetches import attach
from pullfill.decode_worker.publisher import Publisher
from pullfill.decode_worker.request_server import RequestServer
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.decode_worker.rules import SELF_CHECK_PENDING
from pullfill.decode_worker.self_check import Checks, checks_for
from pullfill.decode_worker.step_meter import StepMeter
from pullfill.engine import front_wire, kv
from pullfill.engine.chunks import PrefillChunks
from pullfill.engine.host import EngineHooks, EngineHost
from pullfill.engine.kv_events import KvEvents
from pullfill.engine.load import EngineLoad
from pullfill.engine.seats import Seats
from pullfill.engine.thread import EngineThread
from pullfill.errors import Outcome
from pullfill.ids import new_incarnation, new_instance_id
from pullfill.options import WorkerOptions
from pullfill.queue.contract import QueueConfig
from pullfill.queue.jetstream import JetStreamProducer
from pullfill.registry.client import EtcdClient
from pullfill.registry.live_settings import Settings
from pullfill.registry.self_checks import SelfChecks
from pullfill.runtime import log
from pullfill.snapshot import Demand
from pullfill.transfer.contract import OwnerFences
from pullfill.transfer.gpu import copies
from pullfill.transfer.shm.files import RegionFiles
from pullfill.wire import QueueSettings, RegionDescriptor, RouterConfig, WorkerRecord
from pullfill.worker import memory
from pullfill.worker.process import Engine, Role, Service

logger = log.get("decode_worker")

_LOOK_S = 0.05  # nothing that `leave.look` checks needs a faster reaction


class DecodeHooks(EngineHooks):
    """What runs on the engine thread, and the request server there."""

    def __init__(
        self,
        engine: Engine[DecodeContext],
        options: WorkerOptions,
        server: RequestServer,
        loop: asyncio.AbstractEventLoop,
        events: KvEvents,
    ) -> None:
        self._host = engine.host
        self._context = engine.context
        self._ledger = engine.context.ledger
        self._scheduler = engine.context.scheduler
        self._scheduler.tier = self._tier = kv.tier_of(engine.core)
        self._scheduler.in_flight = engine.core.scheduler._inflight_prefills
        self.meter = StepMeter(engine.context, PrefillChunks(engine.core))
        self._scheduler.meter = self.meter
        if options.reserve_seats:
            self._scheduler.seats = Seats(engine.core)
        self._look_at = 0.0
        self.unproved_blocks: Callable[[], int] = lambda: 0
        self.server = server
        self.reports = LoadReports(
            EngineLoad(engine.core),
            server,
            lambda delay_s: _call_soon(loop, partial(loop.call_later, delay_s, engine.host.wake)),
        )
        self.blocks = publish_blocks(engine, server, loop, events)
        self._events = events
        server.bind(options.host, options.data_port)

    def before_step(self) -> bool:
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + _LOOK_S
            leave.look(self.server, self._ledger, self.unproved_blocks())
            self._events.look()
        self.reports.look(now)
        if self._scheduler.has_events and (loaded := self._scheduler.finish()):
            self._host.received(loaded)
        self.meter.before_step()
        return self._scheduler.has_work or self.copies_run()

    def copies_run(self) -> bool:
        return self._tier is not None and self._tier.busy

    def after_step(self, running: int) -> None:
        self.meter.after_step(running)
        self._scheduler.step_done(running)

    def on_outputs(self, outputs: dict[int, Any]) -> None:
        if self._context.trials is not None:
            self._context.trials.take(outputs)
        self.server.send_outputs(outputs)

    def on_failed_step(self, untouched: set[str]) -> None:
        leave.last_words(self.server, untouched)


class DecodeRole(Role[DecodeContext, DecodeHooks]):
    """See Role.

    copiers: others that may copy from or to the KV memory. It is closed after they have ended."""

    name, connector, kv_role = "decode", "DecodeConnector", "kv_consumer"
    module = "pullfill.decode_worker.connector"

    def __init__(self, cluster: ClusterRef, options: WorkerOptions) -> None:
        self._cluster = cluster
        self._options = options
        self.instance_id = options.instance_id or new_instance_id(self.name)
        self._key = cluster.security.cluster.load()
        self._traces = RequestTraces(self.instance_id)
        self._events = KvEvents()
        # The engine may look before `watch` has read the stored settings.
        self._router_config: Callable[[], RouterConfig] = RouterConfig
        self._loop = asyncio.get_running_loop()
        self.copiers: Collection[memory.Copier] = ()

    async def watch(self, etcd: EtcdClient, parts: AsyncExitStack) -> None:
        self._etcd = etcd
        namespace = self._cluster.namespace
        self._kept = await SelfChecks.started(etcd, namespace)
        parts.push_async_callback(self._kept.close)
        settings = await Settings(etcd, namespace, RouterConfig).start()
        parts.push_async_callback(settings.close)
        self._router_config = lambda: settings.current

    def adjust(self, config: Any) -> None:
        self._events.switch_on(config)

    def make_context(self, host: EngineHost, files: RegionFiles) -> DecodeContext:
        def make_ledger(fences: OwnerFences) -> Ledger:
            return Ledger(
                fences,
                incarnation=context.incarnation,
                kv_mode=self._options.kv_mode,
                on_event=host.wake,
                on_action=lambda: context.wake_control(),
            )

        context = DecodeContext(
            self.instance_id,
            files,
            incarnation=new_incarnation(),
            router_config=lambda: self._router_config(),
            traces=self._traces,
            make_ledger=make_ledger,
            offer=partial(
                offer, instance_id=self.instance_id, options=self._options, key=self._key
            ),
        )
        return context

    def make_hooks(self, engine: Engine[DecodeContext]) -> DecodeHooks:
        def welcome() -> front_wire.DecodeWelcome:
            return _welcome(engine, hooks.reports, self._events)

        server = RequestServer(
            engine.host,
            self._traces,
            welcome=welcome,
            models=[engine.served_name, self._options.model],
            adapters=engine.context.adapters,
            key=self._key,
        )
        hooks = DecodeHooks(engine, self._options, server, self._loop, self._events)
        return hooks

    async def build(
        self,
        engine: Engine[DecodeContext],
        hooks: DecodeHooks,
        thread: EngineThread[Any],
        queue: Settings[QueueSettings],
        parts: AsyncExitStack,
    ) -> DecodeService:
        options, context = self._options, engine.context
        copies.when_broken(thread.fail)
        producer = await JetStreamProducer.connect(
            self._cluster.nats_url,
            QueueConfig(namespace=self._cluster.namespace, compat_hash=engine.compat.hash()),
            settings=queue.current,
            wait_s=options.connect_timeout_s,
            connect_options=self._cluster.security.nats.options(),
        )
        parts.push_async_callback(producer.close)
        queue.subscribe(producer.streams.configure)
        parts.push_async_callback(memory.end, thread, context, self.copiers)
        made = checks_for(context, engine.config, engine.compat, engine.host, self._kept)
        if made is not None:
            context.trials, checks = made
            parts.push_async_callback(checks.close)
        control = ControlServer(
            instance_id=self.instance_id,
            compat=engine.compat,
            ledger=context.ledger,
            traces=self._traces,
            cancel=producer.cancel,  # type: ignore[arg-type]
            nak=producer.nak,
            key=self._key,
            reach=reach_for(context.memories, options, self._key),
            forecaster=hooks.meter.model.workers,
            checks=None if made is None else checks,
        )
        fetches = attach(engine, hooks.server, control, hooks.meter, options, self._key)
        if fetches is not None:
            parts.push_async_callback(fetches.close)
        if (leases := control.leases) is not None:
            hooks.unproved_blocks = lambda: leases.unproved_blocks
        await control.start(options.host, options.control_port)
        parts.push_async_callback(control.stop)
        address = options.advertise_control or control.address
        publisher = Publisher(
            self._loop, producer, context.ledger, instance_id=self.instance_id,
            compat_hash=engine.compat.hash(), send=control.send,
        )  # fmt: skip
        control.grants.claimed, control.grants.committed = producer.claimed, producer.committed
        outlook = Outlook(
            context,
            producer,
            control,
            self._etcd.health,
            engine.config.cache_config,
            sum(memory.nbytes for memory in context.memories),
            meter=hooks.meter,
            engine=context.scheduler.never or ("" if context.owner else "no_transport"),
            target_blocks=context.scheduler.target_blocks,
            local_tokens=context.scheduler.local_tokens,
        )
        self._traces.outage = outlook.outage
        context.situation = outlook.situation
        context.publish = publisher.submit
        context.queue_full = producer.look_again
        context.wake_control = partial(_call_soon, self._loop, control.wake)
        parts.push_async_callback(hooks.blocks.close)
        join = partial(self._join, control.checks)
        return DecodeService(engine, hooks, control, outlook, address, thread, join)

    def _join(self, checks: Checks | None, note: Callable[[], None]) -> None:
        if checks is not None:
            checks.join(self._etcd, self._cluster.namespace, note)


class DecodeService(Service):
    """See Service. join: begins the self-checks with the workers in the registry."""

    def __init__(
        self,
        engine: Engine[DecodeContext],
        hooks: DecodeHooks,
        control: ControlServer,
        outlook: Outlook,
        control_address: str,
        thread: EngineThread[Any],
        join: Callable[[Callable[[], None]], None],
    ) -> None:
        self._join = join
        self._engine = engine
        self._server = hooks.server
        self._blocks = hooks.blocks
        self._meter = hooks.meter
        self._control = control
        self._outlook = outlook
        self._control_address = control_address
        self._thread = thread
        self._ledger = engine.context.ledger
        self._drains = self._rests = False

    def describe(self, record: WorkerRecord) -> tuple[WorkerRecord, list[RegionDescriptor]]:
        engine, incarnation = self._engine, record.incarnation
        engine.context.incarnation = incarnation
        self._ledger.new_incarnation(incarnation)
        if self._control.leases is not None:
            self._control.leases.renew()
        described = descriptors.describe(engine.context, incarnation, engine.compat)
        checks = self._control.checks
        record = msgspec.structs.replace(
            record, data=self._server.address, control=self._control_address,
            computes=checks.computes if checks else "",
        )  # fmt: skip
        return record, described

    async def start(self, note: Callable[[], None]) -> None:
        # Frontends and prefill workers connect by themselves once the worker is registered.
        self._join(note)

    def checking(self) -> str:
        checks = self._control.checks
        if checks is None or not checks.joining:
            return ""
        return f"{SELF_CHECK_PENDING}: the registry lists prefill workers of a new kind"

    async def resume(self) -> None:
        """Serve again after a drain. Call it before the worker registers again."""
        self._drains = self._outlook.draining = self._rests = False
        if self._control.leases is not None:
            self._control.leases.reopen()
        await self._dismiss(draining=False)

    async def rest(self) -> None:
        """End the connections to all peers. This worker is no decode worker until `resume`.

        The ledger goes on: it frees the blocks of writers that are not proved quiet yet."""
        self._rests = True
        self._control.dismiss()
        if self._control.leases is not None:
            self._control.leases.renew()
        await self._dismiss(draining=True)

    async def _dismiss(self, draining: bool) -> None:
        work = partial(self._server.dismiss, draining)
        await self._engine.host.call(lambda _: work(), until=self._thread.dead)

    def reasons(self) -> list[str]:
        return self._outlook.reasons()

    def told(self) -> dict[str, Any]:
        return {}

    def status(self) -> dict[str, Any]:
        load = load_of(self._engine, self._server, self._control)
        load["prefix"] = self._blocks.status()
        load["demand"] = msgspec.to_builtins(self._demand())
        return {"load": load, **self._outlook.servers()}

    def jobs(self) -> dict[str, Any]:
        return {"jobs": msgspec.to_builtins(jobs_of(self._ledger))}

    def refresh_metrics(self) -> None:
        self._outlook.refresh_metrics()
        show_demand(Demand() if self._rests else self._demand())

    def _demand(self) -> Demand:
        return demand_of(self._engine, self._control, self._meter)

    def engine_stuck(self, stuck: bool) -> None:
        self._outlook.draining = stuck or self._drains
        if stuck:
            self._ledger.give_up_all(Outcome.ENGINE_STUCK, but_granted=True)

    async def stop_taking(self) -> None:
        self._drains = self._outlook.draining = True
        self._engine.host.submit(lambda _: self._server.start_drain())

    async def finished(self) -> None:
        await leave.idle(self._thread, self._server, self._ledger)
        if self._control.leases is not None:
            await self._control.leases.drain()

    async def give_up(self) -> None:
        logger.warning("migrating %d unfinished requests", self._server.active_requests)
        await leave.migrate_unfinished(self._engine.host, self._server)

    async def engine_gone(self) -> None:
        if not self._thread.hangs:
            self._server.close()  # its thread is over; so frontends notice now


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    loop.call_soon_threadsafe(function)


def _welcome(
    engine: Engine[DecodeContext], reports: LoadReports, events: KvEvents
) -> front_wire.DecodeWelcome:
    config = engine.config
    return front_wire.DecodeWelcome(
        decode_instance=engine.context.instance_id,
        vllm_version=engine.compat.vllm,
        max_model_len=config.model_config.max_model_len,
        num_gpu_blocks=config.cache_config.num_gpu_blocks or 0,
        block_size=config.cache_config.block_size,
        supported_tasks=list(engine.core.get_supported_tasks()),
        load=reports.current(),
        prefix_block_size=events.block_size,
        no_prefix_events=events.missing,
    )
