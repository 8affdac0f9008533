"""The prefill worker's parts, put together; see main.py for its life."""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from typing import Any

from pullfill import __version__
from pullfill.config import ClusterRef, restarts_so_far
from pullfill.engine import args, compat, computes, kv
from pullfill.engine.host import EngineHost
from pullfill.engine.thread import EngineThread
from pullfill.engine.watchdog import EngineWatchdog
from pullfill.ids import new_instance_id
from pullfill.net.this_host import host_id
from pullfill.options import WorkerOptions
from pullfill.prefill_worker import context as contexts
from pullfill.prefill_worker import memory, reach, readable_memory
from pullfill.prefill_worker.context import PrefillContext
from pullfill.prefill_worker.control_connection import ControlConnection
from pullfill.prefill_worker.control_connections import ControlConnections
from pullfill.prefill_worker.credits import Credits
from pullfill.prefill_worker.engine import PrefillEngine
from pullfill.prefill_worker.puller import Puller, budget_of
from pullfill.prefill_worker.pulling import Pulling
from pullfill.prefill_worker.read_grants import ReadGrants
from pullfill.prefill_worker.runner import JobRunner
from pullfill.prefill_worker.self_check_job import delivery_of
from pullfill.prefill_worker.transfer_worker import TransferWorker
from pullfill.queue.contract import QueueConfig
from pullfill.queue.jetstream import JetStreamConsumer
from pullfill.registry.client import EtcdClient
from pullfill.registry.directory import Directory
from pullfill.registry.membership import Membership
from pullfill.registry.settings import Settings
from pullfill.runtime import log
from pullfill.runtime.health import Health, servers_json
from pullfill.runtime.lifecycle import EXIT_S, Stop, exit_within, until
from pullfill.runtime.probe import ProbeServer
from pullfill.transfer import catalogue
from pullfill.transfer.contract import PeerTransport
from pullfill.wire import (
    Compat,
    Hello,
    QueueSettings,
    RegionDescriptor,
    Revoke,
    Trial,
    WorkerRecord,
    WorkerState,
)

logger = log.get("prefill_worker")

_MAX_JOBS = 32
_CREDITS = 256 << 20


