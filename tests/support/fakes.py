"""Stand-ins for the clock and for the parts of vLLM that our scheduler halves touch.

Each fake keeps the rule that matters and checks it: `FakePool` counts references like vLLM's
BlockPool and refuses what vLLM would corrupt itself with (a double free, touching a null block).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

from pullfill.decode_worker.meter import DecodeMeter
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.decode_worker.rules import Situation
from pullfill.prefill_worker.task import PrefillTask
from pullfill.prefill_worker.transfer_worker import Copy
from pullfill.wire import FenceToken, Grant, KvMode, PrefillJob, RouterConfig, u32
from tests.support.said import blank


class FakeClock:
    """A `Clock` that moves only when told."""

    def __init__(self, start: float = 1_000.0) -> None:
        self.now = start

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


@dataclass(slots=True)
class FakeBlock:
    block_id: int
    ref_cnt: int = 0


class FakePool:
    """vLLM's BlockPool as far as references go: a block is free while nobody refers to it.

    cached: the block of each hash and KV cache group that is cached.
    hash_block_size: number of tokens of one hash."""

    def __init__(self, num_blocks: int, hash_block_size: int = 4) -> None:
        self.hash_block_size = hash_block_size
        self.blocks = [FakeBlock(i) for i in range(num_blocks)]
        self.cached: dict[tuple[str, int], int] = {}

    @property
    def free(self) -> set[int]:
        return {b.block_id for b in self.blocks if b.ref_cnt == 0}

    def allocate(self, count: int) -> list[int]:
        """Lowest free blocks first, so that a block freed too early is reused at once."""
        ids = sorted(self.free)[:count]
        assert len(ids) == count, "the pool is full"
        self.touch([self.blocks[i] for i in ids])
        return ids

    def touch(self, blocks: Sequence[FakeBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[FakeBlock]) -> None:
        for block in ordered_blocks:
            assert block.ref_cnt > 0, f"block {block.block_id} freed twice"
            block.ref_cnt -= 1

    def get_cached_block(self, block_hash: str, groups: Sequence[int]) -> list[FakeBlock] | None:
        found = [self.cached.get((block_hash, group)) for group in groups]
        return None if None in found else [self.blocks[at] for at in found if at is not None]

    def refs(self, block_id: int) -> int:
        return self.blocks[block_id].ref_cnt

    def release(self, ids: Iterable[int]) -> None:
        """What a request's end does."""
        self.free_blocks([self.blocks[i] for i in ids])


@dataclass(slots=True, eq=False)
class FakeRequest:
    """The attributes of vLLM's Request that the scheduler halves read."""

    request_id: str
    prompt_token_ids: list[int] | None
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    lora_request: Any = None
    pooling_params: Any = None
    cache_salt: str | None = None
    prefill_stats: Any = None
    priority: int = 0
    client_index: int = 0
    arrival_time: float = field(default_factory=time.time)
    sampling_params: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    block_hashes: list[str] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or [])

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


def situation(
    request: Any, hit_tokens: int, config: RouterConfig, traces: RequestTraces, **fields: Any
) -> Situation:
    """What a decode worker with one prefill worker and an empty queue knows."""
    told: dict[str, Any] = {"prefill_workers": 1, "queue_available": True}
    told["config"] = config
    told["fell_back"] = traces.fallback_of(request.request_id) is not None
    return Situation(request.num_prompt_tokens, hit_tokens, **(told | fields))


class FakeChunks:
    """A PrefillChunks of 1024 tokens that notes what it is told. waiting: vLLM's requests."""

    step_tokens, able, each = 1024, True, 13

    def __init__(self, streams: int = 2) -> None:
        self.count = streams
        self.told: list[Any] = []
        self.waiting: list[Any] = []

    @property
    def idle(self) -> bool:
        return not self.waiting

    def streams(self) -> tuple[int, int]:
        return self.count, 1000 * self.count

    def prompts(self) -> list[Any]:
        return self.waiting

    def parts(self, output: Any) -> list[tuple[int, int]]:
        return [(0, count) for count in output.num_scheduled_tokens.values()]

    def take(self, order: dict[str, int], each: int, total: int) -> None:
        self.told.append((order, each, total))

    def whole(self, request: Any) -> bool:
        return bool(request.mm_features)

    def release(self) -> None:
        self.told.append("release")


