"""What a side sees of an engine, and what it may set there: load, blocks, chunks and seats.

Engine thread, except where a method says otherwise. vLLM's scheduler owns all of it: here it is
read, and two of its limits are changed between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from pullfill.engine import requests
from pullfill.engine.front_wire import LoadReport
from pullfill.engine.kv_events import Change, KvEvents, places_of

if TYPE_CHECKING:
    from pullfill.engine.tier import Tier


class View:
    """One engine, as its sides see it.

    core: vLLM's EngineCore.
    config: vLLM's VllmConfig. Not to be changed.
    tier: vLLM's own KV offloading beside our connector. None: there is none.
    chunks: how many tokens a step may compute."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._pool = core.scheduler.kv_cache_manager.block_pool
        self._places = places_of(core.scheduler.kv_cache_config)
        self._hits: dict[str, int] = {}
        self.config = core.vllm_config
        self.tier = tier_of(core)
        self.chunks = PrefillChunks(core)

    def counts(self) -> tuple[int, int]:
        """Return how many requests run, and how many wait. Any thread."""
        running, waiting = self._scheduler.get_request_counts()
        return int(running), int(waiting)

    def requests(self) -> list[Any]:
        """Return vLLM's requests that are not finished. Any thread."""
        return list(self._scheduler.requests.values())

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no request holds, cached ones included. Any thread."""
        return int(self._pool.get_num_free_blocks())

    @property
    def usable_blocks(self) -> int:
        """Number of blocks that requests can hold. They are free when none runs. Any thread."""
        return max(0, int(self._pool.num_gpu_blocks) - 1)  # one is vLLM's null block

    @property
    def mid_step(self) -> bool:
        """Whether a scheduled step has not run yet. Between steps only pipelines have such."""
        return bool(self._core.batch_queue)

    def load(self, draining: bool) -> LoadReport:
        """Return the load. Takes time in proportion to the number of requests."""
        running, waiting = self.counts()
        # Frontends are told 20 times a second. To look up a long prompt takes 10 µs, so with a
        # thousand of them waiting this would be a fifth of the engine thread's time.
        before, self._hits = self._hits, {}
        queued = 0
        for request_id, request in self._scheduler.requests.items():
            if not (computed := request.num_computed_tokens):
                hit = before.get(request_id)
                computed = self._hits[request_id] = self.hit(request) if hit is None else hit
            # A request that generates has one more token to compute in each step.
            if (rest := request.num_tokens - computed) > 1:
                queued += rest
        return LoadReport(
            running=running,
            waiting=waiting,
            uncached_tokens_queued=queued,
            active_blocks=max(0, self.usable_blocks - self.free_blocks),
            free_blocks=self.free_blocks,
            draining=draining,
        )

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

    def seats(self, reserve: bool) -> Seats:
        """Return the seats of this engine. reserve: whether they count (`--reserve-seats`)."""
        return Seats(self._core if reserve else None)

    def tell_blocks(self, events: KvEvents, take: Callable[[list[Change]], None]) -> None:
        """Have `events` call `take` with the changes of each step. Before the first step."""
        events.attach(self._core, take)


def tier_of(core: Any) -> Tier | None:
    """Return vLLM's own KV offloading beside our connector. None: this EngineCore has none."""
    connectors = getattr(core.scheduler.connector, "sub_connectors", None)
    if connectors is None:
        return None
    _, tier = connectors  # as `args.beside` has told vLLM
    found: Tier = tier
    return found


_LAST = 1 << 30
# Prompts that wait and that a plan looks at. Beside 1,000 of them it must take no milliseconds.
_MOST = 128


