"""The elastic worker's parts, put together (worker/process.py has the life of the process).

It has one engine, one KV memory and two sides: that of a decode worker and that of a prefill
worker. switch.py decides which of them serve. The process has one instance id in all its roles.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from pullfill import wire
from pullfill.config import ClusterRef, ranks_of
from pullfill.decode_worker.ledger import JobState, Ledger
from pullfill.decode_worker.side import DecodeRole
from pullfill.elastic.context import ElasticContext
from pullfill.elastic.hooks import ElasticHooks
from pullfill.elastic.service import ElasticService
from pullfill.elastic.sides import DecodeSide, PrefillSide
from pullfill.elastic.slack import Slack
from pullfill.elastic.switch import Switch
from pullfill.engine import kv_offloading
from pullfill.engine.host import EngineHost
from pullfill.engine.thread import EngineThread
from pullfill.errors import BadMessage, ClaimRefused, ConfigError, Outcome
from pullfill.ids import new_instance_id
from pullfill.options import WorkerOptions
from pullfill.prefill_worker.side import PrefillRole, PrefillService
from pullfill.queue.contract import Delivery
from pullfill.registry.client import EtcdClient
from pullfill.registry.live_settings import Settings
from pullfill.transfer.shm.files import RegionFiles
from pullfill.wire import PrefillJob, QueueSettings, RefuseReason
from pullfill.worker import context as contexts
from pullfill.worker import memory
from pullfill.worker.process import AsRole, Engine, Registration, Role, Service

NO_OFFLOADING = "--elastic does not work with vLLM's KV offloading: leave out one of them"
ONE_RANK = "--elastic works with one rank: leave out --elastic, or -tp and -pp"


def check(options: WorkerOptions, vllm_args: list[str]) -> None:
    """Refuse what an elastic worker cannot do yet. Raises ConfigError."""
    if any(arg.startswith("--kv-offloading") for arg in vllm_args):
        raise ConfigError(NO_OFFLOADING)
    if ranks_of(vllm_args) > 1:
        raise ConfigError(ONE_RANK)
    if options.kv_port or options.advertise_kv:
        raise ConfigError(
            "--elastic needs a KV port for each role, and --kv-port and --advertise-kv name one: "
            "leave them out"
        )


class ElasticRole(Role[ElasticContext, ElasticHooks]):
    """See Role. name: the role in which it starts."""

    module, connector, kv_role = "pullfill.elastic.connector", "ElasticConnector", "kv_both"
    serving = "is ready (elastic)"

    def __init__(self, name: str, cluster: ClusterRef, options: WorkerOptions) -> None:
        self.name = name
        self.instance_id = options.instance_id or new_instance_id("worker")
        options = replace(options, instance_id=self.instance_id)
        self._cluster = cluster
        self._options = options
        self._prefill = PrefillRole(cluster, options)
        # The decode side ends the memory of both sides.
        self._decode = DecodeRole(cluster, options, self._prefill.copiers)

    async def watch(self, etcd: EtcdClient, parts: AsyncExitStack) -> None:
        self._etcd = etcd
        await self._decode.watch(etcd, parts)
        await self._prefill.watch(etcd, parts)

    def adjust(self, config: Any) -> None:
        # However it was asked for: vLLM has several flags for it, and files of flags.
        if kv_offloading.size_of(config):
            raise ConfigError(NO_OFFLOADING)
        if config.parallel_config.world_size > 1:
            raise ConfigError(ONE_RANK)
        self._decode.adjust(config)

    def make_context(self, host: EngineHost, files: RegionFiles) -> ElasticContext:
        decode = self._decode.make_context(host, files)
        # The second one has no KV, only the fence of the prefill side.
        prefill = self._prefill.make_context(host, RegionFiles(f"{self.instance_id}-r"))
        contexts.install(decode, prefill)
        return ElasticContext(self.instance_id, files, decode=decode, prefill=prefill)

    def make_hooks(self, engine: Engine[ElasticContext]) -> ElasticHooks:
        return ElasticHooks(self._prefill.make_hooks(_with(engine, engine.context.prefill)))

    async def build(
        self,
        engine: Engine[ElasticContext],
        hooks: ElasticHooks,
        thread: EngineThread[Any],
        queue: Settings[QueueSettings],
        parts: AsyncExitStack,
    ) -> ElasticService:
        decode = _with(engine, engine.context.decode)
        prefill = _with(engine, engine.context.prefill)
        self._decoding = side = await self._decode.build_side(decode, thread, queue, parts)
        await side.begin(hooks.use)
        hello = self._prefill.open_memory(prefill)
        parts.push_async_callback(asyncio.to_thread, memory.close, prefill.context)

        def own(delivery: Delivery) -> bool:
            return take_back(delivery, self.instance_id, side.context.ledger)

        async def pull(stack: AsyncExitStack) -> PrefillService:
            return await self._prefill.open_side(
                prefill, hooks.prefill, thread, queue, hello, stack, own
            )

        step_tokens = engine.config.scheduler_config.max_num_batched_tokens

        def step_s() -> float | None:
            rate = prefill.context.scheduler.load().tokens_per_s
            return step_tokens / rate if rate else None

        self._pull = pull
        self._slack = Slack(
            lambda: side.server.active_requests,
            step_s,
            lambda: side.context.router_config().itl_ms / 1e3,
        )
        self._switch = Switch(self.name, self._options.drain_timeout_s, self._why_not)
        return ElasticService(self._switch, self._etcd, self._cluster.namespace, self.instance_id)

    def _why_not(self, wanted: frozenset[str]) -> str:
        """Return why these roles cannot begin now. Both need etcd. Prefill needs NATS, too."""
        servers = self._decoding.status()["servers"]
        needed = ("etcd", "nats") if "prefill" in wanted else ("etcd",)
        down = [name for name in needed if not servers[name]["up"]]
        return f"{' and '.join(down)} cannot be reached" if down else ""

    def registration(self, as_role: AsRole, service: Service) -> Registration:
        self._switch.own(
            DecodeSide(as_role, self._decoding), PrefillSide(as_role, self._pull, self._slack)
        )
        return self._switch


def take_back(delivery: Delivery, instance_id: str, ledger: Ledger) -> bool:
    """Return whether our own decode side sent the job. Then it takes the job back, and prefills the
    prompt itself.

    Raises ClaimRefused: IN_PROGRESS if another prefill worker has the job, HELD if it may still
    write to its blocks."""
    try:
        job = wire.decode(delivery.body, PrefillJob)
    except BadMessage:
        return False
    if job.decode_instance != instance_id:
        return False
    if not ledger.give_up(job.job_id, Outcome.OWN_JOB, if_queued=True):
        entry = ledger.find(job.job_id)
        waits = entry is not None and entry.state is JobState.QUARANTINED
        reason = RefuseReason.HELD if waits else RefuseReason.IN_PROGRESS
        raise ClaimRefused("another worker has our own job", reason=reason)
    return True


def _with(engine: Engine[ElasticContext], context: Any) -> Engine[Any]:
    """Return the engine with the context of one side."""
    return Engine(
        engine.host, engine.core, engine.config, engine.served_name, engine.compat, context
    )
