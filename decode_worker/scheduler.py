"""The half of the decode worker's KV connector that vLLM runs inside its scheduler.

    decide   whether a prefill worker computes the rest of a prompt
    enqueue  open the job of such a prompt, and have it published (handoff.py)
    finish   tell vLLM how remote prefills have ended

vLLM calls the connector (worker/connector.py), that calls `DecodeHalf`, and that calls
`DecodeScheduler`, all on the engine thread. Nothing blocks or does I/O. Each request that waits for
remote KV is reported to vLLM exactly once. `request` and `pool` are vLLM's Request and BlockPool.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pullfill.decode_worker.forecast import timeouts
from pullfill.decode_worker.handoff import OpenedJob
from pullfill.decode_worker.ledger import Entry, Hold, Ledger, Release, Settle
from pullfill.decode_worker.prefix.fetches import FetchOutcome
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.decode_worker.rules import (
    ENOUGH,
    PREFIX_HIT,
    Decision,
    Situation,
    decide,
)
from pullfill.engine import groups, request_limits, speculation
from pullfill.engine.groups import BlockOrder, Tables, cached_block
from pullfill.engine.requests import count_as_computed
from pullfill.engine.view import Seats, View
from pullfill.errors import Outcome
from pullfill.ids import new_job_id
from pullfill.queue.contract import urgency_of
from pullfill.runtime import failpoints
from pullfill.wire import MAX_TEXT, PrefillJob, u32
from pullfill.worker.context import (
    LATER,
    ByPosition,
    KeptFrom,
    SchedulerHalf,
    StepReport,
)

if TYPE_CHECKING:
    from pullfill.decode_worker.meter import DecodeMeter
    from pullfill.decode_worker.prefix.fetches import PrefixFetches
    from pullfill.decode_worker.self_check import Trials
    from pullfill.engine.tier import Tier


@dataclass(eq=False, repr=False)
class JobBlocks:
    """Which of vLLM's blocks jobs read and write, and who keeps them meanwhile. Engine thread.

    pool: vLLM's BlockPool. Blocks in quarantine are held by its reference counts.
    kept_from: as `engine.groups.kept_from` returns it.
    local_tokens: see `Situation`.
    never: why this engine exchanges no KV with others. Empty: it does.
    _read: blocks that a job may read and its request does not hold, by request.
    _held: blocks that are held for each job whose writer is not proved quiet."""

    block_size: int
    pool: Any
    kept_from: KeptFrom = lambda _tokens: (0,)
    local_tokens: int = 1
    never: str = ""
    _read: dict[str, list[Any]] = field(init=False, default_factory=dict)
    _held: dict[str, list[Any]] = field(init=False, default_factory=dict)

    def longest_kept(self, tokens: int) -> int:
        """Return the longest prompt, of `tokens` at most, of which vLLM keeps every block.

        In tokens, rounded down to whole blocks."""
        lengths = range(tokens, 0, -self.block_size)
        return next((length for length in lengths if not any(self.kept_from(length))), 0)

    def targets(self, prompt_tokens: int, hit_tokens: int) -> int:
        """Return how many blocks a prefill worker would write, over all KV cache groups.

        hit_tokens: length of the prefix hit on this worker."""
        tokens = max(0, prompt_tokens - self.local_tokens)
        kept = BlockOrder(self.kept_from(tokens))
        end, hit = -(-tokens // self.block_size), hit_tokens // self.block_size
        return max(0, kept.before(end) - kept.before(hit))

    def read(
        self, request: Any, tables: Sequence[Sequence[int]], hit_tokens: int, kept: Sequence[int]
    ) -> tuple[tuple[int, ...], list[int]]:
        """Return from which positions on the hit may be read, and its blocks from there on.

        tables: the block ids of the request, for each KV cache group.
        kept: for each group, the first position that vLLM has kept for the request."""
        # A prefill worker computes from the end of the hit on. Through a sliding window its first
        # tokens see the last blocks of the hit. vLLM has not kept all of these for the request,
        # whose own window begins later, at the end of the prompt. But they may still be cached.
        # Then the job holds them until it ends.
        #
        #     window of 2 blocks    position     0  1  2  3  4  5
        #                           the hit      x  x  x
        #                           vLLM keeps               x  x
        #                           held            x  x
        hit = hit_tokens // self.block_size
        own, read_from = tuple(map(list, tables)), []
        for group, needed in enumerate(self.kept_from(hit_tokens)):
            first = min(kept[group], hit)
            found = self._cached_before(first, request, group, needed)
            if first - len(found) > needed:
                found = []  # a prefill worker that lacks a part of its window reads nothing
            for block in found:
                first -= 1
                own[group][first] = block.block_id
            if found:
                self.pool.touch(found)
                self._read.setdefault(request.request_id, []).extend(found)
            read_from.append(first)
        return tuple(read_from), BlockOrder(tuple(read_from)).ids(own, 0, hit)

    def read_no_more(self, request_id: str) -> None:
        """Hold no blocks for a job's reads any more: it has ended."""
        if held := self._read.pop(request_id, None):
            self.pool.free_blocks(held)

    def hold(self, job_id: str, blocks: Iterable[int]) -> None:
        """Keep these blocks for a job whose writer is not proved quiet."""
        self._held[job_id] = held = [self.pool.blocks[b] for b in blocks]
        self.pool.touch(held)

    def release(self, job_id: str) -> None:
        """Keep them no more."""
        # The tail first: it is the least useful as a cached prefix.
        self.pool.free_blocks(reversed(self._held.pop(job_id)))

    def _cached_before(self, position: int, request: Any, group: int, needed: int) -> list[Any]:
        """Return the cached blocks before a position, the last one first.

        needed: the first position that a prefill worker needs."""
        found: list[Any] = []
        for at in range(position - 1, needed - 1, -1):
            block = cached_block(self.pool, self.block_size, request, at, group)
            if block is None:
                break
            found.append(block)
        return found


