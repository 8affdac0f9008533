"""The prefill side of a worker: its parts, put together in the order in which a job meets them.

worker/process.py has the life of the process. Start: the registration, then the connections to
decode workers, then the first pull. A drain stops pulling, and finishes the granted jobs and their
writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from pullfill.config import ClusterRef
from pullfill.engine import features
from pullfill.engine.compat import rounding_digest
from pullfill.options import WorkerOptions
from pullfill.prefill_worker.decode_links import DecodeLinks
from pullfill.prefill_worker.engine import PrefillEngine
from pullfill.prefill_worker.puller import Budget, Puller, budget_of
from pullfill.prefill_worker.reach import OutOfReach, open_transfer_worker
from pullfill.prefill_worker.scheduler import PrefillScheduler
from pullfill.prefill_worker.transfer_worker import Credits, TransferWorker
from pullfill.queue.contract import Delivery
from pullfill.queue.jetstream import JetStreamConsumer
from pullfill.queue.streams import Names
from pullfill.registry.client import EtcdClient
from pullfill.registry.directory import Directory
from pullfill.runtime import log
from pullfill.runtime.health import ServerHealth, servers_json
from pullfill.runtime.lifecycle import end, until
from pullfill.transfer.connect import peer_transports, why_absent
from pullfill.transfer.gpu import copies
from pullfill.wire import Hello, Load, WorkerRecord
from pullfill.worker.context import SchedulerHalf
from pullfill.worker.sides import Engine, Neighbour, Role, Servers, Service

logger = log.get("prefill_worker")

_KEPT_S = 1.0  # how long a drain waits after the last job
# How long a job waits for free blocks while nothing runs that could free some.
_NO_ROOM_S = 0.2


class PrefillRole(Role):
    """See Role.

    beside: the decode side of the same worker. None: there is none.
    copiers: the transfer workers that may still copy to decode workers."""

    name, kv_role = "prefill", "kv_both"
    serving = "is pulling"

    def __init__(
        self, cluster: ClusterRef, options: WorkerOptions, beside: Neighbour | None = None
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._beside = beside
        self.instance_id = str(options.instance_id)
        self._key = cluster.security.cluster.load()
        self.copiers: weakref.WeakSet[TransferWorker] = weakref.WeakSet()

    async def watch(self, etcd: EtcdClient, parts: AsyncExitStack) -> None:
        self._directory = Directory(
            etcd,
            self._cluster.namespace,
            ["decode"],
            ttl_s=self._options.lease_ttl_s,
            beat_s=self._options.lease_ttl_s / 2,  # keep-alives of the lease come more often
        )
        await self._directory.start()
        parts.push_async_callback(self._directory.close)

    def make_half(self, wake: Callable[[], None]) -> SchedulerHalf:
        # The decode side plans steps for both.
        plans, most = self._beside is None, self._options.concurrency or 0
        self._scheduler = PrefillScheduler(wake, most, plans=plans)
        return self._scheduler

    async def build(self, engine: Engine, servers: Servers, parts: AsyncExitStack) -> Service:
        """Make all parts of a prefill side. asyncio thread."""
        copies.when_broken(engine.fail)
        self._engine, options, scheduler = engine, self._options, self._scheduler
        config, context = engine.view.config, engine.context
        hello = self._hello(engine)
        names = Names(self._cluster.namespace, engine.compat.hash())
        consumer = JetStreamConsumer(servers.nats, names, servers.queue.current)
        parts.push_async_callback(consumer.close)
        parts.callback(servers.queue.subscribe(consumer.configure))

        tokens = budget_of(config.scheduler_config.max_num_batched_tokens)
        tasks = PrefillEngine(
            engine.loop, scheduler.tasks, context, features.limits(config.model_config)
        )
        budget = Budget(tokens, scheduler.concurrency)
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, budget.room.set)
        blocks = -(-tokens // config.cache_config.block_size)
        kv_bytes = blocks * sum(memory.layout.block_bytes for memory in context.memories)
        credits = Credits(options.kv_credits or max(256 << 20, kv_bytes), on_room=wake)

        ours, chosen = context.memories, options.transports
        reach = partial(
            open_transfer_worker,
            memories=ours,
            transports=peer_transports(chosen, ours, self._key, options.host) if ours else (),
            absent=why_absent(chosen, ours[0]) if ours else {},
            credits=credits,
            copiers=self.copiers,
        )
        links = DecodeLinks(
            self._directory, hello, engine.compat, reach, self._key,
            load=scheduler.load if self._beside is None else self._load, kept=servers.kept,
        )  # fmt: skip
        parts.push_async_callback(links.close)

        puller = Puller(
            consumer, links, tasks, budget, credits, context.owner.fences, take_back=self._own
        )
        parts.push_async_callback(puller.close)
        if self._beside is not None:
            yields = asyncio.create_task(self._yield(self._beside, puller), name="slack")
            parts.push_async_callback(end, yields)
        return PrefillService(engine, scheduler, puller, [consumer.health, servers.etcd.health])

    def _load(self) -> Load:
        """What decode workers are told. Beside a decode side: what its streams leave time for."""
        load = self._scheduler.load()
        rate, harm = self._beside.pace() if self._beside is not None else (0.0, 0.0)
        return msgspec.structs.replace(load, tokens_per_s=rate, harm=harm) if rate else load

    def _own(self, delivery: Delivery) -> bool:
        return self._beside is not None and self._beside.take_back(delivery.body)

    async def _yield(self, beside: Neighbour, puller: Puller) -> None:
        """Pull only while the decode side leaves time, and keep no job that gets no blocks."""
        tasks = self._scheduler.tasks
        step_tokens = self._engine.view.config.scheduler_config.max_num_batched_tokens
        calm = 0
        while True:
            rate = self._scheduler.load().tokens_per_s
            step_s = step_tokens / rate if rate else None
            why = beside.busy(step_s)
            calm = 0 if why else calm + 1
            # One stream often follows another. A job pulled in the gap would delay the next one,
            # and each change ends a pull and is told to all decode workers. So wait for half a
            # second without a reason.
            if why or calm >= 10:
                puller.pause("busy", why)
            puller.spare(beside.most(step_s))
            # Requests that wait for another worker may hold all blocks here. That one may wait for
            # us in the same way.
            for name in self._engine.loop.waiting_for_blocks(_NO_ROOM_S):
                if (task := tasks.get(name)) is not None:
                    task.end(OutOfReach("this worker has no free blocks for it"))
            await asyncio.sleep(0.05)

    def _hello(self, engine: Engine) -> Hello:
        """What decode workers are told of us."""
        config = engine.view.config
        return Hello(
            prefill_instance=self.instance_id,
            compat=engine.compat.hash(),
            regions=engine.context.owner.describe(),
            computes=rounding_digest(config),
            adapters=config.lora_config is not None,
            features=config.model_config.supports_multimodal_inputs,
            # At its start vLLM checks that the KV cache holds `max_model_len` tokens. One of them
            # is sampled.
            max_prompt_tokens=int(config.model_config.max_model_len) - 1,
        )


@dataclass(eq=False, repr=False)
class PrefillService(Service):
    """See Service.

    healths: of NATS and of etcd."""

    engine: Engine
    scheduler: PrefillScheduler
    puller: Puller
    healths: list[ServerHealth]

    def describe(self, record: WorkerRecord) -> WorkerRecord:
        return msgspec.structs.replace(record, computes=self.puller.links.hello.computes)

    async def start(self, note: Callable[[], None]) -> None:
        def checked() -> None:
            """It has changed whether a self-check has passed."""
            self.puller.pause("check", self.checking())
            note()

        self.puller.links.start(checked)
        self.puller.start()

    def checking(self) -> str:
        return self.puller.links.checking

    def reasons(self) -> list[str]:
        reasons = [health.outage() for health in self.healths if not health.up]
        if not self.puller.links.connected:
            reasons.append("connected to no decode worker")
        return reasons

    def status(self, query: Mapping[str, str]) -> dict[str, Any]:
        budget = self.puller.budget
        asked = {"held": msgspec.to_builtins(self.puller.held())} if "jobs" in query else {}
        return asked | {
            "servers": servers_json(*self.healths),
            "load": {
                "jobs": self.puller.in_flight,
                "unclaimed": budget.waiting,
                "tokens": budget.tokens,
                "tokens_per_s": self.scheduler.load().tokens_per_s,
                "completed": budget.completed,
                "failed": budget.failed,
                "decode_workers": self.puller.links.connected,
                "kv_free_blocks": self.engine.view.free_blocks,
                "kv_blocks": self.engine.view.usable_blocks,
            },
        }

    def refresh_metrics(self) -> None:
        self.puller.credits.refresh_metrics()

    def engine_stuck(self, stuck: bool) -> None:
        self.puller.pause("engine", "its engine takes no steps" if stuck else "")

    async def stop_taking(self) -> None:
        await self.puller.stop()
        self.puller.links.leave()  # decode workers stop counting on us; granted jobs go on

    async def finished(self) -> None:
        dead = self.engine.dead
        await until(self.puller.no_jobs, dead)
        # Reads and copies that still go on usually end within milliseconds. Those of a stopped
        # decode worker do not: the blocks that it reads stay allocated until this process ends, or,
        # if the engine stays, until the read ends.
        frees = any(memory.freed_at_exit for memory in self.engine.context.memories)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if frees else _KEPT_S):
                await until(self.puller.idle, dead)

    async def give_up(self) -> None:
        logger.warning("giving up %d jobs", self.puller.in_flight)
        await self.puller.abandon()

    async def engine_gone(self, hangs: bool) -> None:
        await self.puller.abandon()
