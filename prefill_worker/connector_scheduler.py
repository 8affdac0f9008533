"""The half of the prefill worker's KV connector that vLLM runs inside its scheduler.

Two steps of a request's life (docs/architecture.md) are here:

    read_prefix  read the blocks of the decode worker's hit that this engine lacks
    step_done    write the blocks that a step has computed

When a step is scheduled, `plan` finds the blocks that will be whole after it. Once the step has run
on every rank, `step_done` gives them to the transfer workers. Blocks of a prefix hit that only this
engine has are written too.

No block is reused while it is copied. A finished request keeps its blocks until its last write has
ended, also one that is only planned. `plan` waits for the copies from a preempted request's blocks,
because the step that it plans may overwrite them.

Engine thread only, except where a heading says otherwise.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from pullfill.engine.groups import EMPTY, BlockOrder, Tables
from pullfill.errors import HandoffError
from pullfill.prefill_worker.context import PrefillContext
from pullfill.prefill_worker.step_plan import StepPlan, Write
from pullfill.prefill_worker.task import PrefillTask
from pullfill.prefill_worker.turns import Turns
from pullfill.runtime import log

if TYPE_CHECKING:
    from pullfill.engine.tier import Tier

logger = log.get("prefill_worker.connector_scheduler")


class ConnectorScheduler:
    """Plans the reads and writes of one engine, and reports their ends to vLLM.

    _reads: prefix reads to begin after the step that is being scheduled.
    tier: vLLM's own KV offloading, beside our connector. None: there is none.
    """

    def __init__(self, context: PrefillContext) -> None:
        self._context = context
        self._manager: Any = None
        self._kept_from: Callable[[int], tuple[int, ...]] = lambda _tokens: (0,)
        self._by_position: Callable[[Tables], Tables] = lambda tables: tables
        self._turns = Turns(context.concurrency)
        self._reads_failed: list[PrefillTask] = []
        self._sends_done: deque[str] = deque()
        self._scheduled: deque[StepPlan] = deque()
        self._reads: list[Write] = []
        self.tier: Tier | None = None

    def bind_manager(self, manager: Any) -> None:
        """Set vLLM's KVCacheManager, which has the block tables."""
        self._manager = manager

    def bind_kept(
        self,
        kept_from: Callable[[int], tuple[int, ...]],
        by_position: Callable[[Tables], Tables] = lambda tables: tables,
    ) -> None:
        """Set the functions of `engine.groups.kept_from` and `by_position`."""
        self._kept_from, self._by_position = kept_from, by_position

    @property
    def has_work(self) -> bool:
        """Whether reports wait for a step."""
        return bool(self._reads_failed or self._sends_done) or self._turns.has_reads

    def take_in(self) -> tuple[set[str], set[str]]:
        """Return requests whose prefix was read, and finished ones whose blocks nobody reads.

        Called between steps, so that vLLM is told without a step. Failed reads wait for `plan`."""
        reads, sent = set[str](), set[str]()
        for reader, failure in self._turns.reads():
            if failure is None:
                reads.add(reader.request_id)
                continue
            self._reads_failed.append(reader)
            if not reader.cancelled:
                # The job goes on: the prefix is computed here.
                logger.warning(
                    "prefix read for job %s failed: %s", reader.job_id, failure,
                    extra=log.ids(job_id=reader.job_id, attempt=reader.attempt),
                )  # fmt: skip
        while self._sends_done:
            sent.add(self._sends_done.popleft())
        return reads, sent

    def matched(self, request: Any, hit_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens to read from the decode worker, and whether there are any.

        vLLM's `get_num_new_matched_tokens`.

        hit_tokens: length of this engine's own prefix hit."""
        task = self._context.tasks.get(request.request_id)
        if task is None or task.cancelled:
            return 0, False
        missing = 0 if task.read_asked else task.hit_tokens - hit_tokens
        offloaded: int | None = 0
        if self.tier is not None and missing > 0:
            offloaded = self.tier.hit(request, hit_tokens)
        if offloaded is None:
            return None, False  # the tier does not know yet: vLLM asks again
        if offloaded < missing and self._readable(task, hit_tokens):
            return missing, True
        # What the tier has, vLLM loads.
        return (0 if self._turns.free(task.request_id) else None), False

    def _readable(self, task: PrefillTask, hit_tokens: int) -> bool:
        """Whether the decode worker has all that this engine lacks of its hit.

        With a window it may have dropped blocks of its hit that are needed here."""
        first = hit_tokens // task.block_size
        needed = self._kept_from(task.hit_tokens)
        return all(
            there <= max(here, first)
            for here, there in zip(needed, task.readable.begins, strict=True)
        )

    def allocated(
        self, request: Any, tables: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """Read the missing prefix into the blocks that vLLM has allocated for the request.

        vLLM's `update_state_after_alloc`.

        tables: this engine's block ids of the request, for each KV cache group."""
        task = self._context.tasks.get(request.request_id)
        if task is None:
            return
        task.request = request
        if external_tokens and not task.read_asked:
            self.read_prefix(task, self._by_position(tables), external_tokens // task.block_size)
        else:
            self._turns.take(task.request_id)

    # ------------------------------------------------------------------ step 6: read_prefix

    def read_prefix(self, task: PrefillTask, tables: Sequence[Sequence[int]], missing: int) -> None:
        """Read the prefix blocks that the decode worker has and this engine lacks.

        If the read fails, the engine computes the prefix.

        tables: this engine's block ids of the request, for each KV cache group.
        missing: number of positions to read. They are the last ones of the decode worker's hit."""
        task.read_asked = True
        end = task.first_target
        start = end - missing
        order = BlockOrder(self._kept_from(task.hit_tokens))  # what this engine keeps of it
        local = order.ids(tables, start, end)
        read = Write(task, local, task.source(order, start, end), last=False)
        if not self._scheduled and self.tier is None:
            task.transfer_worker.read(task, read.remote, read.local, self._read_done)
            return
        # A step that still runs may write into these blocks, for a request that has ended since.
        with task.lock:
            task.outstanding += 1
        if self.tier is None:
            self._scheduled[-1].reads.append(read)
        else:
            # And the tier may copy from them until the step that is being scheduled.
            self.tier.claim(chain.from_iterable(tables))
            self._reads.append(read)

    # ------------------------------------------------------------------ step 7: step_done

    def plan(self, scheduler_output: Any) -> StepPlan:
        """Find what will be whole after the step that vLLM has just scheduled.

        Called once for each step. Waits for copies from preempted requests' blocks.

        scheduler_output: vLLM's SchedulerOutput of the step."""
        plan = StepPlan(reads=self._reads)
        self._reads = []
        for request_id in scheduler_output.preempted_req_ids or ():
            if (task := self._context.tasks.get(request_id)) is not None:
                self._preempted(task)
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            if (task := self._context.tasks.get(request_id)) is not None and not task.cancelled:
                self._plan_write(plan, task, count)
                plan.tokens += count
        if self.has_work:  # also what got a turn by this step
            plan.reports.read_ok, plan.reports.sent = self.take_in()
            failed, self._reads_failed = self._reads_failed, []
            plan.reports.read_failed.update(task.request_id for task in failed)
        self._scheduled.append(plan)
        return plan

    def _plan_write(self, plan: StepPlan, task: PrefillTask, scheduled_tokens: int) -> None:
        task.first_step = task.first_step or time.monotonic()
        computed = task.request.num_computed_tokens + scheduled_tokens
        whole = computed >= len(task.token_ids)
        if whole:
            self._turns.give_back(task.request_id)
        upto = task.positions if whole else computed // task.block_size
        start = task.scheduled
        if upto <= start:
            return
        tables = self._by_position(self._manager.get_block_ids(task.request_id))
        local = task.written.ids(tables, start, upto)
        if any(task.written.begins) and EMPTY in local:
            task.cancel()
            task.end(HandoffError("a sliding window has freed a block that is not written yet"))
            return
        task.scheduled = upto
        with task.lock:
            task.outstanding += 1  # vLLM may be done with the request before the write begins
        plan.writes.append(Write(task, local, task.target(start, upto), last=whole))

    def _preempted(self, task: PrefillTask) -> None:
        """Wait for copies from the blocks of a preempted task, and drop its planned writes."""
        self._turns.give_back(task.request_id)
        task.scheduled = task.first_target
        for plan in self._scheduled:
            for write in [w for w in plan.writes if w.task is task]:
                plan.writes.remove(write)
                self._let_go(task)
        if not task.transfer_worker.flush(task):
            task.cancel()
            task.end(HandoffError("a copy did not end in time for a preemption"))
        with task.lock:
            task.written_blocks = 0

    def step_done(self, running: int = 0) -> None:
        """Write the blocks of the steps that have run, and start the reads that waited for them.

        running: number of planned steps that have not run yet. They are the last ones."""
        now = time.monotonic()
        while len(self._scheduled) > running:
            plan = self._scheduled.popleft()
            self._context.meter.step(plan.tokens, plan.planned, now)
            for read in plan.reads:
                read.task.transfer_worker.read(read.task, read.remote, read.local, self._read_done)
                self._let_go(read.task)
            for write in plan.writes:
                task = write.task
                task.last_compute = now
                if write.last:
                    self._context.on_computed(task.job_id)
                task.transfer_worker.write(
                    task, write.local, write.remote, write.last, self._write_done
                )
                self._let_go(task)  # the transfer worker counts the write itself now

    def _let_go(self, task: PrefillTask) -> None:
        """Stop counting one planned copy."""
        with task.lock:
            task.outstanding -= 1
        self._write_done(task, None)

    def finished(self, request_id: str) -> bool:
        """Note that vLLM is done with the request.

        Returns True if vLLM must keep its blocks until `Reports.sent` names it."""
        self._turns.give_back(request_id)
        task = self._context.tasks.get(request_id)
        if task is None:
            return False
        with task.lock:
            busy = task.outstanding > 0
            # A pending prefix read is reported as a receive, which also frees the blocks.
            kept = busy and not (task.read_asked and task.first_step == 0.0)
            task.freed_by_report = kept
        if task.scheduled < task.positions:
            task.cancel()
            task.end(HandoffError("the engine ended the request early"))
        return (
            kept  # not the flag: the transfer worker may have made its report by now, and reset it
        )

    # ------------------------------------------------------------------ transfer worker threads

    def _read_done(self, task: PrefillTask, failure: BaseException | None) -> None:
        self._turns.read_ended(task, failure)
        self._context.wake()

    def _write_done(self, task: PrefillTask, failure: BaseException | None) -> None:
        with task.lock:
            report = task.freed_by_report and task.outstanding == 0
            if report:
                task.freed_by_report = False
        if report:
            # No wake-up for that: only a request that waits for blocks needs these soon, and the
            # engine looks around for it (engine/host.py). Else it hears of them in its next step.
            self._sends_done.append(task.request_id)
