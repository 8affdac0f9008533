"""The prefill worker's parts, put together (worker/process.py has the life of the process).

Start: the registration, then the control connections to decode workers, then the first pull. A
drain stops pulling, and finishes the granted jobs and their writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from pullfill.config import ClusterRef
from pullfill.engine import features, kv, release
from pullfill.engine.chunks import PrefillChunks
from pullfill.engine.compat import rounding_digest
from pullfill.engine.host import EngineHooks, EngineHost
from pullfill.engine.thread import EngineThread
from pullfill.ids import new_instance_id
from pullfill.options import WorkerOptions
from pullfill.prefill_worker.decode_links import DecodeLinks
from pullfill.prefill_worker.engine import PrefillEngine
from pullfill.prefill_worker.jobs import JobRunner
from pullfill.prefill_worker.puller import Puller, budget_of
from pullfill.prefill_worker.pulling import Pulling
from pullfill.prefill_worker.reach import TransferWorkers
from pullfill.prefill_worker.read_grants import ReadGrants, open_region
from pullfill.prefill_worker.scheduler import PrefillContext, PrefillScheduler
from pullfill.prefill_worker.transfer_worker import Credits, TransferWorker
from pullfill.queue.contract import Delivery, QueueConfig
from pullfill.queue.jetstream import JetStreamConsumer
from pullfill.registry.client import EtcdClient
from pullfill.registry.directory import Directory
from pullfill.registry.live_settings import Settings
from pullfill.registry.self_checks import SelfChecks
from pullfill.runtime import log
from pullfill.runtime.health import Health, servers_json
from pullfill.runtime.lifecycle import until
from pullfill.transfer.connect import peer_transports, why_absent
from pullfill.transfer.contract import PeerTransport
from pullfill.transfer.gpu import copies
from pullfill.transfer.shm.files import RegionFiles
from pullfill.wire import Hello, QueueSettings, RegionDescriptor, WorkerRecord
from pullfill.worker import memory
from pullfill.worker.context import LATER
from pullfill.worker.process import Engine, Role, Service

logger = log.get("prefill_worker")

_MAX_JOBS = 32
_CREDITS = 256 << 20
_KEPT_S = 1.0
"""How long a drain waits after the last job for reads and copies that may still go on. They usually
end within milliseconds, but those of a stopped decode worker do not end. The blocks that it reads
stay allocated, until this process ends. If the engine stays (elastic): until the read has ended."""


class PrefillHooks(EngineHooks):
    """What runs on the engine thread."""

    def __init__(self, engine: Engine[PrefillContext]) -> None:
        self._host = engine.host
        self._scheduler = engine.context.scheduler
        self._scheduler.tier = self._tier = kv.tier_of(engine.core)
        if self._scheduler.concurrency and (chunks := PrefillChunks(engine.core)).able:
            chunks.leave_one()
        self.engine = PrefillEngine(
            engine.host,
            engine.context,
            block_size=engine.compat.block_size,
            compat_hash=engine.compat.hash(),
            limit=features.limits(engine.config.model_config),
        )

    def before_step(self) -> bool:
        if not self._scheduler.has_work:
            return self.copies_run()
        reads, sent = self._scheduler.take_in()
        if reads or sent:
            self._host.copied(reads, sent)
        return self._scheduler.has_work or self.copies_run()

    def copies_run(self) -> bool:
        return self._tier is not None and self._tier.busy

    def after_step(self, running: int) -> None:
        self._scheduler.step_done(running)

    def on_outputs(self, outputs: dict[int, Any]) -> None:
        self.engine.on_outputs(outputs)


class PrefillRole(Role[PrefillContext, PrefillHooks]):
    """See Role. copiers: the transfer workers that may still copy to decode workers."""

    name, connector, kv_role = "prefill", "PrefillConnector", "kv_both"
    module = "pullfill.prefill_worker.connector"
    log_stats = False
    serving = "is pulling"

    def __init__(self, cluster: ClusterRef, options: WorkerOptions) -> None:
        self._cluster = cluster
        self._options = options
        self.instance_id = options.instance_id or new_instance_id(self.name)
        self._key = cluster.security.cluster.load()
        self.copiers: weakref.WeakSet[TransferWorker] = weakref.WeakSet()
        self._transports: list[PeerTransport] = []
        self._absent: dict[str, str] = {}
        self._hello: Any = LATER  # a Hello, once the memory is open

    async def watch(self, etcd: EtcdClient, parts: AsyncExitStack) -> None:
        self._etcd = etcd
        self._directory = Directory(
            etcd,
            self._cluster.namespace,
            ["decode", "prefill"],
            ttl_s=self._options.lease_ttl_s,
            beat_s=self._options.lease_ttl_s / 2,  # keep-alives of the lease come more often
        )
        await self._directory.start()
        parts.push_async_callback(self._directory.close)
        self._kept = await SelfChecks.started(etcd, self._cluster.namespace)
        parts.push_async_callback(self._kept.close)

    def make_context(self, host: EngineHost, files: RegionFiles) -> PrefillContext:
        scheduler = PrefillScheduler(host.wake, self._options.concurrency or 0)
        return PrefillContext(self.instance_id, files, scheduler=scheduler)

    def make_hooks(self, engine: Engine[PrefillContext]) -> PrefillHooks:
        return PrefillHooks(engine)

    async def build(
        self,
        engine: Engine[PrefillContext],
        hooks: PrefillHooks,
        thread: EngineThread[Any],
        queue: Settings[QueueSettings],
        parts: AsyncExitStack,
    ) -> PrefillService:
        copies.when_broken(thread.fail)
        consumer = await self.connect(engine, queue, parts)
        self.open_memory(engine)
        parts.push_async_callback(memory.end, thread, engine.context, self.copiers)
        return self.pull(engine, hooks, thread, consumer, parts)

    async def connect(
        self,
        engine: Engine[PrefillContext],
        queue: Settings[QueueSettings],
        parts: AsyncExitStack,
    ) -> JetStreamConsumer:
        """Connect to the queue of the engine's model."""
        consumer = await JetStreamConsumer.connect(
            self._cluster.nats_url,
            QueueConfig(namespace=self._cluster.namespace, compat_hash=engine.compat.hash()),
            settings=queue.current,
            wait_s=self._options.connect_timeout_s,
            connect_options=self._cluster.security.nats.options(),
        )
        parts.push_async_callback(consumer.close)
        parts.callback(queue.subscribe(consumer.streams.configure))
        return consumer

    def open_memory(self, engine: Engine[PrefillContext]) -> None:
        """Open our KV memory to decode workers that read it, and say what we are. Once."""
        options, config, context = self._options, engine.config, engine.context
        if memories := context.memories:
            names = options.transports
            self._transports = peer_transports(names, memories, self._key, options.host)
            self._absent = why_absent(names, memories[0])
        self._hello = Hello(
            prefill_instance=self.instance_id,
            compat=engine.compat.hash(),
            regions=open_region(
                context, engine.compat, host=options.host, port=options.kv_port,
                advertise=options.advertise_kv, transports=options.transports, key=self._key,
            ),
            computes=rounding_digest(config),
            adapters=config.lora_config is not None,
            features=release.this.takes_features(config.model_config),
            max_prompt_tokens=_longest(config),
        )  # fmt: skip

    def pull(
        self,
        engine: Engine[PrefillContext],
        hooks: PrefillHooks,
        thread: EngineThread[Any],
        consumer: JetStreamConsumer,
        parts: AsyncExitStack,
        take_back: Callable[[Delivery], bool] = lambda _: False,
    ) -> PrefillService:
        """Build what pulls and runs jobs. Closing `parts` ends it, and the memory stays open.

        take_back: see JobRunner."""
        options, config, context = self._options, engine.config, engine.context
        loop, concurrency = asyncio.get_running_loop(), context.scheduler.concurrency
        budget = budget_of(config.scheduler_config.max_num_batched_tokens)
        blocks = -(-budget // config.cache_config.block_size)
        kv_bytes = blocks * sum(memory.layout.block_bytes for memory in context.memories)
        credits = Credits(
            options.kv_credits or max(_CREDITS, kv_bytes),
            on_room=lambda: loop.call_soon_threadsafe(puller.changed),
        )
        transfer_workers = TransferWorkers(
            context.memories, self._directory, engine.compat, self._transports, credits,
            self._absent, self.copiers,
        )  # fmt: skip
        connections = DecodeLinks(
            self._directory,
            self._hello,
            engine.compat,
            transfer_workers.open,
            lambda connection, revoke: runner.revoked(connection, revoke),
            lambda connection: runner.connection_lost(connection),
            self._key,
            lambda trial: runner.start_trial(trial),
            self._kept,
            lambda: made.checked(),
            most=options.standing_links,
        )
        parts.push_async_callback(connections.close)
        runner = JobRunner(
            connections,
            hooks.engine,
            heartbeat_s=lambda: consumer.ack_wait_s / 3,
            max_prompt_tokens=_longest(config),
            max_deliver=lambda: consumer.max_deliver,
            read_grants=ReadGrants(context.owner.fences if context.owner else None),
            on_change=lambda: puller.changed(),
            take_back=take_back,
            by_prompt=concurrency > 0,
        )
        parts.push_async_callback(runner.abandon)
        connections.activity = lambda: (runner.completed, runner.in_flight - runner.waiting)
        connections.report = lambda: context.scheduler.load()
        puller = Puller(
            consumer, runner, budget_tokens=budget, max_jobs=_MAX_JOBS, credits=credits,
            concurrency=concurrency,
        )  # fmt: skip
        runner.on_unreachable = puller.leave_to_others
        parts.push_async_callback(puller.stop)
        healths = [consumer.health, self._etcd.health]
        made = PrefillService(
            engine, thread, connections, runner, puller, credits, healths, self._hello.computes
        )
        parts.callback(made.pulling.close)
        return made


class PrefillService(Service):
    """See Service.

    healths: of NATS and of etcd.
    computes: see `WorkerRecord`.
    pulling: whether this worker pulls jobs."""

    def __init__(
        self,
        engine: Engine[PrefillContext],
        thread: EngineThread[Any],
        connections: DecodeLinks,
        runner: JobRunner,
        puller: Puller,
        credits: Credits,
        healths: list[Health],
        computes: str,
    ) -> None:
        self._computes = computes
        self._note: Callable[[], None] = lambda: None
        self._engine = engine
        self._thread = thread
        self._connections = connections
        self._runner = runner
        self._puller = puller
        self._credits = credits
        self._healths = healths
        self.pulling = Pulling(connections, puller, healths[0])

    def describe(self, record: WorkerRecord) -> tuple[WorkerRecord, list[RegionDescriptor]]:
        # Decode workers get our regions with Hello.
        return msgspec.structs.replace(record, computes=self._computes), []

    async def start(self, note: Callable[[], None]) -> None:
        self._note = note
        self._connections.start()
        self._puller.start()

    def checking(self) -> str:
        return self._connections.checking

    def checked(self) -> None:
        """Note that a decode worker or a result of a self-check has come or gone."""
        self.pulling.checks(self.checking())
        self._note()

    def reasons(self) -> list[str]:
        reasons = [health.outage() for health in self._healths if not health.up]
        if not self._connections.connected:
            reasons.append("connected to no decode worker")
        return reasons

    def told(self) -> dict[str, Any]:
        return {"decode": self._connections.connected}

    def status(self) -> dict[str, Any]:
        runner = self._runner
        return {
            "routes": self._connections.routes,
            "servers": servers_json(*self._healths),
            "load": {
                "jobs": runner.in_flight,
                "unclaimed": runner.waiting,
                "tokens": runner.in_flight_tokens,
                "tokens_per_s": self._engine.context.scheduler.load().tokens_per_s,
                "completed": runner.completed,
                "failed": runner.failed,
                "decode_workers": self._connections.connected,
                "kv_free_blocks": kv.free_blocks(self._engine.core),
                "kv_blocks": kv.usable_blocks(self._engine.core),
                "kv_credits": self._credits.describe(),
            },
        }

    def jobs(self) -> dict[str, Any]:
        return {"held": msgspec.to_builtins(self._runner.held())}

    def refresh_metrics(self) -> None:
        self._credits.refresh_metrics()

    def engine_stuck(self, stuck: bool) -> None:
        self.pulling.engine_stuck(stuck)

    async def stop_taking(self) -> None:
        await self._puller.stop()
        self._connections.leave()  # decode workers stop counting on us; granted jobs go on

    async def finished(self) -> None:
        dead = self._thread.dead
        await until(self._runner.no_jobs, dead)
        frees = any(memory.freed_at_exit for memory in self._engine.context.memories)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if frees else _KEPT_S):
                await until(self._runner.idle, dead)

    async def give_up(self) -> None:
        logger.warning("giving up %d jobs", self._runner.in_flight)
        await self._runner.abandon()

    async def engine_gone(self) -> None:
        await self._runner.abandon()


def _longest(config: Any) -> int:
    """Return the length of the longest prompt that the engine takes. vLLM samples one token.

    At its start vLLM checks that the KV cache holds `max_model_len` tokens."""
    return int(config.model_config.max_model_len) - 1
