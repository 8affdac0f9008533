"""Decode workers without vLLM that read each other's cached prefixes. All else is real.

ControlServer, ReadLeases, Holders, PrefixFetches, the connector's scheduler half and a KV region.
`FetchWorker` stands for vLLM: it has a prefix cache, and asks and tells the scheduler half.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from pullfill.decode_worker.control import ControlServer
from pullfill.decode_worker.prefix import read_leases
from pullfill.decode_worker.prefix.fetches import PrefixFetches
from pullfill.decode_worker.prefix.holders import Holders
from pullfill.decode_worker.prefix.read_leases import ReadLeases
from pullfill.engine.request_limits import PREFIX_HOLDER
from pullfill.wire import (
    ExplainRecord,
    LeaseHello,
    PrefixHolder,
    RouterConfig,
    RouterPolicy,
    u32,
)
from tests.support.fakes import FakePool, FakeRequest
from tests.support.handoff_rig import COMPATIBLE, DecodeHalf, Served
from tests.support.kv_engine import BLOCK, NUM_BLOCKS, compute, holds
from tests.support.transfer_rigs import Rig
from tests.support.waiting import soon

LEAST = 2 * BLOCK
T = TypeVar("T")


def hashes_of(tokens: Sequence[int], salt: str | None) -> list[str]:
    """A hash for each whole block, over all tokens before its end."""
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    return [hashlib.sha256(f"{salt}{list(tokens[:end])}".encode()).hexdigest() for end in ends]


class CachePool(FakePool):
    """A FakePool with a prefix cache. A block that is allocated is evicted from it."""

    enable_caching = True

    def allocate(self, count: int) -> list[int]:
        ids = super().allocate(count)
        self.cached = {h: block for h, block in self.cached.items() if block not in ids}
        return ids

    def hit(self, hashes: Sequence[str]) -> list[int]:
        found = []
        for one in hashes:
            if (block := self.cached.get((one, 0))) is None:
                break
            found.append(block)
        return found

    def cache(self, hashes: Sequence[str], ids: Sequence[int]) -> None:
        for one, block in zip(hashes, ids, strict=False):
            self.cached.setdefault((one, 0), block)


class FakeHost:
    """Runs what is submitted on the loop, as an engine thread between two steps would.

    held: nothing runs while it is set: a long step."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.held = False
        self._todo: list[Callable[[], object]] = []

    def submit(self, work: Callable[[], object], *, wake: bool = True) -> None:
        self._todo.append(work)
        self._loop.call_soon_threadsafe(self.run)

    async def call(self, work: Callable[[], T]) -> T:
        done = self._loop.create_future()
        self.submit(lambda: done.set_result(work()))
        return await done

    def run(self) -> None:
        while self._todo and not self.held:
            self._todo.pop(0)()

    def prepare(self, request: Any, data: memoryview) -> Any:
        """See `EngineLoop.prepare`."""
        tokens = u32.unpack(data)
        return FakeRequest("lease", tokens, block_hashes=hashes_of(tokens, request.cache_salt))


