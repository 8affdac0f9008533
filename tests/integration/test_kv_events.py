"""Block events of vLLM's own prefix cache: what is published is what vLLM has cached.

No engine: vLLM's KVCacheManager alone. tests/integration/test_two_decode_workers.py has a cluster.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import envs
from vllm.distributed.kv_events import EventPublisher

from pullfill.engine import kv_events
from pullfill.engine.args import build_config
from pullfill.engine.kv_events import KvEvents
from tests.support.prefix_cache import BLOCK, Cache


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`switch_on` sets a variable that vLLM may have read before."""
    monkeypatch.delenv(kv_events.INTS, raising=False)
    had = envs._is_envs_cache_enabled()
    envs.disable_envs_cache()
    yield
    os.environ.pop(kv_events.INTS, None)
    if had:
        envs.enable_envs_cache()


class Recorder(EventPublisher):
    """The publisher of a user."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.ended = False

    def publish(self, events: Any) -> None:
        self.events += events.events

    def shutdown(self) -> None:
        self.ended = True


@pytest.mark.parametrize("windows", [0, 1, 2])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.essential
def test_what_is_told_is_what_vllm_has_cached(windows: int, seed: int) -> None:
    """Also blocks that two requests have computed at once, of which one is evicted."""
    rng = random.Random(seed)
    cache = Cache(60 * (1 + windows), windows)
    running: list[Any] = []
    stems = [[rng.randrange(99) for _ in range(BLOCK * 6)] for _ in range(4)]
    twice, most = False, 0
    for _ in range(400):
        stem = rng.choice(stems)
        tokens = stem[: rng.randrange(len(stem))] + [rng.randrange(99)] * rng.randrange(3 * BLOCK)
        request = cache.request(tokens or [1], rng.choice((None, None, "tenant")))
        if rng.random() < 0.3:
            request.skip_reading_prefix_cache = True  # computes blocks that are cached
        while not cache.run(request):
            cache.manager.free(running.pop(rng.randrange(len(running))))
        running.append(request)
        while running and rng.random() < 0.5:
            cache.manager.free(running.pop(rng.randrange(len(running))))
        if rng.random() < 0.01:
            while running:
                cache.manager.free(running.pop())
            assert cache.manager.reset_prefix_cache()
        blocks = cache.manager.block_pool.cached_block_hash_to_block._cache.values()
        twice |= any(isinstance(found, dict) for found in blocks)
        if rng.random() < 0.7:
            cache.step_ends()
            assert cache.told == cache.cached()
            most = max(most, len(cache.told))
    assert twice, "two requests computed the same block"
    assert most > 20


def test_a_publisher_of_the_user_gets_every_event() -> None:
    theirs = Recorder()
    cache = Cache(20, windows=1, theirs=theirs)
    assert cache.config.kv_events_config.publisher == "zmq"
    request = cache.request(list(range(3 * BLOCK)))
    assert cache.run(request)
    cache.step_ends()
    assert {event.group_idx for event in theirs.events} == {0, 1}
    assert theirs.events[-1].block_hashes == request.block_hashes
    assert cache.told == cache.cached()
    cache.scheduler.kv_event_publisher.shutdown()
    assert theirs.ended


def test_events_that_come_without_a_step() -> None:
    cache = Cache(20)
    request = cache.request(list(range(3 * BLOCK)))
    assert cache.run(request)
    cache.step_ends()
    cache.manager.free(request)
    assert cache.manager.reset_prefix_cache()
    assert len(cache.told) == 3
    cache.events.look()
    assert cache.told == set()


def test_an_engine_without_a_prefix_cache_has_no_events() -> None:
    cache = Cache(20)
    cache.manager.block_pool.enable_caching = False
    events = KvEvents()
    events.attach(SimpleNamespace(scheduler=cache.scheduler), lambda changes: None)
    assert events.block_size == 0


@pytest.mark.parametrize("theirs", [False, True])
def test_the_scheduler_of_a_worker_publishes_to_us(model_path: Path, theirs: bool) -> None:
    """With vLLM's own configuration and scheduler, as a decode worker builds them."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    flags = ["--dtype=float32", "--enforce-eager", "--max-model-len=512", "--block-size=32"]
    if theirs:
        flags += ["--kv-events-config", '{"enable_kv_cache_events": true, "publisher": "null"}']
    config, _ = build_config(
        str(model_path),
        flags,
        kv_role="kv_consumer",
        engine_id="e",
    )
    config.kv_transfer_config = None
    config.cache_config.num_gpu_blocks = 20
    events = KvEvents()
    events.switch_on(config)
    scheduler = Scheduler(
        config, Cache(20).config_of_groups, StructuredOutputManager(config), BLOCK, BLOCK
    )
    assert scheduler.kv_cache_manager.block_pool.enable_kv_cache_events
    taken: list[Any] = []
    events.attach(SimpleNamespace(scheduler=scheduler), taken.extend)
    assert events.block_size == BLOCK
    assert scheduler.get_kv_event_publisher_config() is None
    assert scheduler.reset_prefix_cache()
    events.look()
    assert taken == [kv_events.Cleared()]
    scheduler.shutdown()
