"""The decode worker's parts, put together; see main.py for its life."""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from typing import Any

from pullfill import __version__
from pullfill.config import ClusterRef, restarts_so_far
from pullfill.decode_worker import context as contexts
from pullfill.decode_worker import descriptors, leave, memory
from pullfill.decode_worker.conditional_router import Situation
from pullfill.decode_worker.context import DecodeContext
from pullfill.decode_worker.control import ControlServer
from pullfill.decode_worker.kv_reader import reach_for
from pullfill.decode_worker.ledger import Ledger
from pullfill.decode_worker.load import load_of
from pullfill.decode_worker.offers import offer
from pullfill.decode_worker.outlook import Outlook
from pullfill.decode_worker.publisher import Publisher
from pullfill.decode_worker.request_server import RequestServer
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.decode_worker.self_check import checks_for
from pullfill.decode_worker.verify import verifier_for
from pullfill.engine import args, compat, front_wire
from pullfill.engine.host import EngineHost
from pullfill.engine.thread import EngineThread
from pullfill.engine.watchdog import EngineWatchdog
from pullfill.errors import Outcome
from pullfill.ids import new_incarnation, new_instance_id
from pullfill.net.this_host import host_id
from pullfill.options import WorkerOptions
from pullfill.queue.contract import QueueConfig
from pullfill.queue.jetstream import JetStreamProducer
from pullfill.registry.client import EtcdClient
from pullfill.registry.membership import Membership
from pullfill.registry.self_checks import SelfChecks
from pullfill.registry.settings import Settings
from pullfill.runtime import log
from pullfill.runtime.lifecycle import EXIT_S, Stop, exit_within, until
from pullfill.runtime.probe import ProbeServer
from pullfill.transfer.contract import OwnerFences
from pullfill.wire import (
    Compat,
    QueueSettings,
    RegionDescriptor,
    RouterConfig,
    WorkerRecord,
    WorkerState,
)

logger = log.get("decode_worker")

_LOOK_S = 0.05  # nothing that `leave.look` checks needs a faster reaction


