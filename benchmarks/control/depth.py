"""Does a decision cost more when ten thousand jobs wait? Two decode workers without an engine, side
by side in this process, one with ten open jobs and one with nearly as many as the stream holds,
asked in turns. Ledger, router, scheduler side, publisher, control server and producer are the real
ones, on a real NATS; all jobs are of the worker that decides, the worst case. vLLM is left out
because admitting a request costs it more for each that waits already (benchmarks/README.md).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from benchmarks.control.plant import Plant
from benchmarks.report import Row, median, row, versus
from pullfill.decode_worker.connector_scheduler import ConnectorScheduler
from pullfill.decode_worker.context import DecodeContext
from pullfill.decode_worker.control import ControlServer
from pullfill.decode_worker.ledger import Ledger
from pullfill.decode_worker.outlook import Outlook
from pullfill.decode_worker.publisher import Publisher
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.decode_worker.step_meter import StepMeter
from pullfill.queue.contract import QueueConfig
from pullfill.queue.jetstream import JetStreamProducer
from pullfill.testing.loopback import LoopbackFences
from pullfill.wire import Compat, RouterConfig, RouterPolicy

FEW, MANY = 10, 9_800
"""The stream holds 10,000 (QueueConfig.max_jobs); what is opened on top must fit."""
BURST, BATCH = 100, 200
BLOCK, PROMPT = 16, 96
LIMIT = 1.2
_HOURS_S = 3600.0
_COMPAT = Compat(
    model="m", model_fingerprint="f", vllm="0", dtype="d", kv_cache_dtype="d", block_size=BLOCK,
    layout="LBHNC", num_layers=1, num_kv_heads=1, page_bytes=64, isa="x",
    attention="a", kv_scales="1", kv_groups="FullAttention",
)  # fmt: skip


class _Request(SimpleNamespace):
    """vLLM's Request, as far as a decision looks at it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


@dataclass(slots=True)
class Cost:
    """Seconds of CPU. decisions: each, asking and opening. jobs: each, from there to stored."""

    decisions: list[float] = field(default_factory=list)
    jobs: list[float] = field(default_factory=list)


