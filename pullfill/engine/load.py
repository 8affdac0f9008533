"""What vLLM's scheduler has to do: requests, tokens that must be computed, KV blocks."""

from __future__ import annotations

from typing import Any

from pullfill.engine.front_wire import LoadReport
from pullfill.engine.kv_events import places_of


class EngineLoad:
    """Reads the load of one engine. Engine thread.

    core: vLLM's EngineCore."""

    def __init__(self, core: Any) -> None:
        self._scheduler = core.scheduler
        manager = core.scheduler.kv_cache_manager
        self._pool = manager.block_pool
        self._places = places_of(core.scheduler.kv_cache_config)
        self._cached: dict[str, int] = {}

    def hit(self, request: Any) -> int:
        """Return how many leading tokens of a new request are in the prefix cache.

        A binary search: vLLM evicts the end of a prompt before its beginning. So this takes
        microseconds for a long prompt too, and is only an estimate."""
        if not self._pool.enable_caching or request.skip_reading_prefix_cache:
            return 0
        size, groups = self._places.block_size, list(self._places.bits)
        per_block = size // self._pool.hash_block_size
        hashes = request.block_hashes
        least, most = 0, min((request.num_tokens - 1) // size, len(hashes) // per_block)
        while least < most:
            middle = (least + most + 1) // 2
            if self._pool.get_cached_block(hashes[middle * per_block - 1], groups):
                least = middle
            else:
                most = middle - 1
        return least * size

    def mark(self) -> tuple[int, ...]:
        """Return numbers that change with the load, nearly always. Cheap enough for each step."""
        return (*self._scheduler.get_request_counts(), self._pool.get_num_free_blocks())

    def read(self, draining: bool) -> LoadReport:
        """Return the load. Takes time in proportion to the number of requests."""
        running, waiting = self._scheduler.get_request_counts()
        cached, self._cached = self._cached, {}
        queued = 0
        for request_id, request in self._scheduler.requests.items():
            computed = request.num_computed_tokens
            if not computed:
                hit = cached.get(request_id)
                computed = self.hit(request) if hit is None else hit
                self._cached[request_id] = computed
            # A request that generates has one more token to compute in each step.
            if (rest := request.num_tokens - computed) > 1:
                queued += rest
        free = self._pool.get_num_free_blocks()
        return LoadReport(
            running=running,
            waiting=waiting,
            uncached_tokens_queued=queued,
            active_blocks=max(0, self._pool.num_gpu_blocks - 1 - free),  # without the null block
            free_blocks=free,
            draining=draining,
        )