class PrefillWorker:
    """Lives on the process's asyncio loop; the engine and each transfer worker have threads of
    their own."""

    def __init__(self, cluster: ClusterRef, options: WorkerOptions, vllm_args: list[str]) -> None:
        self._cluster = cluster
        self._options = options
        self._vllm_args = vllm_args
        self._instance_id = options.instance_id or new_instance_id("prefill")
        self._stop = Stop()
        self._started_at = time.time()
        self._state = WorkerState.READY
        self._config: Any = None
        self._served_name = ""
        self._compat: Compat | None = None
        self._directory: Directory | None = None
        self._runner: JobRunner | None = None
        self._credits: Credits | None = None
        self._links: ControlConnections | None = None
        self._engine: PrefillEngine | None = None
        self._host: EngineHost | None = None
        self._probe: ProbeServer | None = None
        self._transports: list[PeerTransport] = []
        self._absent: dict[str, str] = {}
        self._healths: list[Health] = []
        self._transfer_workers: weakref.WeakSet[TransferWorker] = weakref.WeakSet()
        self._key = cluster.security.cluster.load()
        self._context = PrefillContext(self._instance_id, wake=self._wake_engine)

    async def serve(self) -> int:
        """Start everything, wait, leave. Returns the exit code."""
        self._stop.install()
        contexts.install(self._context)
        engine = EngineThread(self._make_host, self._on_built)
        engine.start()
        wait_s = self._options.connect_timeout_s
        etcd = await EtcdClient.connect(
            self._cluster.etcd_url,
            wait_s=wait_s,
            on_retry=_say,
            security=self._cluster.security.etcd,
        )
        directory = Directory(
            etcd,
            self._cluster.namespace,
            ["decode", "prefill"],
            ttl_s=self._options.lease_ttl_s,
            beat_s=self._options.lease_ttl_s / 2,  # keep-alives of the lease come more often
        )
        await directory.start()
        self._directory = directory
        host = await engine.ready
        self._guard = EngineWatchdog(engine, self._options.engine_stall_s, self._on_stuck)
        assert self._compat is not None
        settings = await Settings.started(etcd, self._cluster.namespace, QueueSettings)
        consumer = await JetStreamConsumer.connect(
            self._cluster.nats_url,
            QueueConfig(namespace=self._cluster.namespace, compat_hash=self._compat.hash()),
            settings=settings.current,
            wait_s=wait_s,
            on_event=_say,
            connect_options=self._cluster.security.nats.options(),
        )
        settings.subscribe(consumer.streams.configure)
        puller = self._assemble(host, consumer)
        assert self._links is not None
        assert self._runner is not None
        assert self._credits is not None
        probe = ProbeServer(
            self._options.host, self._ready, self._status, self._credits.refresh_metrics
        )
        await probe.start(self._options.http_port)
        self._probe = probe
        membership = Membership(
            etcd, self._cluster.namespace, self._options.lease_ttl_s, self._make_record
        )
        self._membership, self._puller = membership, puller
        try:
            await membership.join(wait_s)
            self._links.start()
            self._healths = [consumer.health, etcd.health]
            self._pulling = Pulling(self._links, puller, consumer.health)
            puller.start()
            self._guard.start()
            logger.info("%s is pulling (%s)", self._instance_id, self._served_name)
            await until(self._stop.drain, membership.revoked, engine.dead)
            code = await self._leave(engine, membership, puller)
            exit_within(EXIT_S, code)
        finally:
            await self._guard.stop()
            await membership.leave()
            await puller.stop()
            await self._runner.abandon()
            await self._links.close()
            await probe.stop()
            await memory.end(engine, self._context, self._transfer_workers)
            await settings.close()
            await consumer.close()
            await directory.close()
            await etcd.close()
        return code

    async def _leave(self, engine: EngineThread, membership: Membership, puller: Puller) -> int:
        assert self._runner is not None
        if engine.dead.is_set():
            return await self._engine_gone(engine)
        if membership.revoked.is_set():
            self._stop.ask("lease revoked")
        self._state = WorkerState.DRAINING
        await membership.set_state(WorkerState.DRAINING)
        await puller.stop()
        if self._links is not None:
            self._links.leave()  # decode workers stop counting on us; granted jobs go on
        ended = until(self._runner.idle, engine.dead)
        finished = await self._stop.race(ended, self._options.drain_timeout_s)
        if engine.dead.is_set():
            return await self._engine_gone(engine)
        if not finished:
            logger.warning("handing %d jobs back", self._runner.in_flight)
            await self._runner.abandon()
        logger.info("drained")
        return 0

    async def _engine_gone(self, engine: EngineThread) -> int:
        assert self._runner is not None
        logger.error("the engine is gone (%r): leaving", engine.failure)
        await self._runner.abandon()
        return 1

    def _on_stuck(self, stuck: bool) -> None:
        """The engine takes no steps, or does again: pull nothing meanwhile, and let no decode
        worker count on us. Jobs under way stay; they are handed back if this process leaves."""
        if self._stop.drain.is_set() or self._membership.revoked.is_set():
            return  # it leaves anyway
        self._state = WorkerState.DRAINING if stuck else WorkerState.READY
        self._pulling.engine_stuck(stuck)
        self._membership.note_state(self._state)

    # ------------------------------------------------------------------ engine thread

    def _make_host(self) -> EngineHost:
        self._config, self._served_name = args.build_config(
            self._options.model,
            self._vllm_args,
            connector="PrefillConnector",
            module="pullfill.prefill_worker.connector",
            kv_role="kv_both",
            engine_id=self._instance_id,
            extra=memory.prepare(self._context),
        )
        return EngineHost(
            self._config,
            on_outputs=self._on_outputs,
            before_step=self._before_step,
            after_step=lambda running: self._context.side.step_done(running),
            log_stats=False,
        )

    def _on_built(self, host: EngineHost, core: Any) -> None:
        geometry = self._context.geometry
        assert geometry is not None, "vLLM registered no KV cache with the connector"
        self._compat = compat.describe(self._config, self._served_name, geometry)
        self._host = host

    def _on_outputs(self, outputs: dict[int, Any]) -> None:
        if self._engine is not None:
            self._engine.on_outputs(outputs)

    def _before_step(self) -> bool:
        side = self._context.side
        if side is None or self._host is None or not side.has_work:
            return False
        reads, sent = side.take_in()
        if reads or sent:
            self._host.copied(reads, sent)
        return bool(side.has_work)

    def _wake_engine(self) -> None:
        if self._host is not None:
            self._host.wake()

    # ------------------------------------------------------------------ asyncio thread

    def _assemble(self, host: EngineHost, consumer: JetStreamConsumer) -> Puller:
        assert self._compat is not None
        assert self._directory is not None
        config, memories = self._config, self._context.memories
        if memories:
            names = self._options.transports
            self._transports = catalogue.peers(names, memories[0], self._key, self._options.host)
            self._absent = catalogue.absent(names, memories[0])
        self._engine = PrefillEngine(
            host,
            self._context,
            block_size=config.cache_config.block_size,
            compat_hash=self._compat.hash(),
        )
        self._links = ControlConnections(
            self._directory,
            Hello(
                prefill_instance=self._instance_id,
                host_id=host_id(),
                compat=self._compat.hash(),
                transports=[t.name for t in self._transports],
                regions=readable_memory.open_region(
                    self._context,
                    self._compat,
                    config.cache_config.block_size,
                    host=self._options.host,
                    port=self._options.kv_port,
                    advertise=self._options.advertise_kv,
                    transports=self._options.transports,
                    key=self._key,
                ),
                computes=computes.digest(config),
            ),
            self._compat,
            self._open_transfer_worker,
            self._on_revoke,
            self._on_lost,
            self._key,
            self._on_trial,
            most=self._options.standing_links,
        )
        self._runner = JobRunner(
            self._links,
            self._engine,
            heartbeat_s=lambda: consumer.ack_wait_s / 3,
            max_prompt_tokens=config.model_config.max_model_len - 1,
            max_deliver=lambda: consumer.max_deliver,
            readers=ReadGrants(self._context.owner.fences if self._context.owner else None),
            on_change=lambda: puller.changed(),
        )
        runner = self._runner
        self._links.activity = lambda: (runner.completed, runner.in_flight - runner.waiting)
        self._links.load = lambda: self._context.meter.load(list(self._context.tasks.values()))
        consumer.running = self._runner.running
        budget = budget_of(config.scheduler_config.max_num_batched_tokens)
        loop = asyncio.get_running_loop()
        self._credits = Credits(
            self._options.kv_credits or max(_CREDITS, self._kv_bytes(budget)),
            on_room=lambda: loop.call_soon_threadsafe(puller.changed),
        )
        puller = Puller(
            consumer,
            self._runner,
            budget_tokens=budget,
            max_jobs=_MAX_JOBS,
            credits=self._credits,
        )
        return puller

    def _kv_bytes(self, tokens: int) -> int:
        blocks: int = -(-tokens // self._config.cache_config.block_size)
        return blocks * sum(memory.layout.block_bytes for memory in self._context.memories)

    async def _open_transfer_worker(self, record: WorkerRecord) -> TransferWorker:
        """Connect to a decode worker's KV memory by its descriptor from the registry."""
        assert self._directory is not None
        assert self._compat is not None
        transfer_worker = await reach.open_transfer_worker(
            record,
            self._context,
            self._directory,
            self._compat,
            self._transports,
            self._credits,
            self._absent,
        )
        self._transfer_workers.add(transfer_worker)
        return transfer_worker

    def _on_revoke(self, link: ControlConnection, revoke: Revoke) -> None:
        assert self._runner is not None
        self._runner.revoked(link, revoke)

    def _on_trial(self, job: Trial) -> None:
        assert self._runner is not None
        self._runner.start(delivery_of(job.job))

    def _on_lost(self, link: ControlConnection) -> None:
        assert self._runner is not None
        self._runner.link_lost(link)

    def _make_record(self, incarnation: str) -> tuple[WorkerRecord, list[RegionDescriptor]]:
        assert self._compat is not None
        assert self._probe is not None
        record = WorkerRecord(
            instance_id=self._instance_id,
            incarnation=incarnation,
            role="prefill",
            state=self._state,
            model=self._served_name,
            model_path=self._options.model,
            compat=self._compat,
            host=self._options.host,
            host_id=host_id(),
            pid=os.getpid(),
            started_at=self._started_at,
            http=self._probe.url,
            max_model_len=self._config.model_config.max_model_len,
            world_size=max(1, len(self._context.ranks)),
            version=__version__,
            restarts=restarts_so_far(),
        )
        return record, []

    def _ready(self) -> tuple[bool, dict[str, Any]]:
        connected = self._links.connected if self._links is not None else []
        reasons = [health.outage() for health in self._healths if not health.up]
        if not connected:
            reasons.append("connected to no decode worker")
        told = {"decode": connected, "degraded": bool(reasons), "reasons": reasons}
        detail = {"state": self._state, **told, **self._guard.detail()}
        return self._state is WorkerState.READY, detail

    def _status(self) -> dict[str, Any]:
        runner = self._runner
        return {
            "state": self._state,
            "routes": self._links.routes if self._links else {},
            "servers": servers_json(*self._healths),
            "load": {
                "jobs": runner.in_flight if runner else 0,
                "tokens": runner.in_flight_tokens if runner else 0,
                "completed": runner.completed if runner else 0,
                "failed": runner.failed if runner else 0,
                "decode_workers": self._links.connected if self._links else [],
                "kv_free_blocks": kv.free_blocks(self._host.core if self._host else None),
                "kv_blocks": self._config.cache_config.num_gpu_blocks if self._config else 0,
                "kv_credits": self._credits.describe() if self._credits else {},
            },
        }


def _say(text: str) -> None:
    logger.warning("%s", text)
