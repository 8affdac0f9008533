"""Block events of vLLM's own prefix cache: what is published is what vLLM has cached.

No engine: vLLM's KVCacheManager alone. tests/integration/test_two_decode_workers.py has a cluster.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm import envs
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import EventPublisher, KVEventBatch, NullEventPublisher
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from pullfill.decode_worker.prefix.block_events import Held
from pullfill.engine import kv_events
from pullfill.engine.kv_events import Change, Cleared, KvEvents, Removed, Stored
from pullfill.prefix import chain
from pullfill.wire import u32

BLOCK = 16


class Cache:
    """vLLM's KVCacheManager, requests in it, and what its events say of it.

    windows: number of further KV cache groups, which have a sliding window."""

    def __init__(self, blocks: int, windows: int = 0, theirs: Any = None) -> None:
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        shape: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        full = KVCacheGroupSpec(["full"], FullAttentionSpec(block_size=BLOCK, **shape))
        window = SlidingWindowSpec(block_size=BLOCK, sliding_window=2 * BLOCK, **shape)
        config = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                *(KVCacheGroupSpec([f"window {i}"], window) for i in range(windows)), full
            ],
        )  # fmt: skip
        self.events = KvEvents()
        self.config = SimpleNamespace(kv_events_config=None)
        if theirs is not None:
            self.config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True)
        self.events.switch_on(self.config)
        self.manager = KVCacheManager(
            kv_cache_config=config, max_model_len=1 << 20, scheduler_block_size=BLOCK,
            hash_block_size=BLOCK, enable_kv_cache_events=True,
        )  # fmt: skip
        self.scheduler = SimpleNamespace(
            kv_cache_manager=self.manager,
            kv_cache_config=config,
            kv_event_publisher=theirs or NullEventPublisher(),
        )
        self.events.attach(SimpleNamespace(scheduler=self.scheduler), self.take)
        self.held = Held(self.events.places)
        self.told: set[int] = set()
        self.names: dict[bytes, int] = {}
        self.full = windows
        self.number = 0

    def take(self, changes: list[Change]) -> None:
        for change in changes:
            if isinstance(change, Stored):
                self.told.update(self.held.store(change))
            elif isinstance(change, Removed):
                self.told.difference_update(self.held.remove(change))
            else:
                assert isinstance(change, Cleared)
                self.held.clear()
                self.told.clear()

    def request(self, tokens: list[int], salt: str | None = None) -> Any:
        self.number += 1
        request = Request(
            f"r{self.number}", tokens, SamplingParams(max_tokens=5), None,
            cache_salt=salt, block_hasher=self.hasher,
        )  # fmt: skip
        root = chain.root(salt, None, BLOCK)
        ours = chain.extend(root, u32.pack(tokens), BLOCK)
        self.names |= dict(zip(request.block_hashes, ours, strict=True))
        return request

    def run(self, request: Any) -> bool:
        """Schedule a request's whole prompt. Returns False if there is no room."""
        blocks, hit, *_ = self.manager.get_computed_blocks(request)
        rest = request.num_tokens - hit
        made = self.manager.allocate_slots(request, rest, hit, blocks)
        if made is not None:
            request.num_computed_tokens = request.num_tokens
        return made is not None

    def step_ends(self) -> None:
        """What vLLM's scheduler does with the events of a step."""
        if events := self.manager.take_events():
            self.scheduler.kv_event_publisher.publish(KVEventBatch(ts=0.0, events=events))

    def cached(self) -> set[int]:
        """What vLLM would find, by our hashes. vLLM's own map, not its events."""
        keys = self.manager.block_pool.cached_block_hash_to_block._cache
        return {self.names[get_block_hash(k)] for k in keys if get_group_id(k) == self.full}


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

    def publish(self, events: Any) -> None:
        self.events += events.events

    def shutdown(self) -> None: ...


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


@pytest.mark.parametrize("ints", [None, "1", "0"])
def test_a_publisher_of_the_user_gets_every_event(
    ints: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM tells it by default, or as the user's variable says."""
    if ints is not None:
        monkeypatch.setenv(kv_events.INTS, ints)
    theirs = Recorder()
    cache = Cache(20, windows=1, theirs=theirs)
    assert cache.config.kv_events_config.publisher == "zmq"
    request = cache.request(list(range(3 * BLOCK)))
    assert cache.run(request)
    cache.step_ends()
    assert {event.group_idx for event in theirs.events} == {0, 1}
    with monkeypatch.context() as by_itself:
        by_itself.setenv(kv_events.INTS, ints or "1")
        assert theirs.events[-1].block_hashes == [
            maybe_convert_block_hash(one) for one in request.block_hashes
        ]
    assert cache.told == cache.cached()


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
    assert events.places.block_size == 0
