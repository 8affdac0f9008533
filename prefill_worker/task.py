"""One granted attempt on this worker, from its grant until its commit is answered.

Shared by three threads: asyncio (owner, creates and ends it), engine (schedules blocks), transfer
worker (copies them). The task is the record of the attempt: the timings of its commit, its spans
and its place on the live page are read from it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pullfill.engine import features
from pullfill.engine.groups import BlockOrder
from pullfill.errors import BadMessage, HandoffError
from pullfill.ids import job_digest
from pullfill.transfer.contract import Direction
from pullfill.wire import (
    MAX_TEXT,
    Commit,
    FenceToken,
    Grant,
    Hello,
    PrefillJob,
    Ready,
    StageTimings,
    u32,
)  # fmt: skip


class TooLong(HandoffError):
    """This worker's context is shorter than the decode worker's."""


def check(
    job: PrefillJob, body: bytes, token_ids: list[int], grant: Grant, brought: str, hello: Hello, *,
    block_size: int, groups: int,
) -> None:  # fmt: skip
    """Check that the pulled job is the one that the decode worker granted, and that it fits here.

    A grant names no blocks. The block IDs of the job are used, because equal digests prove that the
    decode worker published them. Raises BadMessage or TooLong.

    body: the job as it was pulled.
    brought: digest of the multimodal inputs that came with the grant.
    hello: what decode workers are told of this worker.
    block_size: number of tokens of a block."""
    if job_digest(body) != grant.job_digest:
        raise BadMessage("the job differs from what the decode worker published")
    if job.compat != hello.compat:
        raise BadMessage("its compatibility hash is not this worker's")
    hit, positions = job.hit_tokens // block_size, -(-len(token_ids) // block_size)
    kept = BlockOrder(job.kept_from)
    blocks = BlockOrder(job.read_from).before(hit) + kept.before(positions) - kept.before(hit)
    if len(job.block_ids) != u32.SIZE * blocks or job.hit_tokens % block_size:
        raise BadMessage("the job's blocks do not match its tokens")
    if not len(job.read_from) == len(job.kept_from) == groups:
        raise BadMessage(
            f"the job lists blocks of {len(job.kept_from)} KV cache groups, and the model has "
            f"{groups} here"
        )
    if brought != job.features:
        raise BadMessage("the grant brings other multimodal inputs than the job names")
    if len(token_ids) > hello.max_prompt_tokens:
        raise TooLong(
            f"prompt of {len(token_ids)} tokens is longer than this prefill worker takes "
            f"({hello.max_prompt_tokens})"
        )


class PrefillTask:
    """See the module. A position counts blocks of the prompt.

    block_size: number of tokens of a block, here and at the decode worker.
    on_done: called once, from any thread. With None when all blocks are written (pull mode: kept),
    else with the failure.
    on_computed: called on the engine thread once its prompt is computed."""

    def __init__(
        self,
        job: PrefillJob,
        grant: Grant,
        token_ids: list[int],
        block_size: int,
        transfer_worker: Any,
        on_done: Callable[[BaseException | None], None],
        on_computed: Callable[[], object] = lambda: None,
    ) -> None:
        self.job, self.grant, self.token_ids = job, grant, token_ids
        self.job_id, self.attempt, self.mode = job.job_id, grant.attempt, grant.mode
        self.request_id = f"{job.job_id}.{grant.attempt}"
        self.block_size = block_size
        self.transfer_worker = transfer_worker
        self.on_done, self.on_computed = on_done, on_computed
        # The decode worker's blocks: first those that may be read, then those to write. And which
        # blocks of each KV cache group they are.
        self.remote_blocks = u32.unpack(job.block_ids)
        self.readable, self.written = BlockOrder(job.read_from), BlockOrder(job.kept_from)
        self.features: Sequence[Any] = ()  # vLLM's multimodal inputs of the prompt
        if grant.features:
            self.features = features.decode(grant.features, len(token_ids))
        # Before this position is the decode worker's hit. From it on blocks are written.
        self.first_target = job.hit_tokens // block_size
        self.positions = -(-len(token_ids) // block_size)
        # Engine thread. Times are monotonic.
        self.request: Any = None  # vLLM's
        # Positions before this one are computed, or will be after the steps planned so far.
        self.scheduled = self.first_target
        self.read_asked = self.freed_by_report = False
        self.started = time.monotonic()
        self.first_step = self.last_compute = 0.0
        # Any thread, under the lock.
        self.lock = threading.Lock()
        self.outstanding = 0  # copies that are planned, and whose callback was not called
        self.submitted = 0  # copies that are submitted, and whose callback has not returned
        self.cancelled = self.ended = False
        self.failure: BaseException | None = None  # what ended it, if it ended badly
        self.quiet = threading.Condition(self.lock)
        # Pull mode: our block for each target block. The decode worker may read them until
        # `TransferWorker.let_go`, which calls `on_let_go`.
        self.kept: dict[int, int] = {}
        self.on_let_go: list[Callable[[PrefillTask, BaseException | None], None]] = []
        # The thread that copies: the transfer worker's or, for a small copy, the engine's. Never
        # both at once.
        self.written_blocks = 0
        # Each read of the prefix and write of blocks that has ended: bytes, begin, end.
        self.moves: list[tuple[Direction, int, float, float]] = []

    def seconds(self, verb: Direction) -> float:
        """How long its reads, or its writes, have taken so far."""
        return sum(ended - began for did, _, began, ended in self.moves if did == verb)

    @property
    def targets(self) -> list[int]:
        """The decode worker's blocks to write."""
        return self.remote_blocks[self.readable.before(self.first_target) :]

    def source(self, order: BlockOrder, start: int, stop: int) -> list[int]:
        """The decode worker's blocks to read at the positions from `start` to before `stop`.

        order: which of the blocks that may be read."""
        if order == self.readable:
            return self.remote_blocks[order.before(start) : order.before(stop)]
        tables = self.readable.tables(self.remote_blocks, 0, self.first_target)
        return order.ids(tables, start, stop)

    def target(self, start: int, stop: int) -> list[int]:
        """The decode worker's blocks to write at the positions from `start` to before `stop`."""
        skipped = self.written.before(self.first_target) - self.readable.before(self.first_target)
        first, last = self.written.before(start) - skipped, self.written.before(stop) - skipped
        return self.remote_blocks[first:last]

    @property
    def kept_blocks(self) -> list[int]:
        """Ours, one for each target block, in the order of the prompt, once all are kept."""
        return [self.kept[block] for block in self.targets]

    @property
    def computed(self) -> float:
        """The share of its positions that is computed, or will be after the steps planned so far.

        0 to 1."""
        positions = self.positions - self.first_target
        return min(1.0, (self.scheduled - self.first_target) / max(1, positions))

    def computed_for(self, now: float) -> float | None:
        """Seconds since all is computed. None: it is not."""
        over = self.last_compute > 0 and self.scheduled >= self.positions
        return max(0.0, now - self.last_compute) if over else None

    def done(self, claim_ms: float, reads: FenceToken | None) -> Commit | Ready:
        """Return the message that the KV is complete. In pull mode it is kept for the decode
        worker to read. Else it is written.

        It tells what was measured until now. The link fills in `rid`.

        reads: the fence under which the decode worker reads kept blocks. None: not pull mode."""
        computed = self.last_compute or self.started
        timings = StageTimings(
            claim_ms=claim_ms,
            prefix_read_ms=self.seconds("read") * 1e3,
            prefill_ms=max(0.0, computed - (self.first_step or self.started)) * 1e3,
            kv_write_ms=self.seconds("write") * 1e3,
            tail_ms=max(0.0, time.monotonic() - computed) * 1e3,
        )
        about: dict[str, Any] = {
            "rid": 0, "job_id": self.job_id, "attempt": self.attempt,
            "incarnation": self.grant.incarnation, "timings": timings,
        }  # fmt: skip
        if reads is not None:
            return Ready(block_ids=u32.pack(self.kept_blocks), fence=reads, **about)
        return Commit(
            blocks=self.written_blocks,
            kv_bytes=sum(nbytes for verb, nbytes, *_ in self.moves if verb == "write"),
            transport=self.transfer_worker.transport[:MAX_TEXT],
            why_not_better=tuple(self.transfer_worker.why_not_better),
            **about,
        )

    def end(self, failure: BaseException | None) -> None:
        """End the task, and tell `on_done` of the failure. Only the first call does so. A later
        one with a failure cancels the copies that are still queued."""
        with self.lock:
            self.cancelled = self.cancelled or failure is not None
            if self.ended:
                return
            self.ended, self.failure = True, failure
        self.on_done(failure)

    def cancel(self) -> None:
        """Queued copies of this task become no-ops; a running batch ends by itself."""
        with self.lock:
            self.cancelled = True
