"""vLLM's KVCacheManager without an engine, and what its events say of it. Imports vLLM late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pullfill.decode_worker.prefix.block_events import Held
from pullfill.engine.kv_events import Change, Cleared, KvEvents, Removed, Stored
from pullfill.prefix import chain
from pullfill.wire import u32
from tests.support.late import Late

torch: Any = Late("torch")

BLOCK = 16


class Cache:
    """vLLM's KVCacheManager, requests in it, and what its events say of it.

    windows: number of further KV cache groups, which have a sliding window."""

    def __init__(self, blocks: int, windows: int = 0, theirs: Any = None) -> None:
        from vllm.distributed.kv_events import NullEventPublisher
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            SlidingWindowSpec,
        )

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
        self.config_of_groups = config
        self.events = KvEvents()
        self.config = SimpleNamespace(kv_events_config=None)
        if theirs is not None:
            from vllm.config.kv_events import KVEventsConfig

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
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

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
        from vllm.distributed.kv_events import KVEventBatch

        if events := self.manager.take_events():
            self.scheduler.kv_event_publisher.publish(KVEventBatch(ts=0.0, events=events))

    def cached(self) -> set[int]:
        """What vLLM would find, by our hashes. vLLM's own map, not its events."""
        from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

        keys = self.manager.block_pool.cached_block_hash_to_block._cache
        return {self.names[get_block_hash(k)] for k in keys if get_group_id(k) == self.full}
