"""A frontend without vLLM's HTTP app: our own half of one, driven directly.

Registry view, worker pool, dispatcher and codec are the real ones, on uvloop as in a frontend. The
requests are made beforehand, so this process's CPU is what routing, sending and receiving cost.

One JSON command per line on a Unix socket, one answer each:
    {"do": "wait", "decode": n, "within": s}       all decode workers take requests
    {"do": "load", "conversations": n, "at_once": k, "rate": r, "turn": t, "output": o, "seed": x}
        each conversation is two requests, the second one longer by a turn of `t` tokens
    {"do": "abort", "newest": n}                    give up the last n of those
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from pullfill.config import ClusterRef
from pullfill.engine import check, front_wire
from pullfill.engine.blame import Fault
from pullfill.frontend.decode_pool import WorkerPool
from pullfill.frontend.dispatch import Dispatcher
from pullfill.frontend.flight import Flight
from pullfill.frontend.request_log import RequestLog
from pullfill.frontend.routing.balancer import Balancer
from pullfill.frontend.routing.prefixes import Prefixes
from pullfill.registry.client import EtcdClient
from pullfill.registry.directory import Directory
from pullfill.registry.live_settings import store
from pullfill.wire import DecodePolicy, RouterConfig
from tests.support.frontend_rig import Alone

TURN, OUTPUT = 96, 2
_LIMIT_S = 60.0


class Sticky(Balancer):
    """Keeps a conversation at one worker: by the first token of its prompt."""

    def choose(self, flight: Flight, workers: Sequence[Any], now: float) -> Any:
        ordered = sorted(workers, key=lambda w: w.instance_id)
        one = ordered[(flight.request.prompt_token_ids or [0])[0] % len(ordered)]
        return super().choose(flight, [one], now)


class Driver:
    """Takes the place of `engine.front_client.DecodeClient`."""

    def __init__(self) -> None:
        self.tokens = 0
        self.failed_requests = 0
        self._serial = 0
        self._ends: dict[str, asyncio.Future[None]] = {}

    async def start(self, cluster: ClusterRef, model: str, router: dict[str, Any]) -> None:
        client = await EtcdClient.connect(cluster.etcd_url, wait_s=30.0)
        for key, value in router.items():
            await store(client, cluster.namespace, f"router.{key}", str(value))
        directory = Directory(client, cluster.namespace, ["decode", "prefill"])
        await directory.start()
        hello = front_wire.FrontendHello(
            frontend_instance=f"driver-{random.randrange(1 << 32):08x}",
            vllm_version=check.require_version(),
            model="demo",
        )
        self._explain = RequestLog(limit=100_000)
        board: Any = Alone()
        self._port = Dispatcher(
            cast(Any, self),
            front_wire.FrontendCodec(),
            Sticky(lambda: RouterConfig(decode_policy=DecodePolicy.RANDOM)),
            self._explain,
            board,
        )
        self.pool = WorkerPool(directory, hello, ("demo", model), self._port, Prefixes(0))
        self.pool.start()

    def outputs(self, instance_id: str, outputs: Any) -> None:
        for out in outputs.outputs:
            self.tokens += len(out.new_token_ids)
            if out.finish_reason is not None and (end := self._ends.pop(out.request_id, None)):
                end.set_result(None)

    def failed(self, request_id: str, message: str, fault: Fault = Fault.WORKERS) -> None:
        self.failed_requests += 1
        if self.failed_requests < 3:
            print(f"{request_id} failed: {message}", file=sys.stderr, flush=True)
        if end := self._ends.pop(request_id, None):
            end.set_result(None)

    def joined(self, welcome: Any) -> None:
        """Nothing to fit."""

    def loaded(self, instance_id: str, load: Any) -> None:
        """Nobody shows it."""

    def left(self, instance_id: str) -> None:
        """Nothing to forget."""

    async def wait(self, decode: int, within: float) -> dict[str, Any]:
        """Until that many workers take requests."""
        async with asyncio.timeout(within):
            while len(self._port.workers) < decode:  # noqa: ASYNC110 - polled on purpose
                await asyncio.sleep(0.02)
        return {}

    async def load(
        self, conversations: int, at_once: int, rate: float = 0.0, turn: int = TURN,
        output: int = OUTPUT, seed: int = 0,
    ) -> dict[str, Any]:  # fmt: skip
        """Run conversations, at most `at_once` together, begun `rate` per second if given."""
        rng = random.Random(seed)
        plan = [self._conversation(rng, turn, output) for _ in range(conversations)]
        gate = asyncio.Semaphore(at_once)
        tokens, failed = self.tokens, self.failed_requests
        cpu, begin = time.process_time_ns(), time.monotonic()

        async def talk(requests: list[Any], start: float) -> None:
            if rate:
                await asyncio.sleep(max(0.0, start - time.monotonic()))
            async with gate:
                for request in requests:
                    await self._ask(request)

        talks = [talk(r, begin + (i / rate if rate else 0.0)) for i, r in enumerate(plan)]
        async with asyncio.timeout(_LIMIT_S + (conversations / rate if rate else 0.0)):
            await asyncio.gather(*talks)
        took, used = time.monotonic() - begin, time.process_time_ns() - cpu
        records = [self._explain.get(request.request_id) for pair in plan for request in pair]
        return {
            "seconds": took,
            "cpu_ns": used,
            "requests": 2 * conversations,
            "tokens": self.tokens - tokens,
            "failed": self.failed_requests - failed,
            "remote": sum(r is not None and r.path == "remote" for r in records),
            "stages": _stages(records),
            "local": Counter(
                r.fallback or r.reason for r in records if r is not None and r.path != "remote"
            ),
        }

    async def _ask(self, request: Any) -> None:
        end = self._ends[request.request_id] = asyncio.get_running_loop().create_future()
        request.arrival_time = time.time()
        self._port.submit(request)
        await end

    def _conversation(self, rng: random.Random, turn: int, output: int) -> list[Any]:
        prompt = [rng.randrange(1000, 30000) for _ in range(2 * turn)]
        return [self._request(prompt[:turn], output), self._request(prompt, output)]

    def _request(self, prompt: list[int], output: int) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        self._serial += 1
        return EngineCoreRequest(
            request_id=f"r{self._serial}",
            external_req_id=f"r{self._serial}",
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=SamplingParams(
                max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=False
            ),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )


def _stages(records: list[Any]) -> dict[str, list[float]]:
    """Of the requests that were prefilled remotely, ms by stage."""
    found: dict[str, list[float]] = {}
    for record in records:
        if record is None or record.path != "remote":
            continue
        for name in record.timings_ms.__struct_fields__:
            value = getattr(record.timings_ms, name)
            if value is not None and (name != "prefix_read" or value > 0):
                found.setdefault(name, []).append(round(value, 4))
    return found


def run(cluster: ClusterRef, model: str, path: Path, router: dict[str, Any]) -> None:
    """Serve commands on a Unix socket at `path` until its one client goes."""
    import uvloop

    async def main() -> None:
        driver = Driver()
        await driver.start(cluster, model, router)
        over = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while line := await reader.readline():
                order = json.loads(line)
                try:
                    answer = await getattr(driver, order.pop("do"))(**order)
                except Exception as exc:
                    answer = {"error": repr(exc)}
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
            over.set()

        server = await asyncio.start_unix_server(serve, path)
        await over.wait()
        server.close()  # keep a reference until here, or the server stops listening

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
