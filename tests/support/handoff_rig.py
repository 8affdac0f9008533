"""Decode and prefill workers without vLLM: every part of the handoff but the engines is real.

The queue on NATS, the ledger, both ends of the control channel, both scheduler
halves, the puller, the transfer workers and a transport. `KvEngine` computes for the prefill side.
`DecodeHalf` stands for vLLM on the other: it allocates blocks, asks the scheduler half and hears
its reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.decode_worker.context import DecodeContext
from pullfill.decode_worker.control import ControlServer
from pullfill.decode_worker.forecast import Links
from pullfill.decode_worker.outlook import Outlook
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.decode_worker.rules import Situation
from pullfill.decode_worker.scheduler import DecodeScheduler, JobBlocks
from pullfill.errors import QueueUnavailable
from pullfill.prefill_worker.decode_links import DecodeLinks
from pullfill.prefill_worker.puller import Budget, Puller
from pullfill.prefill_worker.transfer_worker import Credits, TransferWorker
from pullfill.queue.jetstream import JetStreamConsumer, JetStreamProducer
from pullfill.queue.streams import Names
from pullfill.transfer.contract import PeerSession
from pullfill.wire import (
    SILENT_S,
    Hello,
    KvMode,
    QueueSettings,
    RegionDescriptor,
    RouterConfig,
    RouterPolicy,
    WorkerRecord,
)
from pullfill.worker.context import WorkerContext
from tests.support import workers
from tests.support.control_rig import handoff_of
from tests.support.fakes import FakePool, FakeRequest, situation, unmeasured
from tests.support.kv_engine import BLOCK, LAYOUT, NUM_BLOCKS, KvEngine, compute, holds
from tests.support.nats import DeadLetter, NatsServer, dead_letters
from tests.support.queue_ends import connected
from tests.support.transfer_rigs import COMPAT, RIGS, Region, Rig
from tests.support.waiting import soon
from tests.support.workers import FakeDirectory

_serial = itertools.count()
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
        producer: JetStreamProducer,
        name: str,
        *,
        timeout_s: float,
        clock: Clock = SYSTEM_CLOCK,
        kv_mode: KvMode = KvMode.PUSH_ASYNC,
        pool: FakePool | None = None,
    ) -> None:
        self.name, self.producer, self._clock = name, producer, clock
        self.region: Region = rig.region(LAYOUT, instance_id=name, incarnation="i0")
        self.pages = self.region.pages
        self.pool = pool or FakePool(NUM_BLOCKS)
        self.told: dict[str, Any] = {}  # fields of each situation
        self.requests: dict[str, Served] = {}
        self.cached: list[int] = []
        self.traces = RequestTraces(name)
        self.links = Links()
        loop = asyncio.get_running_loop()
        self.handoff = handoff_of(
            name, self.region.owner.fences, producer, traces=self.traces, links=self.links,
            kv_mode=kv_mode, clock=clock,
            on_event=lambda: loop.call_soon_threadsafe(self.step),
        )  # fmt: skip
        self.ledger = self.handoff.ledger
        self.control = ControlServer(
            self.handoff,
            welcome=lambda: self.context.welcome(),
            compat=COMPATIBLE,
            reach=self._reach if kv_mode is KvMode.PULL else None,
        )
        self.config = RouterConfig(policy=RouterPolicy.ALWAYS_REMOTE, remote_timeout_s=timeout_s)
        self.outlook: Outlook | None = None
        blocks = JobBlocks(BLOCK, self.pool)
        self.context = DecodeContext(
            worker=WorkerContext(name, owner=self.region.owner),
            router_config=lambda: self.config,
            traces=self.traces,
            ledger=self.ledger,
            blocks=blocks,
        )
        self.side = self.scheduler()
        self.rig = rig

    def scheduler(self, **parts: Any) -> DecodeScheduler:
        """parts: optional arguments of `DecodeScheduler`."""
        return DecodeScheduler(
            self.context.blocks,
            self.ledger,
            situation=self._situation,
            publish=self.handoff.publish,
            traces=self.traces,
            meter=unmeasured(),
            instance_id=self.name,
            compat_hash=COMPATIBLE.hash(),
            **parts,
        )

    def look(self, max_body: int = 0) -> None:
        """Decide on what this worker really knows from now on, not on what the rig says.

        max_body: see `NatsConnection`."""
        producer: Any = SimpleNamespace(
            available=True,
            depth=self.producer.depth,
            connection=SimpleNamespace(max_body=max_body),
        )
        unused: Any = None
        self.outlook = Outlook(
            self.context, producer, self.handoff.peers, self.links, unmeasured(), None,
            unused, threading.Event(), num_blocks=1_000_000,
        )  # fmt: skip

    def _situation(self, request: Any, hit: int) -> Situation:
        if self.outlook is not None:
            return self.outlook.situation(request, hit)
        return situation(request, hit, self.config, self.traces, **self.told)

    def _reach(self, regions: Sequence[RegionDescriptor]) -> Callable[[], PeerSession]:
        return lambda: self.rig.transport.connect(self.region.memory, *regions)

    async def start(self) -> WorkerRecord:
        await self.control.start("127.0.0.1")
        return workers.record(
            self.name, compat=COMPATIBLE, control=self.control.address, max_model_len=1000
        )

    def cache(self, tokens: Sequence[int]) -> list[int]:
        """Prefill a prompt here; its whole blocks are this worker's prefix cache."""
        table = self.pool.allocate(len(tokens) // BLOCK)
        compute(self.pages, table, tokens, 0, len(table) * BLOCK)
        self.cached += table
        return table

    def send(
        self,
        tokens: Sequence[int],
        hit: Sequence[int] = (),
        headers: dict[str, str] | None = None,
    ) -> Served:
        """A request that hits the cached blocks `hit`; it must go remote. headers: its trace's."""
        request = FakeRequest(f"r{len(self.requests)}", list(tokens), trace_headers=headers)
        external, asynchronous = self.side.decide(request, len(hit) * BLOCK)
        assert asynchronous
        own = self.pool.allocate(-(-(len(tokens) - 1) // BLOCK) - len(hit))
        self.pages[:, own] = 0xAA
        self.pool.touch([self.pool.blocks[b] for b in hit])
        served = self.requests[request.request_id] = Served(request, [*hit, *own])
        self.side.enqueue(request, [served.table], external)
        self.side.step_done()
        return served

    def pass_time(self, seconds: float) -> None:
        """Move the cluster's FakeClock and let the timer look at it."""
        self._clock.advance(seconds)  # type: ignore[attr-defined]
        self.handoff.wake.set()

    def step(self) -> None:
        loaded = self.side.finish()
        later, failed = self.side.collect()
        self.side.step_done()
        loaded += later
        for request_id in [*loaded, *failed]:
            served = self.requests[request_id]
            assert served.loaded is None, "told twice"
            served.loaded = request_id in loaded
            if served.over or not served.loaded:
                self.pool.release(served.table)
            else:
                self.arrived(served)

    def arrived(self, served: Served) -> None:
        """The KV of a request is there, in the step that tells it."""

    def abort(self, served: Served) -> None:
        served.over = True
        self.side.request_finished(served.request)
        if served.loaded:
            self.pool.release(served.table)

    def right(self, served: Served) -> bool:
        """Loaded, and its blocks hold what computing here would have given."""
        tokens = served.request.prompt_token_ids
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
        self,
        cluster: Cluster,
        name: str,
        *,
        chunk: int,
        consumer: JetStreamConsumer,
        longest: int = 999,
    ) -> None:
        self.name, self.rig = name, cluster.rig
        self.region = self.rig.region(LAYOUT, instance_id=name, incarnation="i0")
        self.budget = Budget(400)
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, self.budget.room.set)
        self.credits = Credits(cluster.credit_blocks * LAYOUT.block_bytes, on_room=wake)
        self.engine = KvEngine(self.region.pages, chunk=chunk)
        self.links = DecodeLinks(
            cluster.directory,  # type: ignore[arg-type]
            Hello(
                prefill_instance=name,
                compat=COMPATIBLE.hash(),
                regions=(self.region.descriptor,),
                max_prompt_tokens=longest,
            ),
            COMPATIBLE,
            self._open_transfer_worker,
            **cluster.links,
        )
        self.consumer = consumer
        self.puller = Puller(
            self.consumer,
            self.links,
            self.engine,  # type: ignore[arg-type]
            self.budget,
            self.credits,
            self.region.owner.fences,
            max_jobs=16,
            patience_s=cluster.patience_s,
        )
        self.links.start()

    async def _open_transfer_worker(
        self, name: str, regions: Sequence[RegionDescriptor]
    ) -> TransferWorker:
        connect = self.rig.transport.connect
        session = await asyncio.to_thread(connect, self.region.memory, *regions)
        return TransferWorker(session, name, [self.region.memory], self.credits)

    async def stop(self) -> None:
        await self.puller.close()
        await self.links.close()
        await self.consumer.close()
        await asyncio.to_thread(self.engine.stop)
        self.region.owner.close()


@dataclass(eq=False)
class Cluster:
    """Everything on one loop; use as `async with make("loopback") as cluster` (conftest.py). At the
    end it checks that nothing is left (`check_clean`).

    server: has the queue.
    wrap: puts something between the decode workers and the queue (to corrupt what is published).
    links: arguments of `DecodeLinks`.
    """

    directory_path: Path
    server: NatsServer
    transport: str = "loopback"
    clock: Clock = SYSTEM_CLOCK
    ack_wait_s: float = 30.0
    timeout_s: float = 20.0
    kv_mode: KvMode = KvMode.PUSH_ASYNC
    credit_blocks: int = 1000
    patience_s: float = SILENT_S
    wrap: Callable[[Any], Any] = lambda producer: producer
    links: dict[str, Any] = field(default_factory=dict)
    decodes: dict[str, DecodeHalf] = field(default_factory=dict)
    prefills: list[PrefillHalf] = field(default_factory=list)

    async def __aenter__(self) -> Cluster:
        self.rig = RIGS[self.transport](self.directory_path)
        self.directory = FakeDirectory()
        self.settings = QueueSettings(ack_wait_s=self.ack_wait_s)
        self.names = Names(f"ns{next(_serial)}", COMPATIBLE.hash())
        return self

    async def __aexit__(self, failed: object, *exc: object) -> None:
        try:
            if not failed:
                await self.check_clean()
        finally:
            await self._stop()

    async def _stop(self) -> None:
        for prefill in self.prefills:
            for half in (*self.decodes.values(), *self.prefills):
                with contextlib.suppress(Exception):
                    faults_of(half).resume()
            await prefill.stop()
        for decode in self.decodes.values():
            for stream in (self.names.stream, self.names.dead_stream):
                with contextlib.suppress(QueueUnavailable):
                    await decode.producer.connection.api(f"STREAM.DELETE.{stream}")
            await decode.stop()
        await asyncio.sleep(0.01)  # closed transports let go of their sockets

    async def decode(self, name: str = "decode-1") -> DecodeHalf:
        producer = await connected(
            JetStreamProducer, self.server.url, self.names, settings=self.settings
        )
        decode = DecodeHalf(
            self.rig,
            self.wrap(producer),
            name,
            timeout_s=self.timeout_s,
            clock=self.clock,
            kv_mode=self.kv_mode,
        )
        self.decodes[name] = decode
        self.directory.put(await decode.start())
        return decode

    async def consumer(self) -> JetStreamConsumer:
        return await connected(
            JetStreamConsumer, self.server.url, self.names, settings=self.settings
        )

    async def prefill(
        self, *, chunk: int = 8, pull: bool = True, longest: int = 999, reaches: bool = True
    ) -> PrefillHalf:
        """reaches: it can connect to all decode workers."""
        consumer = await self.consumer()
        name = f"prefill-{len(self.prefills) + 1}"
        prefill = PrefillHalf(self, name, chunk=chunk, consumer=consumer, longest=longest)
        self.prefills.append(prefill)
        if reaches:
            decodes = sorted(self.directory.workers("decode"))
            await soon(lambda: prefill.links.connected == decodes)
        if pull:
            prefill.puller.start()
        return prefill

    async def dead(self) -> list[DeadLetter]:
        """The dead letters, the newest first."""
        (producer, *_) = [decode.producer for decode in self.decodes.values()]
        return await dead_letters(producer.connection, self.names)

    async def check_clean(self) -> None:
        """Ledger, fences, pools, stream and engines are as they were before the first request."""
        for decode in self.decodes.values():
            await soon(lambda d=decode: d.ledger.open_jobs == 0 and not d.ledger.has_events)  # type: ignore[misc]
            decode.step()
            decode.check_clean()
        for prefill in self.prefills:
            await asyncio.wait_for(prefill.puller.idle.wait(), 10)
            # A delivery that is given back may have come meanwhile.
            await soon(
                lambda p=prefill: p.engine.idle and not p.puller.in_flight  # type: ignore[misc]
            )
            assert prefill.budget.tokens == 0
            assert prefill.engine.failure is None
            assert prefill.region.owner.fences.in_use == 0
            assert not any(prefill.credits.used.values())
        (producer, *_) = [decode.producer for decode in self.decodes.values()]
        await soon(lambda: producer.depth().depth_jobs == 0)


def prompt(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(50_000), k=length)


Make = Callable[..., Cluster]
"""Of the fixture `make`: `Cluster` on a NATS server that is shared."""


async def settled(*requests: Served) -> None:
    await soon(lambda: all(r.loaded is not None for r in requests))


def faults_of(half: DecodeHalf | PrefillHalf) -> Any:
    """What happens to whoever copies to or from its region."""
    transport: Any = half.rig.transport
    return transport.faults(half.region.descriptor)


async def stuck(half: DecodeHalf | PrefillHalf) -> None:
    """Wait until its faults hold somebody: who writes to a decode worker, or who reads from a
    prefill worker in pull mode."""
    assert await asyncio.to_thread(faults_of(half).wait_held)


async def copying(decode: DecodeHalf, owner: DecodeHalf | PrefillHalf) -> tuple[Served, Any]:
    """Send a request. Returns it once its copy to or from the owner's memory is stopped, and what
    lets that go on."""
    faults = faults_of(owner).hold()
    served = decode.send(prompt(30))
    await stuck(owner)
    return served, faults
