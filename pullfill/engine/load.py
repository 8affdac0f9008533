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
        self._queued = 0

    @property
    def queued(self) -> int:
        """Tokens to compute, as `LoadReport.uncached_tokens_queued`: those that `read` has found
        last, and those that `came` since. What was computed since is still in it."""
        return self._queued

    def came(self, request: Any, held: int) -> None:
        """A request goes to the scheduler. The next `read` does not look for it in the cache.

        held: number of its leading tokens that are in the prefix cache, or will be."""
        self._cached[request.request_id] = held
        self._queued += request.num_tokens - held

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

    def coming(self, request: Any, enough: int) -> int:
        """Return how many leading tokens of a new prompt some request here has, in whole blocks.

        They are in the prefix cache, or will be. Looks at request after request, until one has
        `enough` tokens of the prompt."""
        size = self._places.block_size
        ours, per_block = request.block_hashes, size // self._pool.hash_block_size
        most = 0
        # The newest first: prompts that share a prefix often come together.
        for other in reversed(self._scheduler.requests.values()):
            if most * size >= enough:
                break
            theirs = other.block_hashes
            upto = min(len(ours), len(theirs)) // per_block
            following = (most + 1) * per_block - 1
            if upto <= most or ours[following] != theirs[following]:
                continue
            while most < upto:  # a binary search: a hash names all blocks before it, too
                middle = (most + upto + 1) // 2
                if ours[middle * per_block - 1] == theirs[middle * per_block - 1]:
                    most = middle
                else:
                    upto = middle - 1
        return most * size

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
        self._queued = queued
        free = self._pool.get_num_free_blocks()
        return LoadReport(
            running=running,
            waiting=waiting,
            uncached_tokens_queued=queued,
            active_blocks=max(0, self._pool.num_gpu_blocks - 1 - free),  # without the null block
            free_blocks=free,
            draining=draining,
        )
