"""A decode worker without vLLM: all of its handoff but the engine is real.

Ledger, Handoff, ControlServer, the connector's scheduler half and a KV region. `DecodeHalf`
stands for vLLM: it allocates blocks, asks the scheduler half and hears its reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.decode_worker.context import DecodeContext
from pullfill.decode_worker.control import ControlServer
from pullfill.decode_worker.forecast import PrefillWorkers
from pullfill.decode_worker.handoff import Handoff
from pullfill.decode_worker.ledger import Ledger
from pullfill.decode_worker.outlook import Outlook
from pullfill.decode_worker.peers import Peers
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.decode_worker.rules import Situation
from pullfill.decode_worker.scheduler import DecodeScheduler, JobBlocks
from pullfill.queue.contract import JobProducer
from pullfill.transfer.contract import PeerSession
from pullfill.wire import (
    KvMode,
    RegionDescriptor,
    RouterConfig,
    RouterPolicy,
    WorkerRecord,
    WorkerState,
)
from tests.support.fakes import FakePool, FakeRequest, situation
from tests.support.kv_engine import BLOCK, LAYOUT, NUM_BLOCKS, compute, holds
from tests.support.transfer_rigs import COMPAT, Region, Rig

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
        kv_mode: KvMode = KvMode.PUSH_ASYNC,
    ) -> None:
        self.name, self._host, self.producer, self._clock = name, host, producer, clock
        self.region: Region = rig.region(LAYOUT, instance_id=name, incarnation=f"{name}-i0")
        self.pages = self.region.pages
        self.pool = FakePool(NUM_BLOCKS)
        self.requests: dict[str, Served] = {}
        self.cached: list[int] = []
        self.traces = RequestTraces(name)
        loop = asyncio.get_running_loop()
        self.ledger = Ledger(
            self.region.owner.fences,
            incarnation=f"{name}-i0",
            kv_mode=kv_mode,
            clock=clock,
            on_event=lambda: loop.call_soon_threadsafe(self.step),
            on_action=lambda: loop.call_soon_threadsafe(self.handoff.wake.set),
        )
        self.forecaster = PrefillWorkers()
        self.handoff = Handoff(
            self.ledger,
            producer,
            self.traces,
            peers=Peers(),
            forecaster=self.forecaster,
            wake=asyncio.Event(),
            instance_id=name,
            compat_hash=COMPATIBLE.hash(),
        )
        self.control = ControlServer(
            self.handoff,
            instance_id=name,
            compat=COMPATIBLE,
            reach=self._reach if kv_mode is KvMode.PULL else None,
        )
        self.config = RouterConfig(policy=RouterPolicy.ALWAYS_REMOTE, remote_timeout_s=timeout_s)
        self.outlook: Outlook | None = None
        blocks = JobBlocks(BLOCK)
        blocks.pool = self.pool
        self.context = DecodeContext(
            instance_id=name,
            incarnation=f"{name}-i0",
            router_config=lambda: self.config,
            traces=self.traces,
            ledger=self.ledger,
            blocks=blocks,
        )
        self.side = DecodeScheduler(
            blocks,
            self.ledger,
            situation=self._situation,
            publish=self.handoff.publish,
            traces=self.traces,
        )
        self._rig = rig

    def look(self, max_body: int = 0) -> None:
        """Decide on what this worker really knows from now on, not on what the rig says.

        max_body: see `JetStreamProducer`."""
        producer: Any = SimpleNamespace(
            available=True, depth=self.producer.depth, max_body=max_body
        )
        unused: Any = None
        self.outlook = Outlook(
            self.context, producer, self.handoff.peers, self.forecaster, None, unused,
            SimpleNamespace(num_gpu_blocks=1_000_000, block_size=BLOCK), 1,
            target_blocks=self.context.blocks.targets,
        )  # fmt: skip

    def _situation(self, request: Any, hit: int) -> Situation:
        if self.outlook is not None:
            return self.outlook.situation(request, hit)
        return situation(request, hit, self.config, self.traces)

    def _reach(self, regions: Sequence[RegionDescriptor]) -> Callable[[], PeerSession]:
        return lambda: self._rig.transport.connect(self.region.memory, *regions)

    async def start(self) -> WorkerRecord:
        await self.control.start(self._host)
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
            max_model_len=1000,
        )

    def cache(self, tokens: Sequence[int]) -> list[int]:
        """Prefill a prompt here; its whole blocks are this worker's prefix cache."""
        table = self.pool.allocate(len(tokens) // BLOCK)
        assert table is not None
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
        assert own is not None
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
        loaded += later
        for request_id in [*loaded, *failed]:
            served = self.requests[request_id]
            assert served.loaded is None, "told twice"
            served.loaded = request_id in loaded
            if served.over or not served.loaded:
                self.pool.release(served.table)

    def abort(self, served: Served) -> None:
        served.over = True
        self.side.request_finished(served.request.request_id)
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