def unmeasured() -> Any:
    """A DecodeMeter that measures no step and predicts nothing."""
    meter = create_autospec(DecodeMeter, instance=True)
    meter.predict.return_value = None
    return meter


def step(
    scheduled: dict[str, int] | None = None, preempted: Iterable[str] | None = None
) -> SimpleNamespace:
    """The part of a SchedulerOutput that connectors read."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled or {}, preempted_req_ids=set(preempted or ())
    )


class FakeManager:
    """vLLM's KVCacheManager: block tables only.

    tables: of the first KV cache group.
    windows: of the second, if there is one."""

    def __init__(self) -> None:
        self.tables: dict[str, list[int]] = {}
        self.windows: dict[str, list[int]] = {}

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        tables = (self.tables[request_id],)
        return (*tables, self.windows[request_id]) if request_id in self.windows else tables


class FakeTransferWorker:
    """A `TransferWorker` whose copies wait until `finish`. `log` lists what was done, in order."""

    transport = "fake"

    def __init__(self) -> None:
        self.queue: list[Copy] = []
        self.log: list[tuple[str, Sequence[int], Sequence[int]]] = []

    def copy(self, copy: Copy) -> None:
        self.queue.append(copy)

    def flush(self, task: Any = None) -> bool:
        """None: everything."""
        while any(task is None or copy.task is task for copy in self.queue):
            self.finish()
        return True

    def finish(self, failure: BaseException | None = None) -> Copy:
        """End the oldest copy as the real transfer worker does. failure: of a read."""
        copy = self.queue.pop(0)
        self.log.append((copy.verb, copy.local, copy.remote))
        if copy.verb == "write":
            copy.task.written_blocks += len(copy.remote)
        copy.done(copy.task, failure)
        if copy.last:
            copy.task.end(None)
        return copy


class FakeTier:
    """vLLM's own KV offloading. Has `found` tokens beyond every prefix hit."""

    def __init__(self, found: int | None) -> None:
        self.found = found
        self.loads: list[tuple[str, int]] = []
        self.claimed: set[int] = set()

    def hit(self, request: Any, hit_tokens: int) -> int | None:
        return self.found

    def load(self, request: Any, tokens: int) -> None:
        self.loads.append((request.request_id, tokens))

    def claim(self, block_ids: Iterable[int]) -> None:
        self.claimed.update(block_ids)


NO_FENCE = FenceToken(slot=0, epoch=0)


def prefill_task(
    transfer_worker: Any,
    on_done: Callable[[BaseException | None], None] = lambda _: None,
    *,
    job_id: str = "j",
    tokens: Sequence[int] = range(12),
    block: int = 4,
    hit: int = 0,
    blocks: Sequence[int] | None = None,
    fence: FenceToken = NO_FENCE,
    mode: KvMode = KvMode.PUSH_ASYNC,
    on_computed: Callable[[], object] = lambda: None,
) -> PrefillTask:
    """A task that was granted. blocks: the decode worker's. None: 0, 1, ..."""
    if blocks is None:
        blocks = range(-(-len(tokens) // block))
    job = blank(
        PrefillJob, job_id=job_id, incarnation="i", decode_instance="d", request_id="r",
        token_ids=u32.pack(tokens), hit_tokens=hit, block_ids=u32.pack(blocks), timeout_s=60.0,
    )  # fmt: skip
    grant = blank(Grant, job_id=job_id, attempt=1, incarnation="i", fence=fence, mode=mode)
    return PrefillTask(job, grant, list(tokens), block, transfer_worker, on_done, on_computed)
