"""A decode worker without vLLM: all of its handoff but the engine is real.

Ledger, ControlServer, Publisher, the connector's scheduler half and a KV region. `DecodeHalf`
stands for vLLM: it allocates blocks, asks the scheduler half and hears its reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.decode_worker.connector_scheduler import ConnectorScheduler
from pullfill.decode_worker.context import DecodeContext
from pullfill.decode_worker.control import ControlServer
from pullfill.decode_worker.ledger import Ledger
from pullfill.decode_worker.publisher import Publisher
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.queue.contract import JobProducer
from pullfill.wire import (
    KvMode,
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
            on_action=lambda: loop.call_soon_threadsafe(self.control.wake),
        )
        self.control = ControlServer(
            instance_id=name,
            compat=COMPATIBLE,
            ledger=self.ledger,
            traces=self.traces,
            cancel=producer.cancel,  # type: ignore[arg-type]
            nak=producer.nak,
            reach=lambda regions: lambda: rig.transport.connect(self.region.memory, *regions),
        )
        self.control.grants.claimed = producer.claimed
        self.control.grants.committed = producer.committed
        config = RouterConfig(policy=RouterPolicy.ALWAYS_REMOTE, remote_timeout_s=timeout_s)
        self.side = ConnectorScheduler(
            DecodeContext(
                instance_id=name,
                incarnation=f"{name}-i0",
                router_config=lambda: config,
                situation=lambda r, h: situation(r, h, self.side._context),
                publish=lambda job: self.publisher.submit(job),
                traces=self.traces,
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
            compat_hash=COMPATIBLE.hash(),
            send=self.control.send,
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
        self.control.wake()

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
