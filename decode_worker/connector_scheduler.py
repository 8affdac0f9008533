"""The half of the decode worker's KV connector that vLLM runs inside its scheduler.

Three steps of a request's life (docs/architecture.md) are here:

    decide   whether a prefill worker computes the rest of a prompt
    enqueue  open the job of such a prompt, and publish it
    finish   tell vLLM how remote prefills have ended

vLLM calls everything here on the engine thread. Nothing blocks or does I/O. Each request that waits
for remote KV is reported to vLLM exactly once.

`request` and `pool` are vLLM's Request and BlockPool. engine/check.py checks at start-up that they
have the attributes that are used here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pullfill.decode_worker.context import DecodeContext, OpenedJob
from pullfill.decode_worker.forecast import timeouts
from pullfill.decode_worker.hit_blocks import HitBlocks
from pullfill.decode_worker.ledger import Entry, Hold, Release, Settle
from pullfill.decode_worker.prefix.fetches import FetchOutcome
from pullfill.decode_worker.rules import (
    ENOUGH,
    PREFIX_HIT,
    Decision,
    Situation,
    decide,
    expected,
)
from pullfill.engine import request_limits
from pullfill.engine.groups import BlockOrder
from pullfill.engine.requests import count_as_computed
from pullfill.engine.seats import Seats
from pullfill.ids import new_job_id
from pullfill.queue.contract import urgency_of
from pullfill.runtime import failpoints, log

if TYPE_CHECKING:
    from pullfill.decode_worker.prefix.fetches import PrefixFetches
    from pullfill.decode_worker.step_meter import StepMeter
    from pullfill.engine.tier import Tier

logger = log.get("decode_worker.scheduler")


class ConnectorScheduler:
    """Decides, opens jobs and reports their ends, for one engine.

    local_tokens: see `Situation`.
    never: the reason why this engine prefills every prompt. Empty: there is none.
    _decisions: the last decision about each request that has no blocks yet.
    _waiting: requests that wait for remote KV.
    _held: blocks that are held for each job whose writer is not proved quiet.
    _hit_blocks: the blocks of prefix hits that jobs may read.
    _failed: requests to report as failed at the next `collect`.
    _unpublished: jobs to publish after the step that is being scheduled. `enqueue` says why.
    _scheduled: the same for each step that still runs.
    _loading: for each request whose hit is still loaded from the tier: its job, or how the job has
    ended meanwhile.
    _late: ends of jobs that had to wait for such a load.
    tier: vLLM's own KV offloading, beside our connector. None: there is none.
    meter: measures steps, and decides by what they cost. None until the engine is built.
    fetching: fetches prefixes from other decode workers. None: nothing can be fetched.
    seats: of the requests whose KV is on its way.
    """

    def __init__(
        self, context: DecodeContext, block_size: int, local_tokens: int = 1, never: str = ""
    ) -> None:
        self._context = context
        self._block_size = block_size
        self.local_tokens = local_tokens
        self._never = never
        self._pool: Any = None
        self._kept_from: Callable[[int], tuple[int, ...]] = lambda _tokens: (0,)
        self._decisions: dict[str, tuple[Situation, Decision, int, int]] = {}
        self._waiting: set[str] = set()
        self._held: dict[str, list[Any]] = {}
        self._hit_blocks = HitBlocks(block_size)
        self._failed: list[str] = []
        self._unpublished: list[OpenedJob] = []
        self._scheduled: deque[list[OpenedJob]] = deque()
        self._loading: dict[str, OpenedJob | Settle] = {}
        self._late: list[Settle] = []
        self.in_flight = set[Any]()
        self.tier: Tier | None = None
        self.meter: StepMeter | None = None
        self.fetching: PrefixFetches | None = None
        self.seats = Seats()

    def bind_pool(self, pool: Any) -> None:
        """Set vLLM's block pool. Blocks in quarantine are held by its reference counts."""
        self._pool = self._hit_blocks.pool = pool

    def bind_kept(self, kept_from: Callable[[int], tuple[int, ...]]) -> None:
        """Set the function of `engine.groups.kept_from`."""
        self._kept_from = self._hit_blocks.kept_from = kept_from

    def longest_kept(self, tokens: int) -> int:
        """Return the longest prompt, of `tokens` at most, of which vLLM keeps every block.

        In tokens, rounded down to whole blocks."""
        lengths = range(tokens, 0, -self._block_size)
        return next((length for length in lengths if not any(self._kept_from(length))), 0)

    def target_blocks(self, prompt_tokens: int, hit_tokens: int) -> int:
        """Return how many blocks a prefill worker would write, over all KV cache groups.

        hit_tokens: length of the prefix hit on this worker."""
        tokens = max(0, prompt_tokens - self.local_tokens)
        kept = BlockOrder(self._kept_from(tokens))
        end, hit = -(-tokens // self._block_size), hit_tokens // self._block_size
        return max(0, kept.before(end) - kept.before(hit))

    @property
    def has_work(self) -> bool:
        """Whether there is something to tell vLLM. Then the engine must take a step."""
        return bool(self._failed or self._late) or self.has_events

    @property
    def has_events(self) -> bool:
        """Whether remote prefills or fetches have ended."""
        fetched = self.fetching is not None and self.fetching.has_events
        return fetched or self._context.ledger.has_events

    @property
    def never(self) -> str:
        """Why this engine exchanges no KV with others. Empty: it does."""
        return self._never

    @property
    def pool(self) -> Any:
        """vLLM's BlockPool."""
        return self._pool

    # ------------------------------------------------------------------ step 3: decide

    def decide(self, request: Any, hit_tokens: int) -> tuple[int | None, bool]:
        """Decide whether a prefill worker computes the rest of this prompt.

        vLLM's `get_num_new_matched_tokens`. Returns the number of tokens that a prefill worker will
        bring, and True if there are any. Tokens that are loaded from the tier before that count as
        brought. vLLM may ask many times about one request. Only `enqueue` makes a decision count.

        hit_tokens: length of the prefix hit on this worker, without the tier's."""
        # Asked of, it has no blocks. After a failed fetch vLLM still reserves some for it.
        self.in_flight.discard(request)
        first = request.prompt_token_ids[0] if request.prompt_token_ids else 0
        failpoints.hit(f"decode.prompt.{first}")
        context = self._context
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
        situation = context.situation(request, hit_tokens + offloaded + fetched)
        own = context.trials and context.trials.decision(request.request_id)
        if own:
            situation = replace(situation, costs=None)  # a prompt of the self-check teaches nothing
        decision = own or decide(request, situation)
        if fetched:
            decision = Decision(False, PREFIX_HIT)
        self._decisions[request.request_id] = (situation, decision, offloaded, fetched)
        if decision.reason in ENOUGH:
            context.queue_full()
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
        shown = expected(situation, decision)
        traces = self._context.traces
        traces.decided(
            request.request_id, situation, decision, shown, offloaded, fetched,
            headers=request.trace_headers,
        )  # fmt: skip
        if self.meter is not None:
            self.meter.admitted(request.request_id, situation, decision)
        if fetched and self.fetching is not None:
            hit = (situation.hit_tokens - fetched) // self._block_size
            blocks = tables[0][hit : hit + external_tokens // self._block_size]
            self.fetching.begin(request.request_id, hit * self._block_size, blocks)
            return
        if self.fetching is not None:
            self.fetching.explain(request.request_id)
        if not external_tokens:
            return
        later = bool(situation.hit_tokens or self._scheduled or self.tier is not None)
        external = external_tokens - offloaded
        job = self._open(request, tables, situation, external, later, decision.to)
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
            self._context.publish(job)

    def _open(
        self,
        request: Any,
        tables: Sequence[Sequence[int]],
        situation: Situation,
        external_tokens: int,
        later: bool,
        to: str,
    ) -> OpenedJob:
        """Open the job in the ledger. From now on its request waits."""
        hit_tokens = situation.hit_tokens
        tokens = hit_tokens + external_tokens
        config = situation.config
        timeout_s, claim_timeout_s = timeouts(situation.forecast, config)
        hit, end = hit_tokens // self._block_size, -(-tokens // self._block_size)
        kept_from = self._kept_from(tokens)
        read_from, prefix = self._hit_blocks.hold(request, tables, hit_tokens, kept_from)
        targets = BlockOrder(kept_from).ids(tables, hit, end)
        if self.tier is not None:
            # It may still copy from them, for requests that have ended.
            self.tier.claim(targets)
        job = OpenedJob(
            job_id=new_job_id(),
            request_id=request.request_id,
            token_ids=request.prompt_token_ids[:tokens],
            hit_tokens=hit_tokens,
            blocks=(*prefix, *targets),
            read_from=read_from,
            kept_from=kept_from,
            cache_salt=request.cache_salt,
            adapter=situation.adapter,
            features=request.mm_features,
            priority=request.priority,
            trace=self._context.traces.header(request.request_id),
            to=to,
            timeout_s=timeout_s,
            claim_timeout_s=claim_timeout_s,
            urgency=urgency_of(
                request_limits.targets_of(request.sampling_params)[0],
                config.tight_ttft_ms,
                config.loose_ttft_ms,
            ),
        )
        self._waiting.add(job.request_id)
        self._context.ledger.open(
            Entry(
                job.job_id,
                job.request_id,
                job.blocks,
                first_target=len(prefix),
                timeout_s=timeout_s,
                tokens=external_tokens,
                claim_timeout_s=claim_timeout_s,
                hedge_s=situation.costs.hedge_s if config.hedge and situation.costs else math.inf,
                stall_s=config.remote_timeout_s,
                later=later,
                in_queue=not to,
            )
        )
        return job

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
                    self._context.publish(job)

    def step_done(self, running: int = 0) -> None:
        """Publish the jobs that waited for steps to end.

        running: number of scheduled steps that have not run yet."""
        jobs: list[OpenedJob] = []
        while len(self._scheduled) > running:
            jobs += self._scheduled.popleft()
        if not running and self._unpublished:
            jobs += self._unpublished
            self._unpublished = []
        for job in jobs:
            self._context.publish(job)

    # ------------------------------------------------------------------ step 9: finish

    def finish(self) -> list[str]:
        """Act on how remote prefills have ended. Returns the requests whose KV is there.

        vLLM computes the last prompt tokens of those, and samples. `DecodeHooks` calls this before
        a step is scheduled, so that they run in that step and not in the one after. Requests that
        failed are reported by `collect`."""
        loaded: list[str] = []
        # A hold comes before the report that makes vLLM free the same blocks. So no block in
        # quarantine reaches the free list.
        for fetch in self.fetching.take() if self.fetching is not None else ():
            arrived = fetch.outcome is FetchOutcome.FETCHED
            if self.meter is not None and not arrived:
                self.meter.finished(fetch.request_id)  # it is decided about anew
            self._context.traces.fetched(fetch)
            (loaded if arrived else self._failed).append(fetch.request_id)
        late, self._late = self._late, []
        for event in (*late, *self._context.ledger.take_events()):
            match event:
                case Hold(job_id, blocks):
                    held = [self._pool.blocks[b] for b in blocks]
                    self._pool.touch(held)
                    self._held[job_id] = held
                case Release(job_id):
                    # The tail first: it is the least useful as a cached prefix.
                    self._pool.free_blocks(reversed(self._held.pop(job_id)))
                case Settle(request_id) if request_id in self._loading:
                    # Its report would make vLLM free blocks that the tier still writes.
                    self._loading[request_id] = event
                case Settle(request_id, outcome):
                    was_loaded = event.loaded
                    if request_id not in self._waiting:
                        about = log.ids(request_id=request_id)
                        logger.error("dropped a second report for %s", request_id, extra=about)
                        continue
                    self._waiting.discard(request_id)
                    self._hit_blocks.give_back(request_id)
                    self._context.traces.settled(request_id, was_loaded, outcome)
                    if self.meter is not None:
                        self.meter.settled(request_id, was_loaded, outcome)
                    (loaded if was_loaded else self._failed).append(request_id)
        self.seats.leave([*loaded, *self._failed])
        return loaded

    def collect(self) -> tuple[list[str], list[str]]:
        """Return the (loaded, failed) requests to report in this step.

        Called once for each step, at the end of its scheduling."""
        self._scheduled.append(self._unpublished)
        self._unpublished = []
        if not self.has_work:
            return [], []
        loaded = self.finish()
        failed, self._failed = self._failed, []
        return loaded, failed

    def request_finished(self, request_id: str, tables: Sequence[Sequence[int]] = ()) -> None:
        """Cancel the job of a request that is over in vLLM, if one is open.

        If the request still waits, vLLM frees its blocks when `collect` reports it."""
        self._decisions.pop(request_id, None)
        self.seats.leave([request_id])
        if self.meter is not None:
            self.meter.finished(request_id)
        if self.fetching is not None:
            self.fetching.finished(request_id)
        if self._context.trials is not None:
            self._context.trials.finished(request_id, tables)
        if request_id in self._waiting:
            self._context.ledger.cancel(request_id)