class DecodeWorker:
    """Lives on the process's asyncio loop; the engine has a thread of its own."""

    def __init__(self, cluster: ClusterRef, options: WorkerOptions, vllm_args: list[str]) -> None:
        self._cluster = cluster
        self._options = options
        self._vllm_args = vllm_args
        self._instance_id = options.instance_id or new_instance_id("decode")
        self._traces = RequestTraces(self._instance_id)
        self._stop = Stop()
        self._started_at = time.time()
        self._state = WorkerState.READY
        self._settings: Settings[RouterConfig] | None = None
        self._producer: JetStreamProducer | None = None
        self._control: ControlServer | None = None
        self._publisher: Publisher | None = None
        self._membership: Membership | None = None
        self._request_server: RequestServer | None = None
        self._served_name = ""
        self._config: Any = None
        self._compat: Compat | None = None
        self._outlook: Outlook | None = None
        self._look_at = 0.0
        self._key = cluster.security.cluster.load()
        self._context = DecodeContext(
            instance_id=self._instance_id,
            incarnation=new_incarnation(),
            router_config=self._router_config,
            situation=self._situation,
            publish=self._publish,
            traces=self._traces,
            make_ledger=self._make_ledger,
            offer=partial(offer, instance_id=self._instance_id, options=options, key=self._key),
        )

    async def serve(self) -> int:
        """Start everything, wait, leave. Returns the exit code."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._stop.install()
        contexts.install(self._context)
        engine = EngineThread(self._make_host, self._on_built)
        engine.start()
        wait_s = self._options.connect_timeout_s
        self._etcd = etcd = await EtcdClient.connect(
            self._cluster.etcd_url,
            wait_s=wait_s,
            on_retry=_say,
            security=self._cluster.security.etcd,
        )
        kept = await SelfChecks.started(etcd, self._cluster.namespace)
        self._settings = await Settings.started(etcd, self._cluster.namespace, RouterConfig)
        queue = await Settings.started(etcd, self._cluster.namespace, QueueSettings)
        host = await engine.ready
        self._guard = EngineWatchdog(engine, self._options.engine_stall_s, self._on_stuck)
        await self._open_queue(queue, kept)
        probe = ProbeServer(self._options.host, self._ready, self._status, self._refresh_metrics)
        await probe.start(self._options.http_port)
        self._probe = probe
        self._membership = membership = Membership(
            etcd,
            self._cluster.namespace,
            self._options.lease_ttl_s,
            self._make_record,
            on_reregistered=lambda i: logger.warning("registered again as %s", i[:8]),
        )
        try:
            await membership.join(wait_s)
            self._guard.start()
            logger.info("%s is ready (%s)", self._instance_id, self._served_name)
            await until(self._stop.drain, membership.revoked, engine.dead)
            code = await self._leave(engine, host)
            exit_within(EXIT_S, code)
        finally:
            await self._guard.stop()
            await membership.leave()
            assert self._control is not None
            assert self._producer is not None
            await self._control.stop()
            await probe.stop()
            await leave.end_memory(engine, self._context.owner)
            await self._producer.close()
            await asyncio.gather(self._settings.close(), queue.close(), kept.close())
            await etcd.close()
        return code

    async def _leave(self, engine: EngineThread, host: EngineHost) -> int:
        if engine.dead.is_set():
            return self._engine_gone(engine)
        assert self._membership is not None
        assert self._request_server is not None
        if self._membership.revoked.is_set():
            self._stop.ask("lease revoked")
        self._state = WorkerState.DRAINING
        request_server = self._request_server
        host.submit(lambda _: request_server.start_drain())
        await self._membership.set_state(WorkerState.DRAINING)
        assert self._context.ledger is not None
        ended = leave.idle(engine, request_server, self._context.ledger)
        finished = await self._stop.race(ended, self._options.drain_timeout_s)
        if not finished:
            logger.warning("handing back %d unfinished requests", request_server.active_requests)
            await leave.migrate_unfinished(host, request_server)
        if engine.dead.is_set():
            return self._engine_gone(engine)
        logger.info("drained")
        return 0

    def _engine_gone(self, engine: EngineThread) -> int:
        logger.error("the engine is gone (%r): leaving", engine.failure)
        assert self._request_server is not None
        if not engine.hangs:
            self._request_server.close()  # its thread is over; so frontends notice now
        return 1

    def _on_stuck(self, stuck: bool) -> None:
        """The engine takes no steps, or does again: take no work meanwhile. What it was sent stays
        in the engine, and goes elsewhere if this process has to leave."""
        assert self._membership is not None
        assert self._context.ledger is not None
        if self._stop.drain.is_set() or self._membership.revoked.is_set():
            return  # it leaves anyway
        self._state = WorkerState.DRAINING if stuck else WorkerState.READY
        if stuck:
            self._context.ledger.give_up_all(Outcome.ENGINE_STUCK, but_granted=True)
        self._membership.note_state(self._state)

    # ------------------------------------------------------------------ engine thread

    def _make_host(self) -> EngineHost:
        self._config, self._served_name = args.build_config(
            self._options.model,
            self._vllm_args,
            connector="DecodeConnector",
            module="pullfill.decode_worker.connector",
            kv_role="kv_consumer",
            engine_id=self._instance_id,
            extra=memory.prepare(self._context),
        )
        return EngineHost(
            self._config,
            on_outputs=self._on_outputs,
            before_step=self._before_step,
            after_step=lambda running: self._context.extra["connector_scheduler"].step_done(
                running
            ),
            on_failed_step=lambda untouched: leave.last_words(self._request_server, untouched),
        )

    def _on_built(self, host: EngineHost, core: Any) -> None:
        geometry = self._context.geometry
        assert geometry is not None, "vLLM registered no KV cache with the connector"
        self._compat = compat.describe(self._config, self._served_name, geometry)
        self._request_server = RequestServer(
            host,
            self._traces,
            welcome=lambda: self._welcome(core),
            models=[self._served_name, self._options.model],
            key=self._key,
        )
        self._request_server.bind(self._options.host, self._options.data_port)

    def _make_ledger(self, fences: OwnerFences) -> Ledger:
        return Ledger(
            fences,
            incarnation=self._context.incarnation,
            kv_digest=self._options.kv_digest,
            kv_mode=self._options.kv_mode,
            on_event=self._wake_engine,
            on_action=self._wake_control,
        )

    def _on_outputs(self, outputs: dict[int, Any]) -> None:
        assert self._request_server is not None
        if self._context.trials is not None:
            self._context.trials.take(outputs)
        self._request_server.send_outputs(outputs)

    def _before_step(self) -> bool:
        assert self._request_server is not None
        assert self._context.ledger is not None
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + _LOOK_S
            leave.look(self._request_server, self._context.ledger)
        side = self._context.extra["connector_scheduler"]
        if self._context.ledger.has_events and (loaded := side.take_in()):
            self._request_server.host.received(loaded)
        return bool(side.has_work)

    def _publish(self, job: contexts.OpenedJob) -> None:
        assert self._publisher is not None
        if not self._context.of_a_trial(job):
            self._publisher.submit(job)

    def _router_config(self) -> RouterConfig:
        return self._settings.current if self._settings is not None else RouterConfig()

    def _situation(self, prompt_tokens: int, hit_tokens: int, ineligible: str) -> Situation:
        if self._outlook is None:
            return Situation(prompt_tokens, hit_tokens, ineligible)
        return self._outlook.situation(prompt_tokens, hit_tokens, ineligible)

    # ------------------------------------------------------------------ any thread

    def _wake_engine(self) -> None:
        if (host := self._host) is not None:
            host.wake()

    def _wake_control(self) -> None:
        if self._control is not None:
            self._loop.call_soon_threadsafe(self._control.wake)

    @property
    def _host(self) -> EngineHost | None:
        return None if self._request_server is None else self._request_server.host

    # ------------------------------------------------------------------ asyncio thread

    async def _open_queue(self, settings: Settings[QueueSettings], kept: SelfChecks) -> None:
        """The producer, the control server and the publisher: all need the engine's identity."""
        assert self._compat is not None
        assert self._context.ledger is not None
        producer = await JetStreamProducer.connect(
            self._cluster.nats_url,
            QueueConfig(namespace=self._cluster.namespace, compat_hash=self._compat.hash()),
            settings=settings.current,
            wait_s=self._options.connect_timeout_s,
            on_event=_say,
            connect_options=self._cluster.security.nats.options(),
        )
        settings.subscribe(producer.streams.configure)
        cache, memories = self._config.cache_config, self._context.memories
        control = ControlServer(
            instance_id=self._instance_id,
            compat=self._compat,
            ledger=self._context.ledger,
            traces=self._traces,
            cancel=producer.cancel,  # type: ignore[arg-type]
            nak=producer.nak,
            key=self._key,
            verifier=verifier_for(self._context.ledger, memories),
            reach=reach_for(memories, self._options, self._key),
        )
        assert self._request_server is not None
        control.checks = checks_for(
            self._context, self._config, self._compat, self._request_server.host, kept,
            control.recount, lambda job: publisher.encode(job),
        )  # fmt: skip
        await control.start(self._options.host, self._options.control_port)
        publisher = self._publisher = Publisher(
            self._loop, producer, self._context.ledger, instance_id=self._instance_id,
            control=self._options.advertise_control or control.address,
            compat_hash=self._compat.hash(), block_size=cache.block_size,
        )  # fmt: skip
        control.commits.committed = producer.committed
        self._context.queue_full = producer.look_again
        control.past_stream = lambda: producer.past_stream
        self._control, self._producer = control, producer
        self._outlook = Outlook(
            self._context.ledger,
            producer,
            control,
            self._etcd.health,
            cache,
            sum(memory.nbytes for memory in memories),
            within_reach=self._context.owner is not None,
            draining=lambda: self._state is not WorkerState.READY,
        )
        self._traces.outage = self._outlook.outage

    def _make_record(self, incarnation: str) -> tuple[WorkerRecord, list[RegionDescriptor]]:
        """What we publish under a new incarnation. Everything granted before it is void."""
        context, config = self._context, self._config
        assert context.ledger is not None
        assert self._compat is not None
        assert self._request_server is not None
        assert self._control is not None
        context.incarnation = incarnation
        context.ledger.new_incarnation(incarnation)
        record = WorkerRecord(
            instance_id=self._instance_id,
            incarnation=incarnation,
            role="decode",
            state=self._state,
            model=self._served_name,
            model_path=self._options.model,
            compat=self._compat,
            host=self._options.host,
            host_id=host_id(),
            pid=os.getpid(),
            started_at=self._started_at,
            http=self._probe.url,
            data=self._request_server.address,
            control=self._options.advertise_control or self._control.address,
            max_model_len=config.model_config.max_model_len,
            world_size=max(1, len(context.ranks)),
            version=__version__,
            restarts=restarts_so_far(),
        )
        block_size = config.cache_config.block_size
        return record, descriptors.describe(context, incarnation, self._compat, block_size)

    def _welcome(self, core: Any) -> front_wire.DecodeWelcome:
        config = self._config
        return front_wire.DecodeWelcome(
            decode_instance=self._instance_id,
            incarnation=self._context.incarnation,
            vllm_version=self._compat.vllm if self._compat else "",
            max_model_len=config.model_config.max_model_len,
            num_gpu_blocks=config.cache_config.num_gpu_blocks or 0,
            block_size=config.cache_config.block_size,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            supported_tasks=list(core.get_supported_tasks()),
        )

    def _ready(self) -> tuple[bool, dict[str, Any]]:
        reasons = self._outlook.reasons() if self._outlook is not None else []
        told = {"degraded": bool(reasons), "reasons": reasons}
        detail = {"state": self._state, **told, **self._guard.detail()}
        return self._state is WorkerState.READY, detail

    def _status(self) -> dict[str, Any]:
        core = self._host.core if self._host is not None else None
        blocks = self._config.cache_config.num_gpu_blocks if self._config else 0
        return {
            "state": self._state,
            "load": load_of(
                core, self._context.ledger, self._request_server, self._control, blocks
            ),
            **(self._outlook.servers() if self._outlook is not None else {}),
        }

    def _refresh_metrics(self) -> None:
        if self._outlook is not None:
            self._outlook.refresh_metrics()


def _say(text: str) -> None:
    logger.warning("%s", text)
