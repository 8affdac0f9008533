"""Decode and prefill workers without vLLM: every part of the handoff but the engines is real.

The queue (in memory or on NATS), Ledger, ControlServer, Publisher, both scheduler halves,
JobRunner, Puller, Links, Mover and a transport. `KvEngine` computes for the prefill side;
`DecodeHalf` stands for vLLM on the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.decode_worker.context import DecodeContext
from pullfill.decode_worker.control import ControlServer
from pullfill.decode_worker.ledger import Ledger
from pullfill.decode_worker.publisher import Publisher
from pullfill.decode_worker.router import Situation
from pullfill.decode_worker.scheduler_side import SchedulerSide
from pullfill.decode_worker.story import Stories
from pullfill.decode_worker.verify import verifier_for
from pullfill.prefill_worker.credits import Credits
from pullfill.prefill_worker.links import Links
from pullfill.prefill_worker.mover import Mover
from pullfill.prefill_worker.puller import Puller
from pullfill.prefill_worker.readers import Readers
from pullfill.prefill_worker.runner import JobRunner
from pullfill.queue.contract import JobConsumer, JobProducer, QueueConfig
from pullfill.queue.jetstream import JetStreamConsumer, JetStreamProducer
from pullfill.queue.memory import MemoryQueue
from pullfill.wire import (
    SILENT_S,
    DigestMode,
    Hello,
    KvMode,
    RouterConfig,
    RouterPolicy,
    WorkerRecord,
    WorkerState,
)
from tests.support.control_rig import until
from tests.support.fakes import FakePool, FakeRequest
from tests.support.handoff_directory import FakeDirectory
from tests.support.kv_engine import BLOCK, LAYOUT, NUM_BLOCKS, KvEngine, compute, holds
from tests.support.nats import NatsServer
from tests.support.transfer_rigs import COMPAT, RIGS, Region, Rig

COMPATIBLE = msgspec.structs.replace(COMPAT, block_size=BLOCK)


@dataclass(slots=True, eq=False)
class Served:
    """One request on the decode side. `loaded` None: still waiting."""

    request: FakeRequest
    table: list[int]
    loaded: bool | None = None
    over: bool = False


class DecodeHalf:
    """A decode worker whose vLLM is this class. asyncio thread only."""

    def __init__(
        self,
        rig: Rig,
        producer: JobProducer,
        name: str,
        *,
        timeout_s: float,
        host: str,
        clock: Clock = SYSTEM_CLOCK,
        kv_digest: DigestMode = DigestMode.OFF,
        kv_mode: KvMode = KvMode.PUSH_ASYNC,
    ) -> None:
        self.name, self._host, self.producer, self._clock = name, host, producer, clock
        self.region: Region = rig.region(LAYOUT, instance_id=name, incarnation=f"{name}-i0")
        self.pages = self.region.pages
        self.pool = FakePool(NUM_BLOCKS)
        self.requests: dict[str, Served] = {}
        self.cached: list[int] = []
        self.stories = Stories(name)
        loop = asyncio.get_running_loop()
        self.ledger = Ledger(
            self.region.owner.fences,
            incarnation=f"{name}-i0",
            kv_digest=kv_digest,
            kv_mode=kv_mode,
            clock=clock,
            on_event=lambda: loop.call_soon_threadsafe(self.step),
            on_action=lambda: loop.call_soon_threadsafe(self.control.wake),
        )
        self.control = ControlServer(
            instance_id=name,
            compat=COMPATIBLE,
            ledger=self.ledger,
            stories=self.stories,
            cancel=producer.cancel,  # type: ignore[arg-type]
            hand_back=producer.hand_back,
            verifier=verifier_for(self.ledger, [self.region.memory]),
            reach=lambda regions: lambda: rig.transport.connect(self.region.memory, *regions),
        )
        self.control.commits.committed = producer.committed
        config = RouterConfig(policy=RouterPolicy.ALWAYS_REMOTE, remote_timeout_s=timeout_s)
        self.side = SchedulerSide(
            DecodeContext(
                instance_id=name,
                incarnation=f"{name}-i0",
                router_config=lambda: config,
                situation=lambda p, h, i: Situation(
                    p, h, i, prefill_workers=1, queue_available=True
                ),
                publish=lambda job: self.publisher.submit(job),
                stories=self.stories,
                make_ledger=lambda _: self.ledger,
                ledger=self.ledger,
            ),
            BLOCK,
        )
        self.side.bind_pool(self.pool)

    async def start(self) -> WorkerRecord:
        await self.control.start(self._host)
        self.publisher = Publisher(
            asyncio.get_running_loop(),
            self.producer,
            self.ledger,
            instance_id=self.name,
            control=self.control.address,
            compat_hash=COMPATIBLE.hash(),
            block_size=BLOCK,
        )
        return WorkerRecord(
            instance_id=self.name,
            incarnation=f"{self.name}-i0",
            role="decode",
            state=WorkerState.READY,
            model="m",
            compat=COMPATIBLE,
            host=self._host,
            host_id="h",
            pid=1,
            started_at=0.0,
            control=self.control.address,
        )

    def cache(self, tokens: Sequence[int]) -> list[int]:
        """Prefill a prompt here; its whole blocks are this worker's prefix cache."""
        table = self.pool.allocate(len(tokens) // BLOCK)
        assert table is not None
        compute(self.pages, table, tokens, 0, len(table) * BLOCK)
        self.cached += table
        return table

    def send(self, tokens: Sequence[int], hit: Sequence[int] = ()) -> Served:
        """A request that hits the cached blocks `hit`; it must go remote."""
        request = FakeRequest(f"r{len(self.requests)}", list(tokens))
        external, asynchronous = self.side.matched(request, len(hit) * BLOCK)
        assert asynchronous
        own = self.pool.allocate(-(-(len(tokens) - 1) // BLOCK) - len(hit))
        assert own is not None
        self.pages[:, own] = 0xAA
        self.pool.touch([self.pool.blocks[b] for b in hit])
        served = self.requests[request.request_id] = Served(request, [*hit, *own])
        self.side.allocated(request, served.table, external)
        self.side.step_done()
        return served

    def pass_time(self, seconds: float) -> None:
        """Move the cluster's FakeClock and let the timer look at it."""
        self._clock.advance(seconds)  # type: ignore[attr-defined]
        self.control.wake()

    def step(self) -> None:
        loaded = self.side.take_in()
        later, failed = self.side.collect()
        loaded += later
        for request_id in [*loaded, *failed]:
            served = self.requests[request_id]
            assert served.loaded is None, "told twice"
            served.loaded = request_id in loaded
            if served.over or not served.loaded:
                self.pool.release(served.table)

    def abort(self, served: Served) -> None:
        served.over = True
        self.side.finished(served.request.request_id)
        if served.loaded:
            self.pool.release(served.table)

    def right(self, served: Served) -> bool:
        """Loaded, and its blocks hold what computing here would have given."""
        tokens = served.request.prompt_token_ids
        assert tokens is not None
        return bool(served.loaded) and holds(self.pages, served.table, tokens[:-1])

    def check_clean(self) -> None:
        for served in self.requests.values():
            assert served.loaded is not None, "still waiting"
            if served.loaded and not served.over:
                self.abort(served)
        assert self.ledger.open_jobs == 0
        assert self.ledger.quarantined_blocks == 0
        assert self.region.owner.fences.in_use == 0
        assert self.pool.free == set(range(NUM_BLOCKS)) - set(self.cached)

    async def stop(self) -> None:
        await self.control.stop()
        await self.producer.close()
        self.region.owner.close()


class PrefillHalf:
    """A prefill worker whose vLLM is a KvEngine."""

    def __init__(
        self, cluster: Cluster, name: str, *, chunk: int, consumer: JobConsumer | None = None
    ) -> None:
        self.name, self._cluster = name, cluster
        self.local = cluster.rig.region(LAYOUT, instance_id=name, incarnation=f"{name}-i0")
        self.readers = Readers(self.local.owner.fences)
        loop = asyncio.get_running_loop()
        self.credits = Credits(
            cluster.credit_blocks * LAYOUT.block_bytes,
            on_room=lambda: loop.call_soon_threadsafe(self.puller.changed),
        )
        self.engine = KvEngine(self.local.pages, chunk=chunk, compat_hash=COMPATIBLE.hash())
        self.links = Links(
            cluster.directory,  # type: ignore[arg-type]
            Hello(
                prefill_instance=name,
                host_id="h",
                compat=COMPATIBLE.hash(),
                transports=["any"],
                regions=(self.local.descriptor,),
            ),
            COMPATIBLE,
            self._open_mover,
            lambda link, revoke: self.runner.revoked(link, revoke),
            lambda link: self.runner.link_lost(link),
            **cluster.links,
        )
        self.runner = JobRunner(
            self.links,
            self.engine,  # type: ignore[arg-type]
            heartbeat_s=lambda: cluster.heartbeat_s,
            max_prompt_tokens=300,
            max_deliver=lambda: cluster.config.max_deliver,
            readers=self.readers,
            on_change=lambda: self.puller.changed(),
        )
        self.consumer = consumer or cluster.queue.consumer()
        self.consumer.running = self.runner.running
        self.puller = Puller(
            self.consumer,
            self.runner,
            budget_tokens=400,
            max_jobs=16,
            credits=self.credits,
            patience_s=cluster.patience_s,
        )
        self.links.start()

    async def _open_mover(self, record: WorkerRecord) -> Mover:
        region = self._cluster.decodes[record.instance_id].region
        connect = self._cluster.rig.connect
        session = await asyncio.to_thread(connect, self.local, region)
        account = self.credits.open(record.instance_id)
        return Mover(session, record.instance_id, [self.local.memory], account)

    async def stop(self) -> None:
        await self.puller.stop()
        await self.runner.abandon()
        await self.links.close()
        await self.consumer.close()
        await asyncio.to_thread(self.engine.stop)
        self.local.owner.close()


@dataclass(eq=False)
class Cluster:
    """Everything on one loop; use as `async with Cluster(tmp_path, "loopback") as cluster`.

    wrap: puts something between the decode workers and the queue (to corrupt what is published).
    server: the queue is on this NATS server, and not in the process. links: arguments of `Links`.
    """

    directory_path: Path
    transport: str = "loopback"
    clock: Clock = SYSTEM_CLOCK
    ack_wait_s: float = 30.0
    heartbeat_s: float = 10.0
    timeout_s: float = 20.0
    kv_digest: DigestMode = DigestMode.OFF
    kv_mode: KvMode = KvMode.PUSH_ASYNC
    credit_blocks: int = 1000
    patience_s: float = SILENT_S
    wrap: Callable[[Any], Any] = lambda producer: producer
    server: NatsServer | None = None
    links: dict[str, Any] = field(default_factory=dict)
    decodes: dict[str, DecodeHalf] = field(default_factory=dict)
    prefills: list[PrefillHalf] = field(default_factory=list)

    async def __aenter__(self) -> Cluster:
        self.rig = RIGS[self.transport](self.directory_path)
        self.directory = FakeDirectory()
        self.config = QueueConfig("ns", COMPATIBLE.hash(), ack_wait_s=self.ack_wait_s)
        self.queue = MemoryQueue(self.config, clock=self.clock)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for prefill in self.prefills:
            regions = [d.region for d in self.decodes.values()] + [p.local for p in self.prefills]
            for region in regions:
                with contextlib.suppress(Exception):
                    region.owner.faults.resume()  # type: ignore[attr-defined]
            await prefill.stop()
        for decode in self.decodes.values():
            await decode.stop()
        await asyncio.sleep(0.01)  # closed transports let go of their sockets

    async def decode(self, name: str = "decode-1") -> DecodeHalf:
        producer: JobProducer = self.queue.producer()
        if self.server is not None:
            producer = await JetStreamProducer.connect(self.server.url, self.config)
        decode = DecodeHalf(
            self.rig,
            self.wrap(producer),
            name,
            timeout_s=self.timeout_s,
            host="127.0.0.1",
            clock=self.clock,
            kv_digest=self.kv_digest,
            kv_mode=self.kv_mode,
        )
        self.decodes[name] = decode
        self.directory.put(await decode.start())
        return decode

    async def prefill(self, *, chunk: int = 8, pull: bool = True) -> PrefillHalf:
        url = self.server and self.server.url
        consumer = await JetStreamConsumer.connect(url, self.config) if url else None
        name = f"prefill-{len(self.prefills) + 1}"
        prefill = PrefillHalf(self, name, chunk=chunk, consumer=consumer)
        self.prefills.append(prefill)
        await until(lambda: prefill.links.connected == sorted(prefill.links._standing.wanted()))
        if pull:
            prefill.puller.start()
        return prefill

    async def check_clean(self) -> None:
        """Ledger, fences, pools, stream and engines are as they were before the first request."""
        for decode in self.decodes.values():
            await until(lambda d=decode: d.ledger.open_jobs == 0 and not d.ledger.has_events)  # type: ignore[misc]
            decode.step()
            decode.check_clean()
        for prefill in self.prefills:
            await asyncio.wait_for(prefill.runner.idle.wait(), 10)
            # A delivery that is given back may have come meanwhile.
            await until(
                lambda p=prefill: p.engine.idle and not p.runner.in_flight  # type: ignore[misc]
            )
            assert prefill.runner.in_flight_tokens == 0
            assert prefill.engine.failure is None
            assert prefill.local.owner.fences.in_use == prefill.readers.kept_blocks == 0
            assert not any(prefill.credits.used.values())
        (producer, *_) = [decode.producer for decode in self.decodes.values()]
        await until(lambda: producer.depth().depth_jobs == 0)


def prompt(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(50_000), k=length)


async def settled(*requests: Served) -> None:
    await until(lambda: all(r.loaded is not None for r in requests))


async def stuck_in_a_write(decode: DecodeHalf) -> None:
    await _held(decode.region)


async def stuck_in_a_read(prefill: PrefillHalf) -> None:
    """Pull: the decode worker reads from its region."""
    await _held(prefill.local)


async def _held(region: Region) -> None:
    owner: Any = region.owner
    assert await asyncio.to_thread(owner.faults.wait_held)


def hold(half: DecodeHalf | PrefillHalf, after: int = 0) -> Any:
    """Stop whoever copies to or from its region, after so many batches."""
    owner: Any = (half.region if isinstance(half, DecodeHalf) else half.local).owner
    owner.faults.hold(after)
    return owner.faults