class Half:
    """A decode worker without an engine. Its jobs stay open until they are taken back."""

    def __init__(self, producer: JetStreamProducer, name: str) -> None:
        self._name, self._serial = name, 0
        self.producer = producer
        self.traces = RequestTraces(name)
        self.open: list[str] = []
        config = RouterConfig(
            policy=RouterPolicy.ALWAYS_REMOTE, max_prefill_queue_size=10**6,
            claim_timeout_s=_HOURS_S, remote_timeout_s=_HOURS_S, max_remote_kv_fraction=1.0,
        )  # fmt: skip
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self.control.wake)

        self.ledger = Ledger(LoopbackFences(64, 8), incarnation="i", on_action=wake)
        self.control = ControlServer(
            instance_id=name, compat=_COMPAT, ledger=self.ledger, traces=self.traces,
            cancel=producer.cancel, nak=producer.nak,  # type: ignore[arg-type]
        )  # fmt: skip
        self.publisher = Publisher(
            loop, producer, self.ledger, instance_id=name,
            compat_hash=_COMPAT.hash(),
        )  # fmt: skip
        cache = SimpleNamespace(block_size=BLOCK, num_gpu_blocks=10**6)
        self.context: Any = DecodeContext(
            instance_id=name, incarnation="i", router_config=lambda: config,
            situation=lambda *asked: outlook.situation(*asked),
            publish=self.publisher.submit, traces=self.traces,
            make_ledger=lambda _: self.ledger, offer=lambda *_: None,
        )  # fmt: skip
        outlook = Outlook(self.context, producer, self.control, producer.health, cache, 64)
        self.context.ledger = self.ledger
        self.side = ConnectorScheduler(self.context, BLOCK)
        # Predictions are made under each policy. No step is taken here, so no chunk is sized.
        chunks: Any = SimpleNamespace(step_tokens=2048, able=True, each=1)
        self.side.meter = StepMeter(self.context, chunks)

    async def start(self) -> None:
        await self.control.start("127.0.0.1")
        self.control.prefill_workers = 1  # somebody who never claims
        self.ledger.tell_opens = False

    async def stop(self) -> None:
        await self.control.stop()
        await self.producer.close()

    async def send(self, count: int, cost: Cost | None = None) -> None:
        """So many requests, decided in one go as in an engine step; returns when all are stored."""
        requests = [self._request() for _ in range(count)]
        begin, spent = time.process_time(), 0.0
        for request in requests:
            asked = time.thread_time()
            external, _ = self.side.decide(request, 0)
            self.side.enqueue(request, [range(-(-PROMPT // BLOCK))], external or 0)
            took = time.thread_time() - asked
            spent += took
            if cost is not None:
                cost.decisions.append(took)
        self.open += [request.request_id for request in requests]
        await self._until(lambda: all(job.receipt is not None for job in self._newest(count)))
        if cost is not None:
            cost.jobs.append((time.process_time() - begin - spent) / count)

    async def take_back(self, count: int) -> None:
        """Cancel the newest; returns when the queue has deleted them."""
        wanted = self.ledger.open_jobs - count
        for request_id in self.open[-count:]:
            self.side.request_finished(request_id)
        del self.open[-count:]
        self.side.collect()
        self.side.step_done()
        await self._until(lambda: self.ledger.open_jobs == wanted and not self.control._tasks)

    def _newest(self, count: int) -> list[Any]:
        jobs = self.ledger._jobs
        return [jobs[self.ledger._by_request[name]] for name in self.open[-count:]]

    async def _until(self, true: Any) -> None:
        async with asyncio.timeout(30.0):
            while not true():  # noqa: ASYNC110 - nothing to wait on, and the same for both
                await asyncio.sleep(0.01)

    def _request(self) -> Any:
        self._serial += 1
        return _Request(
            request_id=f"{self._name}{self._serial}", num_prompt_tokens=PROMPT,
            prompt_token_ids=list(range(PROMPT)), num_output_tokens=0, num_preemptions=0,
            skip_reading_prefix_cache=False, mm_features=[], prompt_embeds=None,
            lora_request=None, pooling_params=None, cache_salt=None, priority=0, prefill_stats=None,
            trace_headers=None, sampling_params=None, arrival_time=time.time(),
        )  # fmt: skip


async def _measure(url: str, rounds: int, many: int) -> tuple[dict[str, Cost], float]:
    costs, halves = {"few": Cost(), "many": Cost()}, {}
    try:
        for name in costs:
            producer = await JetStreamProducer.connect(url, QueueConfig(name, "c"))
            halves[name] = Half(producer, name)
            await halves[name].start()
        begin = time.monotonic()
        await halves["few"].send(FEW)
        for start in range(0, many, BATCH):
            await halves["many"].send(min(BATCH, many - start))
        filled = time.monotonic() - begin
        for number in range(rounds + 1):
            for name, half in halves.items():
                await half.send(BURST, costs[name] if number else None)
                await half.take_back(BURST)
    finally:
        for half in halves.values():
            await half.stop()
    return costs, filled


def run(plant: Plant, rounds: int, many: int = MANY) -> list[Row]:
    """Rows with the ratio of both depths."""
    costs, filled = asyncio.run(_measure(plant.nats, 3 * rounds, many))
    few, more, peer = costs["few"], costs["many"], f"with {FEW}"
    rows = [
        versus(
            f"a decision with {many} jobs open", 1e6 * median(more.decisions), "us of CPU", peer,
            1e6 * median(few.decisions), at_most=LIMIT,
        ),
        versus(
            "the same, mean of all", 1e6 * fmean(more.decisions), "us of CPU", peer,
            1e6 * fmean(few.decisions), at_most=LIMIT,
        ),
        versus(
            f"a job from its decision until it is stored, with {many} open",
            1e6 * median(more.jobs), "us of CPU", peer, 1e6 * median(few.jobs), at_most=LIMIT,
        ),
        row(f"{many} jobs decided and stored in", filled, "s"),
    ]  # fmt: skip
    for one in rows:
        print(f"  {one.metric:<66} {one.value:>9} {one.unit} {one.peer} {one.peer_value}")
    return rows
