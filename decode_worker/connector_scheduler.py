"""The decode worker's half of the vLLM connector that runs inside the scheduler.

Called by vLLM on the engine thread only, never blocks, does no I/O. It asks the router, opens jobs
in the ledger, and turns the ledger's events into what vLLM must be told. The one rule it keeps for
vLLM: each request that was sent to wait for remote KV is reported exactly once.

`request` and `pool` are vLLM's Request and BlockPool; only the attributes used here are relied on
(checked at start-up by engine/check.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pullfill.decode_worker.conditional_router import (
    QUEUE_FULL,
    QUEUE_WAIT,
    Decision,
    Situation,
    decide,
    expected,
    timeouts,
)
from pullfill.decode_worker.context import DecodeContext, OpenedJob
from pullfill.decode_worker.ledger_types import Hold, Release, Settle
from pullfill.ids import new_job_id
from pullfill.runtime import failpoints, log
from pullfill.wire import MAX_TEXT

logger = log.get("decode_worker.scheduler")


class ConnectorScheduler:
    """Decisions, allocations and reports of one engine."""

    def __init__(self, context: DecodeContext, block_size: int) -> None:
        self._context = context
        self._block_size = block_size
        self._pool: Any = None
        self._skipped: Callable[[int], int] = lambda _tokens: 0
        self._decisions: dict[str, tuple[Situation, Decision]] = {}
        self._waiting: set[str] = set()
        self._held: dict[str, list[Any]] = {}
        self._failed: list[str] = []
        self._unpublished: list[OpenedJob] = []
        self._scheduled: deque[list[OpenedJob]] = deque()

    def bind_pool(self, pool: Any) -> None:
        """vLLM's block pool; used to hold quarantined blocks by reference count."""
        self._pool = pool

    def bind_skipped(self, skipped: Callable[[int], int]) -> None:
        """Set the function of `engine.kv.skipped_of`."""
        self._skipped = skipped

    def longest_kept(self, tokens: int) -> int:
        """Return the longest prompt, of `tokens` at most, of which vLLM keeps every block.

        In tokens, rounded down to whole blocks."""
        lengths = range(tokens, 0, -self._block_size)
        return next((length for length in lengths if self._skipped(length) <= 0), 0)

    @property
    def has_work(self) -> bool:
        """Whether there is something to tell the scheduler: the engine must step."""
        return bool(self._failed) or self._context.ledger.has_events

    def matched(self, request: Any, hit_tokens: int) -> tuple[int, bool]:
        """vLLM's get_num_new_matched_tokens: (tokens a prefill worker will bring, True if so).

        May be asked many times for one request; only `allocated` makes a decision count.
        """
        first = request.prompt_token_ids[0] if request.prompt_token_ids else 0
        failpoints.hit(f"decode.prompt.{first}")
        context = self._context
        situation = context.situation(
            request.num_prompt_tokens, hit_tokens, self._ineligible(request)
        )
        own = context.trials and context.trials.decision(request.request_id)
        decision = own or decide(situation, context.router_config())
        self._decisions[request.request_id] = (situation, decision)
        if decision.reason in (QUEUE_FULL, QUEUE_WAIT):
            context.queue_full()
        return (situation.remote_tokens, True) if decision.remote else (0, False)

    def _ineligible(self, request: Any) -> str:
        """Why this request can never be prefilled remotely, "" if it can. KV of a prompt that is
        more than its token ids, or of which vLLM wants every logit, is computed here."""
        if request.num_output_tokens or request.num_preemptions:
            return "resumed"
        if self._context.traces.fallback_of(request.request_id) is not None:
            return "fallback"
        if request.skip_reading_prefix_cache:
            return "prompt_logprobs"
        if self._skipped(request.num_prompt_tokens) > 0:
            return "sliding_window"  # its first block ids all name the same empty block
        if request.mm_features:
            return "multimodal"
        if request.prompt_embeds is not None or request.prompt_token_ids is None:
            return "prompt_embeds"
        if request.lora_request is not None:
            return "lora"
        if request.pooling_params is not None:
            return "pooling"
        if request.cache_salt is not None and len(request.cache_salt) > MAX_TEXT:
            return "cache_salt"  # the user's; a job with it would be refused as poison
        return ""

    def allocated(self, request: Any, block_ids: Sequence[int], external_tokens: int) -> None:
        """vLLM's update_state_after_alloc: blocks are there; open the job if it is remote."""
        made = self._decisions.pop(request.request_id, None)
        if made is None:
            return  # asked again with 0 after the load
        situation, decision = made
        if not external_tokens:
            if decision.remote:  # vLLM overruled: it will compute here
                decision = Decision(False, "engine_declined")
        shown = expected(situation, decision, self._context.router_config())
        self._context.traces.decided(request.request_id, situation, decision, shown)
        if not external_tokens:
            return
        self._open(request, block_ids, situation, external_tokens)

    def _open(
        self, request: Any, block_ids: Sequence[int], situation: Situation, external_tokens: int
    ) -> None:
        hit_tokens = situation.hit_tokens
        tokens = hit_tokens + external_tokens
        blocks = tuple(block_ids[: -(-tokens // self._block_size)])
        config = self._context.router_config()
        timeout_s, claim_timeout_s = timeouts(situation.forecast, config)
        job = OpenedJob(
            job_id=new_job_id(),
            request_id=request.request_id,
            token_ids=request.prompt_token_ids[:tokens],
            hit_tokens=hit_tokens,
            blocks=blocks,
            cache_salt=request.cache_salt,
            priority=request.priority,
            timeout_s=timeout_s,
            claim_timeout_s=claim_timeout_s,
        )
        self._waiting.add(job.request_id)
        if self._context.trials is not None:
            self._context.trials.opened(job.request_id)
        self._context.ledger.open(
            job.job_id,
            job.request_id,
            blocks,
            first_target=hit_tokens // self._block_size,
            timeout_s=job.timeout_s,
            claim_timeout_s=job.claim_timeout_s,
            stall_s=config.remote_timeout_s,
        )
        failpoints.hit("decode.before_publish")
        if hit_tokens or self._scheduled:
            # vLLM puts a block into its prefix cache when it schedules the block's tokens, so the
            # hit may be computed in the very step that is being scheduled: until that step has
            # run, a prefill worker would read garbage there. And a step that still runs may write
            # one more token of a request that has ended since, into a block that is ours now.
            self._unpublished.append(job)
        else:
            self._context.publish(job)

    def step_done(self, running: int = 0) -> None:
        """All steps scheduled so far but the last `running` ones have run: what they computed may
        be read by others now."""
        while len(self._scheduled) > running:
            self._publish(self._scheduled.popleft())
        if not running and self._unpublished:
            jobs, self._unpublished = self._unpublished, []
            self._publish(jobs)

    def _publish(self, jobs: Sequence[OpenedJob]) -> None:
        for job in jobs:
            self._context.publish(job)

    def collect(self) -> tuple[list[str], list[str]]:
        """Once for each step, at the end of its scheduling: returns (loaded, failed) request ids to
        report in this step."""
        self._scheduled.append(self._unpublished)
        self._unpublished = []
        if not self.has_work:
            return [], []
        loaded = self.take_in()
        failed, self._failed = self._failed, []
        return loaded, failed

    def take_in(self) -> list[str]:
        """Act on the ledger's events, before a step is scheduled or while it is. Returns the
        requests whose KV is there: told before, vLLM runs them in that step and not in the one
        after. Those that failed wait for `collect`.

        Holds come before the report that makes vLLM free the same blocks, so a quarantined block
        never reaches the free list.
        """
        loaded: list[str] = []
        for event in self._context.ledger.take_events():
            match event:
                case Hold(job_id, blocks):
                    held = [self._pool.blocks[b] for b in blocks]
                    self._pool.touch(held)
                    self._held[job_id] = held
                case Release(job_id):
                    # The tail first: it is the least useful as a cached prefix.
                    self._pool.free_blocks(reversed(self._held.pop(job_id)))
                case Settle(request_id, was_loaded, outcome):
                    if request_id not in self._waiting:
                        logger.error("dropped a second report for %s", request_id)
                        continue
                    self._waiting.discard(request_id)
                    self._context.traces.settled(request_id, was_loaded, outcome)
                    (loaded if was_loaded else self._failed).append(request_id)
        return loaded

    def finished(self, request_id: str, block_ids: Sequence[int] = ()) -> None:
        """vLLM's request_finished: the request is over, however. An open job is cancelled; if the
        request still waits, its blocks are freed by the report that `cancel` causes."""
        self._decisions.pop(request_id, None)
        if self._context.trials is not None:
            self._context.trials.finished(request_id, block_ids)
        if request_id in self._waiting:
            self._context.ledger.cancel(request_id)
