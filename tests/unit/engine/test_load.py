"""The load that is read from vLLM's scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine import load
from pullfill.engine.kv_events import Places
from pullfill.engine.load import EngineLoad
from tests.support.fakes import FakeRequest

BLOCK, HASH_BLOCK = 8, 4


class _Pool:
    """cached: hashes that are cached. looked_up: how often it was asked."""

    num_gpu_blocks = 101
    hash_block_size = HASH_BLOCK
    enable_caching = True

    def __init__(self) -> None:
        self.free = 100
        self.cached: set[str] = set()
        self.looked_up = 0

    def get_num_free_blocks(self) -> int:
        return self.free

    def get_cached_block(self, block_hash: str, groups: list[int]) -> list[int] | None:
        assert groups == [2]
        self.looked_up += 1
        return [1] if block_hash in self.cached else None


class _Scheduler:
    kv_cache_config = None

    def __init__(self) -> None:
        self.pool = _Pool()
        self.kv_cache_manager = SimpleNamespace(block_pool=self.pool)
        self.requests: dict[str, Any] = {}
        self.counts = (0, 0)

    def get_request_counts(self) -> tuple[int, int]:
        return self.counts

    def add(self, name: str, prompt: int, computed: int = 0) -> FakeRequest:
        request = FakeRequest(name, list(range(prompt)), num_computed_tokens=computed)
        request.block_hashes = [f"{name}-{i}" for i in range(prompt // HASH_BLOCK)]
        self.requests[name] = request
        return request


@pytest.fixture
def scheduler() -> _Scheduler:
    return _Scheduler()


@pytest.fixture
def engine_load(scheduler: _Scheduler, monkeypatch: pytest.MonkeyPatch) -> EngineLoad:
    monkeypatch.setattr(load, "places_of", lambda _: Places({2: 1}, BLOCK))
    return EngineLoad(SimpleNamespace(scheduler=scheduler))


def test_an_idle_engine(scheduler: _Scheduler, engine_load: EngineLoad) -> None:
    report = engine_load.read(draining=True)
    assert (report.running, report.waiting, report.uncached_tokens_queued) == (0, 0, 0)
    assert (report.active_blocks, report.free_blocks, report.draining) == (0, 100, True)


def test_tokens_that_are_to_be_computed(scheduler: _Scheduler, engine_load: EngineLoad) -> None:
    scheduler.counts, scheduler.pool.free = (2, 2), 70
    scheduler.add("generates", 50, computed=49)
    scheduler.add("half", 50, computed=20)
    scheduler.add("new", 41)
    hit = scheduler.add("hit", 41)
    scheduler.pool.cached = set(hit.block_hashes[:6])  # 3 blocks of 2 hashes each
    report = engine_load.read(draining=False)
    assert (report.running, report.waiting) == (2, 2)
    assert report.uncached_tokens_queued == (50 - 20) + 41 + (41 - 3 * BLOCK)
    assert (report.active_blocks, report.free_blocks) == (30, 70)


@pytest.mark.parametrize("cached", range(7))
def test_every_length_of_a_hit_is_found(
    scheduler: _Scheduler, engine_load: EngineLoad, cached: int
) -> None:
    request = scheduler.add("hit", 6 * BLOCK)
    scheduler.pool.cached = set(request.block_hashes[: 2 * cached])
    # The last token is always computed, so the last block is never a hit.
    expected = 6 * BLOCK - min(cached, 5) * BLOCK
    assert engine_load.read(draining=False).uncached_tokens_queued == expected


def test_a_waiting_request_is_looked_up_once(
    scheduler: _Scheduler, engine_load: EngineLoad
) -> None:
    scheduler.add("new", 41)
    first = engine_load.read(draining=False)
    asked = scheduler.pool.looked_up
    assert asked
    assert engine_load.read(draining=False) == first
    assert scheduler.pool.looked_up == asked
    scheduler.requests.clear()
    engine_load.read(draining=False)
    scheduler.add("new", 41)  # another request of the same name
    engine_load.read(draining=False)
    assert scheduler.pool.looked_up == 2 * asked


def test_a_request_that_may_not_hit_is_not_looked_up(
    scheduler: _Scheduler, engine_load: EngineLoad
) -> None:
    request = scheduler.add("new", 41)
    scheduler.pool.cached = set(request.block_hashes)
    request.skip_reading_prefix_cache = True
    assert engine_load.read(draining=False).uncached_tokens_queued == 41


def test_the_mark_changes_with_requests_and_blocks(
    scheduler: _Scheduler, engine_load: EngineLoad
) -> None:
    marks = {engine_load.mark()}
    scheduler.counts = (1, 0)
    marks.add(engine_load.mark())
    scheduler.pool.free -= 1
    assert len(marks | {engine_load.mark()}) == 3
