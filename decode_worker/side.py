"""The decode side of a worker.

`DecodeRole` is how a process becomes a decode worker. Its `build` makes all parts, in reading
order, once the engine is there. `DecodeSide` is all of it, as worker/worker.py sees it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from pullfill.config import ClusterRef
from pullfill.decode_worker.context import DecodeContext
from pullfill.decode_worker.control import ControlServer
from pullfill.decode_worker.forecast import Links
from pullfill.decode_worker.frontends import Frontends
from pullfill.decode_worker.handoff import Handoff
from pullfill.decode_worker.kv_reader import reach_for
from pullfill.decode_worker.ledger import UNDER_WAY, JobState, Ledger
from pullfill.decode_worker.meter import DecodeMeter
from pullfill.decode_worker.outlook import Outlook, outages
from pullfill.decode_worker.peers import Peers
from pullfill.decode_worker.prefix.block_events import BlockEvents
from pullfill.decode_worker.prefix.fetches import PrefixFetches
from pullfill.decode_worker.prefix.holders import Holders
from pullfill.decode_worker.prefix.read_leases import ReadLeases
from pullfill.decode_worker.request_server import RequestServer
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.decode_worker.rules import SELF_CHECK_PENDING
from pullfill.decode_worker.scheduler import DecodeHalf, DecodeScheduler
from pullfill.decode_worker.self_check import Checks, checks_for
from pullfill.engine import front_wire
from pullfill.engine.compat import rounding_digest
from pullfill.engine.groups import keeps_all
from pullfill.engine.kv_events import KvEvents
from pullfill.errors import BadMessage, ClaimRefused, Outcome
from pullfill.ids import new_incarnation
from pullfill.options import WorkerOptions
from pullfill.queue.jetstream import JetStreamProducer
from pullfill.queue.streams import Names
from pullfill.registry.client import EtcdClient
from pullfill.registry.live_settings import Settings
from pullfill.runtime import metrics
from pullfill.snapshot import FLOWS, Demand, OpenJob
from pullfill.transfer.gpu import copies
from pullfill.wire import (
    KvMode,
    LeaseHello,
    PrefillJob,
    RefuseReason,
    RouterConfig,
    RouterPolicy,
    WorkerRecord,
    decode,
)
from pullfill.worker.sides import Engine, Role, Servers, Service

# States of the jobs that wait for a prefill worker, or that one has.
_REMOTE = (JobState.QUEUED, *UNDER_WAY)


@dataclass(eq=False)
class DecodeSide(Service):
    """See Service."""

    engine: Engine
    context: DecodeContext
    frontends: Frontends
    blocks: BlockEvents
    control: ControlServer
    leases: ReadLeases
    outlook: Outlook
    checks: Checks | None
    meter: DecodeMeter
    options: WorkerOptions
    etcd: EtcdClient
    namespace: str
    _drains = False

    @property
    def requests(self) -> int:
        """Number of requests of frontends that are not finished."""
        return self.frontends.server.active_requests

    def describe(self, record: WorkerRecord) -> WorkerRecord:
        self.context.ledger.new_incarnation(record.incarnation)
        return msgspec.structs.replace(
            record,
            data=self.frontends.server.address,
            control=self.options.advertise_control or self.control.address,
            computes=self.checks.computes if self.checks else "",
        )

    async def start(self, note: Callable[[], None]) -> None:
        # Frontends and prefill workers connect by themselves once the worker is registered.
        if self.checks is not None:
            self.checks.join(self.etcd, self.namespace, note)

    def checking(self) -> str:
        if self.checks is None or not self.checks.joining:
            return ""
        return f"{SELF_CHECK_PENDING}: the registry lists prefill workers of a new kind"

    def reasons(self) -> list[str]:
        return self.outlook.reasons()

    def status(self, query: Mapping[str, str]) -> dict[str, Any]:
        ledger, view, peers = self.context.ledger, self.engine.view, self.control.peers
        jobs = ledger.sums().jobs
        running, waiting = view.counts()
        load = {
            "running": running,
            "waiting": waiting,
            "requests": self.requests,
            "remote_prefills": sum(jobs[state] for state in _REMOTE),
            "kv_reads": jobs[JobState.READING],
            "quarantined_blocks": ledger.quarantined_blocks,
            "open_jobs": ledger.open_jobs,
            "read_leases": self.leases.open,
            "kv_free_blocks": view.free_blocks,
            "kv_blocks": view.usable_blocks,
            "prefill_workers": peers.instances,
            "prefill_workers_pulling": len(peers.pulling),
            "claims_stalled": ledger.claims.stalled,
            **(self.checks.told() if self.checks else {}),
            "prefix": self.blocks.status(),
            "demand": msgspec.to_builtins(self._demand()),
        }
        told = {"load": load, **self.outlook.servers()}
        if "jobs" in query:
            told["jobs"] = msgspec.to_builtins(jobs_of(self.context.ledger))
        if name := query.get("request"):
            found = self.context.traces.find(name, self.engine.view.requests())
            told["request"] = msgspec.to_builtins(found)
        if "ended" in query:
            told["ended"] = msgspec.to_builtins(self.context.traces.ended())
        return told

    def refresh_metrics(self) -> None:
        self.outlook.refresh_metrics()
        demand = self._demand()  # for autoscalers
        metrics.BACKLOG_SECONDS.set(demand.backlog_s)
        metrics.PREFILL_DEMAND.set(demand.prefill_demand)
        metrics.DECODE_PRESSURE.set(demand.pressure)

    def _demand(self) -> Demand:
        """What this worker tells the planner."""
        view, ours = self.engine.view, self.context.ledger.sums()
        remote = sum(ours.jobs[state] for state in _REMOTE)
        running, waiting = view.counts()
        blocks = view.usable_blocks
        peers = self.control.peers
        return self.meter.demand.figures(
            open_tokens=ours.uncomputed,
            # `uncached_tokens` has no job: of a request with one, vLLM counts all as computed. And
            # jobs that are claimed are counted where they are computed.
            queued_tokens=self.frontends.uncached_tokens + ours.queued_tokens,
            pulling=[peer.load for peer in peers.pulling],
            connected=bool(peers),
            own_rate=self.meter.own_rate,
            kv=1.0 - view.free_blocks / blocks if blocks else 0.0,
            # vLLM counts requests whose prompts are away as waiting. They take no seat yet.
            seats=(running + max(0, waiting - remote)) / view.config.scheduler_config.max_num_seqs,
        )

    def engine_stuck(self, stuck: bool) -> None:
        if stuck:
            self.outlook.draining.set()
            self.context.ledger.give_up_all(Outcome.ENGINE_STUCK, but_granted=True)
        elif not self._drains:
            self.outlook.draining.clear()

    async def stop_taking(self) -> None:
        self._drains = True
        self.outlook.draining.set()
        self.engine.loop.submit(self.frontends.server.start_drain)

    async def finished(self) -> None:
        await self.frontends.idle(self.engine.dead)
        await self.leases.drain()

    async def give_up(self) -> None:
        await self.frontends.migrate()

    async def engine_gone(self, hangs: bool) -> None:
        if not hangs:
            # Frontends notice at once. The engine thread, whose socket it is, has ended.
            self.frontends.server.close()


class DecodeRole(Role):
    """See Role. It is the Neighbour of a prefill side in the same worker."""

    name, kv_role = "decode", "kv_consumer"

    def __init__(self, cluster: ClusterRef, options: WorkerOptions) -> None:
        self._cluster = cluster
        self._options = options
        self._events = KvEvents()

    async def watch(self, etcd: EtcdClient, parts: AsyncExitStack) -> None:
        self._router = await Settings(etcd, self._cluster.namespace, RouterConfig).start()
        parts.push_async_callback(self._router.close)

    def adjust(self, config: Any) -> None:
        self._events.switch_on(config)

    def make_half(self, wake: Callable[[], None]) -> DecodeHalf:
        self._half = DecodeHalf()
        return self._half

    async def build(self, engine: Engine, servers: Servers, parts: AsyncExitStack) -> Service:
        """Make all parts of a decode side. asyncio thread."""
        cluster, options = self._cluster, self._options
        view, turns, told = engine.view, engine.loop, engine.context
        config, wake_engine = view.config, turns.wake
        loop, key = asyncio.get_running_loop(), cluster.security.cluster.load()
        copies.when_broken(engine.fail)

        # The job queue of this model.
        names = Names(cluster.namespace, engine.compat.hash())
        producer = JetStreamProducer(servers.nats, names, servers.queue.current)
        parts.push_async_callback(producer.close)
        parts.callback(servers.queue.subscribe(producer.configure))

        # Who may write to the KV memory.
        wake = asyncio.Event()
        ledger = Ledger(
            told.owner.fences,
            incarnation=new_incarnation(),  # until it is registered
            kv_mode=options.kv_mode,
            on_event=wake_engine,
            on_action=partial(loop.call_soon_threadsafe, wake.set),
        )
        peers, links = Peers(), Links()
        traces = RequestTraces(
            told.instance_id,
            outage=lambda: "; ".join(outages(producer.health, servers.etcd.health, peers, ledger)),
        )
        context = DecodeContext(
            worker=told,
            router_config=lambda: self._router.current,
            traces=traces,
            ledger=ledger,
            blocks=self._half.blocks,
        )

        # The frontends' socket.
        blocks = await turns.call(partial(BlockEvents, loop, view, self._events))
        # It asks the ranks, as a step does.
        tasks = list(await turns.call(lambda: turns.utility("get_supported_tasks", ())))
        meter = DecodeMeter(context, view)

        server = RequestServer(
            turns,
            traces,
            welcome=partial(_welcome, engine, self._events, tasks, meter.report),
            models=[engine.compat.model, options.model],
            key=key,
            follow=blocks.follow,
        )

        # The prefill workers' connections, and what they say about jobs.
        checks = checks_for(context, config, engine.compat, turns, servers.kept)
        if checks is not None:
            parts.push_async_callback(checks.close)
        handoff = Handoff(
            ledger,
            producer,
            traces,
            peers=peers,
            links=links,
            wake=wake,
        )
        hello = LeaseHello(
            decode_instance=told.instance_id,
            compat=engine.compat.hash(),
            computes=rounding_digest(config),
        )
        leases = ReadLeases(context, turns, view, hello)
        frontends = Frontends(
            turns,
            server,
            meter.report,
            lambda delay_s: loop.call_soon_threadsafe(loop.call_later, delay_s, wake_engine),
            self._events,
            ledger,
            leases,
        )
        reach = reach_for(told.memories, options, key)
        control = ControlServer(
            handoff,
            welcome=context.welcome,
            compat=engine.compat,
            key=key,
            reach=reach if options.kv_mode is KvMode.PULL else None,
            checks=checks,
            leases=leases,
        )
        await control.start(options.host, options.control_port)
        parts.push_async_callback(control.stop)

        # What decides about a prompt.
        num_blocks = config.cache_config.num_gpu_blocks
        outlook = Outlook(
            context,
            producer,
            peers,
            links,
            meter,
            checks,
            servers.etcd.health,
            threading.Event(),
            num_blocks,
        )
        fetches = None
        caches = context.blocks.pool.enable_caching and keeps_all(told.groups)
        if reach is not None and caches:
            holders = Holders(hello, reach, key)
            fetches = PrefixFetches(
                context, holders, outlook.situation, meter.prefill_s, wake_engine
            )
            parts.push_async_callback(fetches.close)  # before the KV memory
        scheduler = DecodeScheduler(
            self._half.blocks,
            ledger,
            situation=outlook.situation,
            publish=handoff.publish,
            traces=traces,
            queue_full=producer.look_again,
            meter=meter,
            instance_id=told.instance_id,
            compat_hash=engine.compat.hash(),
            fetching=fetches,
            tier=view.tier,
            seats=view.seats(options.reserve_seats),
            trials=checks.trials if checks else None,
            of_frontend=server.has,
        )
        # From now on this side answers the engine. Before, the engine takes no request.
        self._half.begin(scheduler)
        await frontends.begin(options.host, options.data_port)
        self._side = DecodeSide(
            engine, context, frontends, blocks, control, leases, outlook, checks, meter,
            options, servers.etcd, cluster.namespace,
        )  # fmt: skip
        return self._side

    # ------------------------------------------------------------------ as a Neighbour

    def take_back(self, body: bytes) -> bool:
        try:
            job = decode(body, PrefillJob)
        except BadMessage:
            return False
        if job.decode_instance != self._options.instance_id:
            return False
        ledger = self._side.context.ledger
        if not ledger.give_up(job.job_id, Outcome.OWN_JOB, if_queued=True):
            entry = ledger.find(job.job_id)
            waits = entry is not None and entry.state is JobState.QUARANTINED
            reason = RefuseReason.HELD if waits else RefuseReason.IN_PROGRESS
            raise ClaimRefused("another worker has our own job", reason=reason)
        return True

    def busy(self, step_s: float | None) -> str:
        # The policy `cost` computes jobs beside streams, in steps that spare them.
        spares = self._router.current.policy is RouterPolicy.COST
        return "" if spares or not self._delays(step_s) else "its own streams leave no time"

    def pace(self) -> tuple[float, float]:
        return self._side.meter.model.pace(self._router.current.ttft_ms / 1e3)

    def most(self, step_s: float | None) -> int | None:
        if not self._delays(step_s):
            return None
        # What waits in the queue goes to the first worker that has time. One with prompts of its
        # own has none: four workers with twice the load made fewer tokens when they pulled then.
        if self._side.meter.model.undone:
            return 0
        # It has put its own jobs into the queue because others compute them at less cost, and these
        # compute those of others at less cost, too. But where one is late, they have no time.
        return int(self._side.outlook.wanted(self._router.current.ttft_ms / 1e3))

    def _delays(self, step_s: float | None) -> bool:
        # A step that computes a part of a job delays each stream by the time of that step. It does
        # not delay requests whose prompts are in the queue. If all workers had only such requests
        # and waited for them, nobody would pull. A worker that always has streams would never
        # measure a step, so without a measure it pulls.
        model, target_s = self._side.meter.model, self._router.current.itl_ms / 1e3
        return bool(model.streams or model.undone) and (step_s or 0.0) > target_s


def jobs_of(ledger: Ledger, limit: int = FLOWS) -> list[OpenJob]:
    """Return the oldest open jobs. Called while somebody looks at the live page. Any thread."""
    now, entries = ledger.oldest(limit)
    return [
        OpenJob(
            job_id=entry.job_id,
            request_id=entry.request_id,
            state=entry.state.value,
            tokens=entry.tokens,
            attempt=entry.attempt,
            open_s=now - entry.opened_at,
            stage_s=max(0.0, now - entry.since),
            queue_s=entry.granted_at - entry.opened_at if entry.attempt else None,
            written=min(1.0, entry.written / max(1, entry.targets)),
        )
        for entry in entries
        if not entry.settled
    ]


def _welcome(
    engine: Engine,
    events: KvEvents,
    tasks: list[str],
    load: Callable[[bool], front_wire.LoadReport],
    draining: bool,
) -> front_wire.DecodeWelcome:
    config = engine.view.config
    return front_wire.DecodeWelcome(
        decode_instance=engine.context.instance_id,
        vllm_version=engine.compat.vllm,
        max_model_len=config.model_config.max_model_len,
        num_gpu_blocks=config.cache_config.num_gpu_blocks or 0,
        block_size=config.cache_config.block_size,
        supported_tasks=tasks,
        load=load(draining),
        prefix_block_size=events.places.block_size,
    )