@dataclass(eq=False, repr=False)
class DecodeScheduler:
    """Decides, opens jobs and reports their ends, for one engine."""

    blocks: JobBlocks
    ledger: Ledger
    # Takes a request and its hit, and returns everything that a rule may look at.
    situation: Callable[[Any, int], Situation]
    publish: Callable[[OpenedJob], None]  # `Handoff.publish`
    traces: RequestTraces
    meter: DecodeMeter  # measures steps, and predicts what they cost
    # What each job tells of this worker.
    instance_id: str
    compat_hash: str
    # Called when a prompt stays local because of the queue's depth. Must not block.
    queue_full: Callable[[], None] = lambda: None
    # Fetches prefixes from other decode workers. None: nothing can be fetched.
    fetching: PrefixFetches | None = None
    # vLLM's own KV offloading, beside our connector. None: there is none.
    tier: Tier | None = None
    seats: Seats = field(default_factory=Seats)  # of the requests whose KV is on its way
    # The self-check's requests. None: nothing can be compared.
    trials: Trials | None = None
    # Whether a frontend has sent a request, and gets its record. Else the record stays here.
    of_frontend: Callable[[str], bool] = lambda _: True
    # The last decision about each request that has no blocks yet.
    _decisions: dict[str, tuple[Situation, Decision, int, int]] = field(
        init=False, default_factory=dict
    )
    # The job of each request that waits for remote KV.
    _waiting: dict[str, str] = field(init=False, default_factory=dict)
    # Requests to report as failed at the next `collect`.
    _failed: list[str] = field(init=False, default_factory=list)
    # Jobs to publish after the step that is being scheduled, and after each step that still runs.
    # `enqueue` says why.
    _unpublished: list[OpenedJob] = field(init=False, default_factory=list)
    _scheduled: deque[list[OpenedJob]] = field(init=False, default_factory=deque)
    # For each request whose hit is still loaded from the tier: its job, or how the job has ended
    # meanwhile. _late: ends of jobs that had to wait for such a load.
    _loading: dict[str, OpenedJob | Settle] = field(init=False, default_factory=dict)
    _late: list[Settle] = field(init=False, default_factory=list)

    @property
    def has_work(self) -> bool:
        """Whether there is something to tell vLLM. Then the engine must take a step."""
        return bool(self._failed or self._late) or self.has_events

    @property
    def has_events(self) -> bool:
        """Whether remote prefills or fetches have ended."""
        fetched = self.fetching is not None and self.fetching.has_events
        return fetched or self.ledger.has_events

    # ------------------------------------------------------------------ step 3: decide

    def decide(self, request: Any, hit_tokens: int) -> tuple[int | None, bool]:
        """Decide whether a prefill worker computes the rest of this prompt.

        vLLM's `get_num_new_matched_tokens`. Returns the number of tokens that a prefill worker will
        bring, and True if there are any. Tokens that are loaded from the tier before that count as
        brought. vLLM may ask many times about one request. Only `enqueue` makes a decision count.

        hit_tokens: length of the prefix hit on this worker, without the tier's."""
        first = request.prompt_token_ids[0] if request.prompt_token_ids else 0
        failpoints.hit(f"decode.prompt.{first}")
        offloaded = self.tier.hit(request, hit_tokens) if self.tier is not None else 0
        if offloaded is None:
            return None, False  # it is looked up or stored at this moment: vLLM asks again
        fetched = 0
        # While a step still runs, it may write into blocks that vLLM would allocate now. And the
        # tier may copy from them.
        if self.fetching is not None and self.tier is None and not self._scheduled:
            looked = self.fetching.look(request, hit_tokens)
            if looked is None:
                return None, False
            fetched = looked
        situation = self.situation(request, hit_tokens + offloaded + fetched)
        own = self.trials and self.trials.decision(request.request_id)
        if own:
            situation = replace(situation, costs=None)  # a prompt of the self-check teaches nothing
        decision = own or decide(request, situation)
        if fetched:
            decision = Decision(False, PREFIX_HIT)
        self._decisions[request.request_id] = (situation, decision, offloaded, fetched)
        if decision.reason in ENOUGH:
            self.queue_full()
        if fetched:
            return fetched, True
        # If the answer is 0, vLLM asks the tier.
        return (offloaded + situation.remote_tokens, True) if decision.remote else (0, False)

    # ------------------------------------------------------------------ step 4: enqueue

    def enqueue(self, request: Any, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        """Open the job of a remote prompt, and publish it.

        vLLM's `update_state_after_alloc`: the request has its blocks.

        tables: the block ids of the request, for each KV cache group.
        external_tokens: number of tokens that the tier and a prefill worker will bring. 0 if the
        prompt is computed here."""
        made = self._decisions.pop(request.request_id, None)
        if made is None:
            return  # vLLM calls again after the load
        situation, decision, offloaded, fetched = made
        if decision.remote and not external_tokens:
            decision, offloaded = Decision(False, "engine_declined"), 0
        if external_tokens:
            self.seats.take(request.request_id)
        if external_tokens > offloaded:
            count_as_computed(request, external_tokens - offloaded)
        self.meter.admitted(request.request_id, situation, decision)
        if not (self.trials and self.trials.decision(request.request_id)):
            self.traces.decided(
                request.request_id, situation, decision, offloaded=offloaded, fetched=fetched,
                headers=request.trace_headers,
            )  # fmt: skip
        if fetched and self.fetching is not None:
            hit = (situation.hit_tokens - fetched) // self.blocks.block_size
            blocks = tables[0][hit : hit + external_tokens // self.blocks.block_size]
            self.fetching.begin(request.request_id, hit * self.blocks.block_size, blocks)
            return
        if self.fetching is not None:
            self.fetching.explain(request.request_id)
        if not external_tokens:
            return
        later = bool(situation.hit_tokens or self._scheduled or self.tier is not None)
        external = external_tokens - offloaded
        job = self._open(request, tables, situation, external, decision.to)
        failpoints.hit("decode.before_publish")
        if self.tier is not None and offloaded:
            self.tier.load(request, offloaded)
            self._loading[request.request_id] = job
            return
        if later:
            # vLLM puts a block into its prefix cache when it schedules the block's tokens, so the
            # hit may be computed in the very step that is being scheduled: until that step has
            # run, a prefill worker would read garbage there. Until then a step that still runs may
            # write one more token of an ended request into our block, and the tier may read there.
            self._unpublished.append(job)
        else:
            self.publish(job)

    def _open(
        self,
        request: Any,
        tables: Sequence[Sequence[int]],
        situation: Situation,
        external_tokens: int,
        to: str,
    ) -> OpenedJob:
        """Open the job in the ledger. From now on its request waits."""
        hit_tokens = situation.hit_tokens
        tokens = hit_tokens + external_tokens
        config = situation.config
        timeout_s, claim_timeout_s = timeouts(situation.forecast, config)
        ttft_ms, _ = request_limits.targets_of(request.sampling_params)
        hit, end = hit_tokens // self.blocks.block_size, -(-tokens // self.blocks.block_size)
        kept_from = self.blocks.kept_from(tokens)
        read_from, prefix = self.blocks.read(request, tables, hit_tokens, kept_from)
        targets = BlockOrder(kept_from).ids(tables, hit, end)
        if self.tier is not None:
            # It may still copy from them, for requests that have ended.
            self.tier.claim(targets)
        entry = Entry(
            new_job_id(),
            request.request_id,
            (*prefix, *targets),
            first_target=len(prefix),
            timeout_s=timeout_s,
            tokens=external_tokens,
            claim_timeout_s=claim_timeout_s,
            stall_s=config.remote_timeout_s,
            due_s=request.arrival_time + (ttft_ms or config.ttft_ms) / 1e3 - time.time(),
            to=to,
        )
        self._waiting[entry.request_id] = entry.job_id
        self.ledger.open(entry)
        job = PrefillJob(
            job_id=entry.job_id,
            incarnation=self.ledger.incarnation,
            decode_instance=self.instance_id,
            # For people who read a dead letter. A client can make it as long as it likes.
            request_id=entry.request_id[:MAX_TEXT],
            compat=self.compat_hash,
            token_ids=b"",
            hit_tokens=hit_tokens,
            block_ids=u32.pack(entry.blocks),
            read_from=read_from,
            kept_from=kept_from,
            cache_salt=request.cache_salt,
            adapter=situation.adapter,
            priority=request.priority,
            timeout_s=timeout_s,
            due_s=entry.due_s,
            trace=self.traces.header(request.request_id),
        )
        urgency = urgency_of(ttft_ms, config.tight_ttft_ms, config.loose_ttft_ms)
        token_ids = request.prompt_token_ids[:tokens]
        return OpenedJob(entry, job, token_ids, urgency, request.mm_features)

    def tier_loaded(self, output: Any) -> None:
        """Publish the jobs whose hit has now been loaded from the tier.

        vLLM's `update_connector_output`. Such a request waits on, so it is taken out of `output`.

        output: vLLM's KVConnectorOutput of a step that has run on every rank."""
        for request_id in self._loading.keys() & (output.finished_recving or ()):
            output.finished_recving.discard(request_id)
            match self._loading.pop(request_id):
                case Settle() as end:
                    self._late.append(end)
                case job:
                    self.publish(job)

    def step_done(self, running: int = 0) -> None:
        """Publish the jobs that waited for steps to end.

        running: number of scheduled steps that have not run yet."""
        self.meter.after_step(running)
        jobs: list[OpenedJob] = []
        while len(self._scheduled) > running:
            jobs += self._scheduled.popleft()
        if not running and self._unpublished:
            jobs += self._unpublished
            self._unpublished = []
        for job in jobs:
            self.publish(job)

    # ------------------------------------------------------------------ step 9: finish

    def finish(self) -> list[str]:
        """Act on how remote prefills have ended. Returns the requests whose KV is there.

        vLLM computes the last prompt tokens of those, and samples."""
        loaded: list[str] = []
        # A hold comes before the report that makes vLLM free the same blocks. So no block in
        # quarantine reaches the free list.
        for fetch in self.fetching.take() if self.fetching is not None else ():
            arrived = fetch.outcome is FetchOutcome.FETCHED
            if not arrived:
                self.meter.finished(fetch.request_id)  # it is decided about anew
            self.traces.fetched(fetch)
            (loaded if arrived else self._failed).append(fetch.request_id)
        late, self._late = self._late, []
        for event in (*late, *self.ledger.take_events()):
            match event:
                case Hold(job_id, blocks):
                    self.blocks.hold(job_id, blocks)
                case Release(job_id):
                    self.blocks.release(job_id)
                case Settle(request_id) if request_id in self._loading:
                    # Its report would make vLLM free blocks that the tier still writes.
                    self._loading[request_id] = event
                case Settle(request_id, outcome):
                    assert request_id in self._waiting, "a request is told once"
                    del self._waiting[request_id]
                    self.blocks.read_no_more(request_id)
                    self.traces.settled(request_id, outcome)
                    if self.trials is not None:
                        self.trials.settled(request_id, event.loaded)
                    self.meter.settled(request_id, outcome)
                    (loaded if event.loaded else self._failed).append(request_id)
        self.seats.leave([*loaded, *self._failed])
        return loaded

    def collect(self, output: Any = None) -> tuple[list[str], list[str]]:
        """Return the (loaded, failed) requests to report in this step.

        vLLM's `build_connector_meta`: called once for each step, at the end of its scheduling.

        output: vLLM's SchedulerOutput."""
        self.meter.scheduled(output)
        self._scheduled.append(self._unpublished)
        self._unpublished = []
        if not self.has_work:
            return [], []
        loaded = self.finish()
        failed, self._failed = self._failed, []
        return loaded, failed

    def request_finished(self, request: Any, tables: Sequence[Sequence[int]] = ()) -> None:
        """Cancel the job of a request that is over in vLLM, if one is open.

        If the request still waits, vLLM frees its blocks when `collect` reports it."""
        request_id = request.request_id
        self._decisions.pop(request_id, None)
        self.seats.leave([request_id])
        self.meter.finished(request_id)
        if self.fetching is not None:
            self.fetching.finished(request_id)
        if self.trials is not None:
            self.trials.finished(request_id, tables)
        if (job_id := self._waiting.get(request_id)) is not None:
            # It is settled all the same, so that vLLM frees its blocks.
            self.ledger.give_up(job_id, Outcome.CANCELLED)
        if not self.of_frontend(request_id):
            self.traces.keep(request)


class DecodeHalf(SchedulerHalf):
    """What this side answers vLLM through the connector, from the construction of the engine on.

    The calls about requests go to `DecodeScheduler`, which is made once the engine is built
    (side.py). Before that, vLLM only tells what there is: memory of each rank, and blocks.

    blocks: made when the engine is built."""

    _scheduler: DecodeScheduler = LATER
    blocks: JobBlocks

    def begin(self, scheduler: DecodeScheduler) -> None:
        """Ask this scheduler from now on."""
        self._scheduler, self.step_meter = scheduler, scheduler.meter

    def bind(self, manager: Any, kept_from: KeptFrom, by_position: ByPosition) -> None:
        self._manager, self._kept_from, self._by_position = manager, kept_from, by_position

    def built(self, view: View) -> None:
        config, manager = view.config, self._manager
        never = "speculation" if speculation.why_local(config) else ""
        if groups.why_local(config, manager.kv_cache_config):
            never = "kv_groups"
        self.blocks = JobBlocks(
            config.cache_config.block_size, manager.block_pool, self._kept_from,
            speculation.local_tokens(config), never,
        )  # fmt: skip

    @property
    def _begun(self) -> bool:
        return self._scheduler is not None

    def matched(self, request: Any, hit_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.decide(request, hit_tokens)

    def allocated(self, request: Any, tables: Tables, external_tokens: int) -> None:
        self._scheduler.enqueue(request, self._by_position(tables), external_tokens)

    def loaded(self, output: Any) -> None:
        self._scheduler.tier_loaded(output)

    def before_step(self) -> StepReport:
        # What is loaded runs in the next step already. `scheduled` reports what has failed.
        arrives = self._begun and self._scheduler.has_events
        return StepReport(set(self._scheduler.finish() if arrives else ()))

    def scheduled(self, output: Any) -> StepReport:
        loaded, failed = self._scheduler.collect(output)
        return StepReport(set(loaded), set(failed))

    def step_done(self, running: int) -> None:
        if self._begun:
            self._scheduler.step_done(running)

    def finished(self, request: Any, tables: Tables) -> bool:
        self._scheduler.request_finished(request, tables)
        return False

    @property
    def has_work(self) -> bool:
        return self._begun and self._scheduler.has_work