class PrefillChunks:
    """Which prompts the next step of vLLM's scheduler computes, and how many tokens. Between steps.

    vLLM takes its running requests in the order of a list, then waiting ones. It reads two numbers
    when it schedules a step: the most tokens of one prompt (`--long-prefill-token-threshold`), and
    the most tokens of the step. All of that may change between steps.

    core: vLLM's EngineCore.
    able: whether prompts may be computed in chunks at all.
    step_tokens: most tokens in a step. each: of one stream, that is one and drafts."""

    def __init__(self, core: Any) -> None:
        scheduler = core.scheduler
        self._scheduler = scheduler
        self._config = scheduler.scheduler_config
        self._threshold = int(self._config.long_prefill_token_threshold)
        self.step_tokens = int(scheduler.max_num_scheduled_tokens)
        self.able = bool(self._config.enable_chunked_prefill)
        self.each = 1 + int(scheduler.num_spec_tokens)

    @property
    def idle(self) -> bool:
        """Whether vLLM has no prompt to compute, or one prompt and nothing else."""
        scheduler = self._scheduler
        waits = scheduler.waiting or scheduler.kv_holding_waiting
        prompts = waits or scheduler._inflight_prefills
        return not prompts or sum(scheduler.get_request_counts()) < 2

    def whole(self, request: Any) -> bool:
        """Whether vLLM may not cut this prompt anywhere. With a smaller limit than its part that
        stays whole, it would get no token, and those behind it neither."""
        return bool(request.mm_features) and self._config.disable_chunked_mm_input

    def streams(self) -> tuple[int, int]:
        """Return how many requests generate, and how many tokens are in their KV."""
        count = kv_tokens = 0
        for request in self._scheduler.running:
            if request.num_tokens - request.num_computed_tokens <= self.each:
                count += 1
                kv_tokens += request.num_computed_tokens
        return count, kv_tokens

    def prompts(self) -> list[Any]:
        """Return vLLM's requests whose prompts are not computed, those that run first.

        Of those that wait and have no block, the first _MOST."""
        scheduler = self._scheduler
        running = [
            request for request in scheduler.running
            if request.num_tokens - request.num_computed_tokens > self.each
        ]  # fmt: skip
        loading = requests.statuses().WAITING_FOR_REMOTE_KVS
        come = scheduler.finished_recving_kv_req_ids
        held = [
            request for request in scheduler.kv_holding_waiting
            if request.status != loading or request.request_id in come
        ]  # fmt: skip
        return [*running, *held, *islice(scheduler.waiting, _MOST)]

    def parts(self, output: Any) -> list[tuple[int, int]]:
        """Return two numbers for each request of a step: its tokens that were computed before, and
        those that the step computes. output: vLLM's SchedulerOutput."""
        tokens, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        new = [(one.num_computed_tokens, tokens[one.req_id]) for one in output.scheduled_new_reqs]
        run = zip(cached.num_computed_tokens, map(tokens.__getitem__, cached.req_ids), strict=True)
        return [*new, *run]

    def take(self, order: Mapping[str, int], each: int, total: int) -> None:
        """Let the next step compute streams, then prompts in this order.

        order: places of prompts.
        each: most tokens of one prompt. total: of the step."""
        self._scheduler.running.sort(
            key=lambda request: (
                order.get(request.request_id, _LAST)
                if request.num_tokens - request.num_computed_tokens > self.each
                else -1
            )
        )
        # With other policies vLLM's queue is a heap, in an order of its own.
        if self._config.policy == "fcfs":
            waiting = self._scheduler.waiting
            ordered = sorted(waiting, key=lambda request: order.get(request.request_id, _LAST))
            waiting.clear()
            waiting.extend(ordered)
        if self._threshold:
            each = min(each, self._threshold) if each else self._threshold
        self._config.long_prefill_token_threshold = each
        self._scheduler.max_num_scheduled_tokens = min(self.step_tokens, total)

    def leave_one(self) -> None:
        """From now on, give a single prompt at most all tokens of a step but one.

        While a step has tokens left, vLLM looks at prompts that wait."""
        self._threshold = min(self._threshold or self.step_tokens, self.step_tokens - 1)
        self.release()

    def release(self) -> None:
        """Set both numbers as they were at first."""
        self._scheduler.max_num_scheduled_tokens = self.step_tokens
        self._config.long_prefill_token_threshold = self._threshold


class Seats:
    """Keeps a seat in vLLM's scheduler for each request whose KV is on its way.

    vLLM counts only requests that run against `--max-num-seqs`. So more KV may arrive than requests
    can run, and it fills blocks while it waits. Here a request takes its seat when its KV is asked
    for:

        running + arriving <= --max-num-seqs

    Other requests wait without blocks, and without a job. No step ever waits for KV: requests that
    run go on, and those whose KV has arrived come before all that wait. What vLLM's KV offloading
    alone loads is not counted.

    core: vLLM's EngineCore. None: no seat is kept for anybody."""

    def __init__(self, core: Any = None) -> None:
        self._scheduler = core.scheduler if core is not None else None
        self._most = self._scheduler.max_num_active_reqs if self._scheduler is not None else 0
        self._taken: set[str] = set()

    def take(self, request_id: str) -> None:
        """Keep a seat for a request whose KV is on its way."""
        self._taken.add(request_id)
        self._tell()

    def leave(self, request_ids: Iterable[str]) -> None:
        """Keep no seats for these any more: they run next, or have ended. Harmless if repeated."""
        if not self._taken.isdisjoint(request_ids := list(request_ids)):
            self._taken.difference_update(request_ids)
            self._tell()

    def _tell(self) -> None:
        # vLLM reads its limit anew for each request that it admits, so a change counts at once.
        if self._scheduler is not None:
            self._scheduler.max_num_active_reqs = self._most - len(self._taken)
