"""Measures the steps of this engine, and plans the next one.

vLLM's calls on one side, the policy `cost` (cost.py) on the other. Engine thread. What was
learned here also serves when the policy is changed, so steps are measured under each policy.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.decode_worker.context import DecodeContext
from pullfill.decode_worker.cost import RATE_TOKENS, CostModel, Prefill, Queue, Step, Targets
from pullfill.decode_worker.demand import DemandMeter
from pullfill.decode_worker.rules import Decision, Situation
from pullfill.engine import request_limits
from pullfill.engine.requests import OWN_CLIENT
from pullfill.engine.view import View
from pullfill.errors import Outcome
from pullfill.rate import Share
from pullfill.wire import PredictedMs, RouterConfig, RouterPolicy
from pullfill.worker.step_rule import LEAST_TOKENS, Prompt

# One of so many steps without prompts counts the KV of its streams: it changes slowly.
_KV_EVERY = 16


class StepMeter:
    """See the module."""

    def __init__(self, context: DecodeContext, view: View, clock: Clock = SYSTEM_CLOCK) -> None:
        self._context = context
        self._view = view
        self._chunks = chunks = view.chunks
        self._clock = clock
        self.model = CostModel(chunks.step_tokens, stream_tokens=chunks.each, clock=clock)
        self.demand = DemandMeter(clock)
        self.prompts = Share(clock)
        self._steps: deque[Step] = deque()
        self._began = self._ended = 0.0
        self._on = False
        self._seen = 0
        self._kv_tokens: int | None = None
        # Of prompts that are not computed: when each is due, when it came, and its hit.
        self._known: dict[str, tuple[float, float, int]] = {}

    # ------------------------------------------------------------------ one step

    def before_step(self) -> None:
        """Called before each step or sleep: plan the next step."""
        if not self._steps:
            self._began = self._clock.monotonic()
        on = self._context.router_config().policy is RouterPolicy.COST and self._chunks.able
        self._kv_tokens = None
        if on and not self._chunks.idle:
            self._plan()
        elif on:
            self._chunks.full()
        elif self._on:
            self._chunks.release()
            self.model.plan((), (), 1)  # jobs are not followed any more
        self._on = on

    def _plan(self) -> None:
        chunks, model = self._chunks, self.model
        streams, self._kv_tokens = chunks.streams()
        taken = streams * chunks.each
        known, self._known = self._known, {}
        now, wall = self._clock.monotonic(), time.time()
        own: list[Prompt] = []
        jobs: list[Prompt] = []
        short: list[str] = []
        whole = False
        for request in chunks.prompts():
            whole = whole or chunks.whole(request)
            name, at = request.request_id, request.num_computed_tokens
            if (found := known.get(name)) is None:
                targets = self._targets(request, self._context.router_config())
                arrival = now - max(0.0, wall - request.arrival_time)
                found = arrival + targets.ttft_s, arrival, at or self._view.hit(request)
            self._known[name] = found
            due, arrival, hit = found
            at = at or hit
            if request.num_tokens - at <= LEAST_TOKENS:
                # Its KV has come, for example. It takes a step no time, and comes first. vLLM may
                # take the drafts of a stream with it.
                taken += max(chunks.each, request.num_tokens - at)
                short.append(name)
                continue
            job = request.client_index == OWN_CLIENT
            prompt = Prompt(name, at, request.num_tokens - at, due, arrival)
            (jobs if job else own).append(prompt)
        plan = model.plan(own, jobs, max(1, chunks.step_tokens - taken))
        if whole:
            chunks.release()
            return
        order = {name: place for place, name in enumerate(plan.order)}
        order |= dict.fromkeys(short, -1)
        # No stream and no short prompt is cut.
        each = max(chunks.each, LEAST_TOKENS, *plan.tokens.values())
        chunks.take(order, each, taken + plan.total)

    def scheduled(self, output: Any) -> None:
        """Note what a step will compute. output: vLLM's SchedulerOutput."""
        if not self._steps and self._began <= self._ended:
            # Nobody has called `before_step` since the last one: stock vLLM does so within a step.
            self._began = self._clock.monotonic()
        self._seen += 1
        if self._kv_tokens is None and self._seen % _KV_EVERY == 0:
            _, self._kv_tokens = self._chunks.streams()
        self._steps.append(
            self.model.scheduled(
                output.num_scheduled_tokens, output.total_num_scheduled_tokens, self._kv_tokens
            )
        )

    def after_step(self, running: int) -> None:
        """Called after each step. running: number of scheduled steps that have not run yet."""
        now = self._clock.monotonic()
        # After a longer pause than what vLLM does between two steps, the engine was idle.
        idle = self._began - self._ended > 0.002
        seconds = now - (self._began if idle else self._ended)
        self._ended = now
        while len(self._steps) > running:
            step = self._steps.popleft()
            streams = self.model.streams
            if prompts := bool(step.parts) or not step.known:
                self.prompts.add(max(0.0, seconds - self.model.base(step.streams)))
            for request_id, outcome in self.model.stepped(step, seconds):
                self._context.traces.first_token(
                    request_id, outcome.first_token_ms, outcome.regret_ms
                )
            if streams and step.streams:
                gap_s = self.model.base(step.streams) if prompts else seconds
                # Not the streams' own targets: one request could ask for dozens of workers.
                target_s = self._context.router_config().itl_ms / 1e3
                self.demand.stepped(seconds, min(gap_s, seconds), target_s)

    # ------------------------------------------------------------------ one request

    def predict(self, request: Any, hit_tokens: int, queue: Queue, config: RouterConfig) -> Prefill:
        """Predict what the prefill of a request costs. request: vLLM's Request."""
        return self.model.predict(
            queue,
            self._targets(request, config),
            hit_tokens,
            max(1, request.num_prompt_tokens - hit_tokens),
            max(0.0, time.time() - request.arrival_time),
        )

    def _targets(self, request: Any, config: RouterConfig) -> Targets:
        ttft_ms, itl_ms = request_limits.targets_of(request.sampling_params)
        # Targets are rounded, so that streams with about the same one are counted together.
        itl_s = round((itl_ms or config.itl_ms) / 1e3, 3) or 0.001
        return Targets((ttft_ms or config.ttft_ms) / 1e3, itl_s)

    def admitted(self, request_id: str, now: Situation, decision: Decision) -> PredictedMs | None:
        """Note that vLLM has taken a request as it was decided. Returns what was predicted.

        None: nothing was, or the request was preempted and comes again."""
        if now.costs is None:
            return None
        predicted = self.model.admitted(request_id, now.costs, decision.remote)
        if predicted is not None:
            here_s = self.prefill_s(now.hit_tokens, now.remote_tokens)
            self.demand.decided(now, decision, here_s)
        return predicted

    def prefill_s(self, start: int, tokens: int) -> float:
        """Return how long it takes to compute `tokens` after `start` others. 0: unknown."""
        return self.model.cost.work(start, tokens) if self.model.measured else 0.0

    def settled(self, request_id: str, outcome: Outcome) -> None:
        """Note that a remote prefill has ended."""
        self.model.settled(request_id, outcome is Outcome.COMMITTED)
        if outcome not in (Outcome.COMMITTED, Outcome.CANCELLED):
            self.demand.fell_back()

    @property
    def own_rate(self) -> float:
        """Prompt tokens that this engine computes in a second. 0: not measured. Any thread."""
        seconds = self.prefill_s(0, RATE_TOKENS)
        return RATE_TOKENS / seconds if seconds > 0 else 0.0

    def finished(self, request_id: str) -> None:
        """Note that a request is over."""
        self.model.finished(request_id)
