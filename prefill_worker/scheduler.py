"""The half of the prefill worker's KV connector that vLLM runs inside its scheduler.

Two steps of a request's life (docs/architecture.md) are here:

    read_prefix  read the blocks of the decode worker's hit that this engine lacks
    step_done    write the blocks that a step has computed

`scheduled` finds the blocks that will be whole after the step that vLLM has scheduled. Once the
step has run on every rank, `step_done` gives them to the transfer workers.

Engine thread only, except where a heading says otherwise.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from pullfill.engine.groups import EMPTY, BlockOrder, Tables
from pullfill.engine.view import View
from pullfill.errors import HandoffError
from pullfill.prefill_worker.task import PrefillTask
from pullfill.prefill_worker.transfer_worker import Copy
from pullfill.rate import Rate
from pullfill.runtime import log
from pullfill.wire import Load, RouterConfig, RouterPolicy
from pullfill.worker.context import (
    ByPosition,
    KeptFrom,
    SchedulerHalf,
    StepReport,
)
from pullfill.worker.step_meter import StepMeter, StepModel

if TYPE_CHECKING:
    from pullfill.engine.tier import Tier

logger = log.get("prefill_worker.scheduler")

# A prefill worker reads no router settings. Each job tells its target for the first token, and a
# plan delays no stream. So it plans whatever decode workers decide by.
_PLANS = RouterConfig(policy=RouterPolicy.COST)


@dataclass(slots=True)
class StepPlan:
    """What to do when one step has run.

    copies: prefix reads that had to wait for it, and writes of the blocks that it computes.
    tokens: number of tokens that it computes.
    planned: when it was scheduled."""

    copies: list[Copy] = field(default_factory=list)
    tokens: int = 0
    planned: float = field(default_factory=time.monotonic, compare=False)


class PrefillScheduler(SchedulerHalf):
    """Plans the reads and writes of one engine, and reports their ends to vLLM.

    wake: wakes the engine loop.
    concurrency: prompts that the engine computes in one step, at most. 0: any number.
    plans: whether this side plans the engine's steps."""

    def __init__(
        self, wake: Callable[[], None], concurrency: int = 0, *, plans: bool = True
    ) -> None:
        self.concurrency = concurrency
        self._plans = plans
        # By request id. The asyncio thread writes an entry before it submits the request.
        self.tasks: dict[str, PrefillTask] = {}
        self.meter = Meter()
        self._wake = wake
        self._turns = Turns(concurrency)
        self._reads_failed: list[PrefillTask] = []
        self._sends_done: deque[str] = deque()
        self._scheduled: deque[StepPlan] = deque()
        # Prefix reads to begin after the step that is being scheduled.
        self._reads: list[Copy] = []
        self._manager: Any
        self._kept_from: Callable[[int], tuple[int, ...]]
        self._by_position: Callable[[Tables], Tables]
        # vLLM's own KV offloading, beside our connector, once the engine is built.
        self.tier: Tier | None = None

    def bind(
        self,
        manager: Any,
        kept_from: KeptFrom = lambda _tokens: (0,),
        by_position: ByPosition = lambda tables: tables,
    ) -> None:
        self._manager, self._kept_from, self._by_position = manager, kept_from, by_position

    def built(self, view: View) -> None:
        self.tier = view.tier
        if self.concurrency and view.chunks.able:
            view.chunks.leave_one()
        if self._plans:
            self.step_meter = StepMeter(view, StepModel(), lambda: _PLANS, self._turns.free)

    def owns(self, request_id: str) -> bool:
        # The task is there before vLLM gets the request, and stays until vLLM has dropped it.
        return request_id in self.tasks

    @property
    def has_work(self) -> bool:
        """Whether reports wait for a step."""
        return bool(self._reads_failed or self._sends_done) or self._turns.has_reads

    def before_step(self) -> StepReport:
        """Report requests whose prefix was read, and finished ones whose blocks nobody reads.

        vLLM is told between steps, so without a step. Failed reads wait for `scheduled`."""
        report = StepReport()
        for reader, failure in self._turns.reads():
            if failure is None:
                report.loaded.add(reader.request_id)
                continue
            self._reads_failed.append(reader)
            if not reader.cancelled:
                # The job goes on: the prefix is computed here.
                logger.warning(
                    "prefix read for job %s failed: %s", reader.job_id, failure,
                    extra=log.ids(job_id=reader.job_id, attempt=reader.attempt),
                )  # fmt: skip
        while self._sends_done:
            report.sent.add(self._sends_done.popleft())
        return report

    def matched(self, request: Any, hit_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens to read from the decode worker, and whether there are any.

        vLLM's `get_num_new_matched_tokens`.

        hit_tokens: length of this engine's own prefix hit."""
        task = self.tasks.get(request.request_id)
        if task is None or task.cancelled:
            return 0, False
        missing = 0 if task.read_asked else task.job.hit_tokens - hit_tokens
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
        needed = self._kept_from(task.job.hit_tokens)
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
        task = self.tasks.get(request.request_id)
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
        order = BlockOrder(self._kept_from(task.job.hit_tokens))  # what this engine keeps of it
        local = order.ids(tables, start, end)
        read = Copy(task, "read", local, task.source(order, start, end), self._read_done)
        with task.lock:
            task.outstanding += 1
        if not self._scheduled and self.tier is None:
            task.transfer_worker.copy(read)
        elif self.tier is None:
            # A step that still runs may write into these blocks, of a request that has ended since.
            self._scheduled[-1].copies.append(read)
        else:
            # And the tier may copy from them until the step that is being scheduled.
            self.tier.claim(chain.from_iterable(tables))
            self._reads.append(read)

    # ------------------------------------------------------------------ step 7: step_done

    def scheduled(self, output: Any) -> StepReport:
        """Find what will be whole after the step that vLLM has just scheduled.

        Called once for each step. Waits for copies from preempted requests' blocks.

        output: vLLM's SchedulerOutput of the step."""
        if self.step_meter is not None:
            self.step_meter.scheduled(output)
        plan = StepPlan(self._reads)
        self._reads = []
        for request_id in output.preempted_req_ids or ():
            if (task := self.tasks.get(request_id)) is not None:
                self._preempted(task)
        for request_id, count in output.num_scheduled_tokens.items():
            if (task := self.tasks.get(request_id)) is not None and not task.cancelled:
                self._plan_write(plan, task, count)
                plan.tokens += count
        self._scheduled.append(plan)
        report = self.before_step()  # also what got a turn by this step
        failed, self._reads_failed = self._reads_failed, []
        report.failed.update(task.request_id for task in failed)
        return report

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
            task.end(HandoffError("a sliding window has freed a block that is not written yet"))
            return
        task.scheduled = upto
        with task.lock:
            task.outstanding += 1  # vLLM may be done with the request before the write begins
        target = task.target(start, upto)
        plan.copies.append(Copy(task, "write", local, target, self._write_done, last=whole))

    def _preempted(self, task: PrefillTask) -> None:
        """Wait for copies from the blocks of a preempted task, and drop its planned writes."""
        self._turns.give_back(task.request_id)
        task.scheduled = task.first_target
        for plan in self._scheduled:
            for write in [copy for copy in plan.copies if copy.task is task]:
                plan.copies.remove(write)
                self._write_done(task, None)
        if not task.transfer_worker.flush(task):
            task.end(HandoffError("a copy did not end in time for a preemption"))
        with task.lock:
            task.written_blocks = 0

    def load(self) -> Load:
        """Return the load to report to decode workers. Any thread."""
        tasks, planned = list(self.tasks.values()), list(self._scheduled)
        return self.meter.load(tasks, planned, time.monotonic())

    def step_done(self, running: int = 0) -> None:
        """Write the blocks of the steps that have run, and start the reads that waited for them.

        running: number of planned steps that have not run yet. They are the last ones."""
        if self.step_meter is not None:
            self.step_meter.after_step(running)
        now = time.monotonic()
        while len(self._scheduled) > running:
            plan = self._scheduled.popleft()
            self.meter.step(plan.tokens, plan.planned, now)
            # Reads first: a prompt cannot begin without its prefix.
            for copy in sorted(plan.copies, key=lambda copy: copy.verb == "write"):
                task = copy.task
                if copy.verb == "write":
                    task.last_compute = now
                if copy.last:
                    task.on_computed()
                task.transfer_worker.copy(copy)

    def finished(self, request: Any, tables: Any = ()) -> bool:
        """Note that vLLM is done with the request.

        Returns True if vLLM must keep its blocks until `StepReport.sent` names it."""
        self._turns.give_back(request.request_id)
        task = self.tasks.get(request.request_id)
        if task is None:
            return False
        with task.lock:
            # A pending prefix read is reported as a receive, which also frees the blocks.
            reading = task.read_asked and task.first_step == 0.0
            task.freed_by_report = task.outstanding > 0 and not reading
        if task.scheduled < task.positions:
            task.end(HandoffError("the engine ended the request early"))
        return task.freed_by_report

    # ------------------------------------------------------------------ any thread

    def _read_done(self, task: PrefillTask, failure: BaseException | None) -> None:
        self._write_done(task, failure)
        self._turns.read_ended(task, failure)
        self._wake()

    def _write_done(self, task: PrefillTask, failure: BaseException | None) -> None:
        with task.lock:
            task.outstanding -= 1
            report = task.freed_by_report and task.outstanding == 0
        if report:
            # No wake-up for that: only a request that waits for blocks needs these soon, and the
            # engine looks around for it (engine/host.py). Else it hears of them in its next step.
            self._sends_done.append(task.request_id)


# --------------------------------------------------------------------------- turns, and the rate

Read = tuple[PrefillTask, BaseException | None]
"""A prefix read that has ended: its task, and why it failed."""


class Turns:
    """Which prompts the engine computes, if a step may compute only so many (`--concurrency`).

    A prompt takes a turn when vLLM begins to compute it. It gives the turn back when its last chunk
    is scheduled, so the next prompt begins in the step after that. A prompt without a turn waits:

    - The decode worker has a prefix that this engine lacks: the prefix is read meanwhile. vLLM is
      told of the read's end once there is a turn, because it computes the prompt in the next step.
    - Otherwise vLLM is answered that its hit is not known yet. It asks again in the next step.

    Each read that has ended is handed out once, by `reads`.

    most: prompts that have a turn at once, at most. 0: any number."""

    # vLLM's own limits (`--max-num-seqs`, `--max-num-active-seqs`) would not do: at the limit vLLM
    # looks at no waiting request, so it does not let a prefix be read either. Nor does it once a
    # step is full. So a prompt that others wait for leaves one token of each step
    # (`PrefillChunks.leave_one`). What vLLM's KV offloading loads takes its turn before the load.

    def __init__(self, most: int = 0) -> None:
        self._most = most
        self._taken: set[str] = set()
        self._ended: list[Read] = []  # those that vLLM was not told of. Any thread adds to it

    def free(self, request_id: str) -> bool:
        """Whether the request has a turn, or could take one."""
        taken = self._taken
        return not self._most or request_id in taken or len(taken) < self._most

    def take(self, request_id: str) -> None:
        """Note that the engine computes the request's prompt."""
        if self._most:
            self._taken.add(request_id)

    def give_back(self, request_id: str) -> None:
        """Note that no later step computes the prompt. Harmless if repeated."""
        self._taken.discard(request_id)

    # ------------------------------------------------------------------ prefix reads

    def read_ended(self, task: PrefillTask, failure: BaseException | None) -> None:
        """Note that the task's prefix was read, or could not be. From any thread."""
        self._ended.append((task, failure))

    @property
    def has_reads(self) -> bool:
        """Whether `reads` returns something."""
        return any(self._passes(task) for task, _ in list(self._ended))

    def reads(self) -> list[Read]:
        """Return the reads that vLLM can be told of now. Their prompts take their turns."""
        told: list[Read] = []
        for read in list(self._ended):
            if self._passes(task := read[0]):
                self._ended.remove(read)
                told.append(read)
                if not task.cancelled:
                    self.take(task.request_id)
        return told

    def _passes(self, task: PrefillTask) -> bool:
        # vLLM has aborted a cancelled one, or is about to. It frees the blocks after the report.
        return task.cancelled or self.free(task.request_id)


# Steps are measured together until they have computed so many tokens.
_MEASURED_TOKENS = 256


class Meter:
    """Measures how many prompt tokens this worker computes in a second of work.

    Call `step` on the engine thread. Any thread may call `load`."""

    def __init__(self) -> None:
        self._rate = Rate()
        self._tokens = self._seconds = self._worked_s = 0.0
        self._until = 0.0

    def step(self, tokens: int, planned: float, done: float) -> None:
        """Note that a step computed `tokens` tokens.

        planned, done: when the step was scheduled, and when it had run. Steps that are in flight at
        the same time share that time."""
        seconds = done - max(planned, self._until)
        self._until = done
        if not tokens or seconds <= 0:
            return
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds
        # A few short steps must not outweigh the long ones before them.
        if self._tokens >= _MEASURED_TOKENS or not self._rate.count:
            # By the time of work, so that a pause does not count.
            self._worked_s += self._seconds
            self._rate.observe(self._tokens, 0.0, self._seconds, self._worked_s)
            self._tokens = self._seconds = 0.0

    def load(self, tasks: Iterable[PrefillTask], steps: Sequence[StepPlan], now: float) -> Load:
        """Return the load to report to decode workers.

        tasks: all tasks under way. steps: those that have not ended, the oldest first."""
        each_s = self._rate.a
        rate = min(1.0 / each_s, 1e12) if each_s else 0.0
        # A step may compute a whole prompt. What it has done so far is told by its time.
        ran = rate * (now - max(steps[0].planned, self._until)) if steps else 0.0
        done = min(ran, steps[0].tokens if steps else 0) - sum(step.tokens for step in steps)
        done += sum((t.scheduled - t.first_target) * t.block_size for t in tasks if not t.ended)
        return Load(tokens_per_s=rate, done_tokens=max(0, round(done)))
