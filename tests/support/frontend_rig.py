"""A frontend's pool and dispatcher over fake decode workers, without vLLM or HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from pullfill.engine import check, front_wire
from pullfill.engine.blame import Fault
from pullfill.frontend.decode_pool import WorkerPool
from pullfill.frontend.dispatch import Dispatcher
from pullfill.frontend.flight import WAITS, Waits
from pullfill.frontend.request_log import RequestLog
from pullfill.frontend.routing import choice
from pullfill.frontend.routing.balancer import Balancer
from pullfill.frontend.routing.prefixes import Prefixes
from pullfill.snapshot import Explained
from pullfill.wire import DecodePolicy
from tests.support.fake_decode import FakeDecode, FakeDirectory
from tests.support.fake_vllm import PlainCodec

PATIENCE_S = 15.0


class Alone:
    """A `SuspectBoard` of one frontend. refused: number of deaths, by fingerprint."""

    def __init__(self) -> None:
        self.refused: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.refused)

    def left_s(self, fingerprint: str) -> float:
        return 600.0 if fingerprint in self.refused else 0.0

    refuse_s = 600.0

    def post(self, fingerprint: str, deaths: int, prompt_tokens: int) -> None:
        self.refused[fingerprint] = deaths


@dataclass
class Sink:
    """Collects what vLLM would be given."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    faults: dict[str, Fault] = field(default_factory=dict)
    outs: list[Any] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)

    def outputs(self, instance_id: str, outputs: Any) -> None:
        self.times.append(outputs.timestamp)
        for out in outputs.outputs:
            self.outs.append(out)
            self.tokens.setdefault(out.request_id, []).extend(out.new_token_ids)
            if out.finish_reason is not None:
                assert out.request_id not in self.finished, "ended twice"
                self.finished[out.request_id] = out.finish_reason

    def failed(self, request_id: str, message: str, fault: Fault = Fault.WORKERS) -> None:
        assert request_id not in self.failures, "failed twice"
        self.failures[request_id] = message
        self.faults[request_id] = fault
        if fault is Fault.REQUEST:
            self.refused.add(request_id)

    def joined(self, welcome: front_wire.DecodeWelcome) -> None: ...

    def left(self, instance_id: str) -> None:
        self.gone.append(instance_id)


@dataclass
class Rig:
    directory: FakeDirectory
    pool: WorkerPool
    dispatcher: Dispatcher
    requests: RequestLog
    sink: Sink

    async def ready(self, count: int) -> None:
        await until(lambda: len(self.pool.candidates()) == count)

    async def told(self, name: str) -> Explained:
        """Return the record of a request that has ended, or will."""
        await until(lambda: (r := self.requests.get(name)) is not None and r.state != "running")
        await self.requests.settled(name)
        found = self.requests.get(name)
        assert found is not None
        return found

    def add(self, worker: FakeDecode) -> None:
        self.directory.put(worker.record)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - the condition has no event to wait for
            await asyncio.sleep(0.005)


@asynccontextmanager
async def rig(
    *workers: FakeDecode,
    waits: Waits = WAITS,
    board: Any = None,
    prefixes: Prefixes | None = None,
    policy: DecodePolicy = DecodePolicy.ROUND_ROBIN,
) -> AsyncIterator[Rig]:
    directory: Any = FakeDirectory(*(worker.start().record for worker in workers))
    hello = front_wire.FrontendHello(
        frontend_instance="frontend-t", vllm_version=check.require_version(), model="m"
    )
    prefixes = prefixes or Prefixes(0)
    requests = RequestLog()
    sink: Any = Sink()
    board = Alone() if board is None else board
    with pytest.MonkeyPatch.context() as patch:  # to touch 13 MB takes longer than most tests
        patch.setattr(choice, "PREDICTED_BLOCKS", 1 << 10)
        balancer = Balancer(lambda: policy, prefixes)
    dispatcher = Dispatcher(sink, PlainCodec(), balancer, requests, board, waits=waits)
    pool = WorkerPool(directory, hello, ["m"], dispatcher, prefixes)
    pool.start()
    try:
        yield Rig(directory, pool, dispatcher, requests, sink)
    finally:
        await pool.stop()
        for worker in workers:
            worker.die()