class FetchWorker(DecodeHalf):
    """One decode worker, which computes each prompt. asyncio thread only.

    prefill_s: what it takes to compute a prompt. Half of it is the time to ask a holder."""

    pool: CachePool

    def __init__(self, rig: Rig, name: str) -> None:
        unused: Any = None
        pool = CachePool(NUM_BLOCKS, hash_block_size=BLOCK)
        super().__init__(rig, unused, name, timeout_s=20.0, pool=pool)
        self.config = RouterConfig(policy=RouterPolicy.ALWAYS_LOCAL, min_fetch_tokens=LEAST)
        self.told = {"prefill_workers": 0}
        self.context.worker.ranks = [SimpleNamespace(memory=self.region.memory)]  # type: ignore[list-item]
        self.host = FakeHost()
        cache = SimpleNamespace(num_gpu_blocks=NUM_BLOCKS)
        self.view: Any = SimpleNamespace(mid_step=False, config=SimpleNamespace(cache_config=cache))
        self.prefill_s = 4.0
        self.computed: set[str] = set()
        loop = asyncio.get_running_loop()
        hello = LeaseHello(decode_instance=name, compat=COMPATIBLE.hash(), computes="c")
        self.leases = ReadLeases(self.context, self.host, self.view, hello)  # type: ignore[arg-type]
        self.control = ControlServer(
            self.handoff, welcome=self.context.welcome, compat=COMPATIBLE, leases=self.leases
        )
        self.holders = Holders(hello, self._reach, None)
        self.fetches = PrefixFetches(
            self.context, self.holders, situation=self._situation,
            prefill_s=lambda start, tokens: self.prefill_s,
            wake=lambda: loop.call_soon_threadsafe(self.step),
        )  # fmt: skip
        self.side = self.scheduler(fetching=self.fetches)

    def holds(self, tokens: int) -> PrefixHolder:
        """A frontend's hint that this worker holds the first tokens of a prompt."""
        return PrefixHolder(
            instance_id=self.name, control=self.control.address, tokens=tokens // BLOCK * BLOCK
        )

    def cache(self, tokens: Sequence[int], salt: str | None = None) -> list[int]:
        """Compute a prompt here. Its whole blocks are cached then, and nobody refers to them."""
        ids = self.pool.allocate(len(tokens) // BLOCK)
        compute(self.pages, ids, tokens, 0, len(ids) * BLOCK)
        self.pool.cache(hashes_of(tokens, salt), ids)
        self.pool.release(ids)
        return ids

    def request(
        self, tokens: Sequence[int], hint: PrefixHolder | None, salt: str | None = None
    ) -> FakeRequest:
        params = None if hint is None else {PREFIX_HOLDER: hint}
        return FakeRequest(
            f"r{len(self.requests)}", list(tokens), cache_salt=salt, kv_transfer_params=params,
            block_hashes=hashes_of(tokens, salt),
        )  # fmt: skip

    async def admit(self, request: FakeRequest) -> Served:
        """Ask the scheduler half about a request until it answers, and allocate its blocks."""
        tokens = request.prompt_token_ids or []
        served = self.requests[request.request_id] = Served(request, [])
        while True:
            hit = self.pool.hit(request.block_hashes)[: (len(tokens) - 1) // BLOCK]
            external, later = self.side.decide(request, len(hit) * BLOCK)
            if external is not None:
                break
            await asyncio.sleep(0.001)
        self.pool.touch([self.pool.blocks[b] for b in hit])
        own = self.pool.allocate(external // BLOCK)
        self.pages[:, own] = 0xAA
        served.table = [*hit, *own]
        self.side.enqueue(request, [served.table], external)
        if not later:
            served.loaded = False
            self.computed.add(request.request_id)
        return served

    def arrived(self, served: Served) -> None:
        self.pool.cache(served.request.block_hashes, served.table)

    async def ask(self, request: FakeRequest) -> ExplainRecord:
        """Serve a request up to its computation. Then it ends."""
        return await self.end(await self.admit(request))

    async def end(self, served: Served) -> ExplainRecord:
        """Wait until the KV is there or must be computed, and check it. Then the request ends."""
        await soon(lambda: served.loaded is not None)
        tokens = served.request.prompt_token_ids or []
        if served.loaded:
            assert holds(self.pages, served.table, tokens[: len(served.table) * BLOCK])
            self.pool.release(served.table)
        elif served.request.request_id in self.computed:
            self.pool.release(served.table)
        elif not served.over:
            # After a failed load vLLM asks once more. The prompt is computed.
            assert self.side.decide(served.request, 0) == (0, False)
            self.side.enqueue(served.request, [[]], 0)
        self.side.request_finished(served.request)
        record = self.traces.finish(served.request.request_id)
        assert bool(served.loaded) is bool(record.fetched_tokens) is (record.fetch == "fetched")
        return record

    def expire(self) -> None:
        """Have the time of all leases that this worker gave be over now."""
        for lease in list(self.leases._pinned):
            assert lease.timer.when() <= asyncio.get_running_loop().time() + read_leases.LEASE_S
            lease.timer._run()

    async def check_back(self) -> None:
        await soon(lambda: not self.leases.open)
        assert self.pool.free == set(range(NUM_BLOCKS))
        assert self.region.owner.fences.in_use == 0
        assert not self.fetches._open

    async def stop(self) -> None:
        await self.control.stop()
        await self.fetches.close()
        self.region.owner.close()


def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have holders hash prompts as `hashes_of` does."""

    def own_request(name: str, tokens: Sequence[int], **fields: Any) -> Any:
        return SimpleNamespace(**fields)

    requests = SimpleNamespace(own_request=own_request)
    monkeypatch.setattr(read_leases, "requests", requests)
