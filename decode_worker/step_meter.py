"""Measures the steps of this engine, and sizes the chunks of the next one.

vLLM's calls on one side, the policy `cost` (cost_router.py) on the other. Engine thread. What was
learned here also serves when the policy is changed, so steps are measured under each policy.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.decode_worker.context import DecodeContext
from pullfill.decode_worker.cost_rates import span
from pullfill.decode_worker.cost_requests import Step, Targets
from pullfill.decode_worker.cost_router import CostRouter
from pullfill.decode_worker.demand import DemandMeter
from pullfill.decode_worker.request_trace import Measured
from pullfill.decode_worker.rules import Decision, Situation
from pullfill.engine import request_targets
from pullfill.engine.chunks import PrefillChunks
from pullfill.errors import Outcome
from pullfill.wire import RouterPolicy

_BREAK_S = 0.002
"""A longer pause between two steps is not part of the next one: the engine was idle."""

_RATE_TOKENS = 1024
"""The length of prompt that tells an engine's rate."""


class StepMeter:
    """See the module."""

    def __init__(
        self, context: DecodeContext, chunks: PrefillChunks, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._context = context
        self._chunks = chunks
        self._clock = clock
        self.router = CostRouter(
            chunks.step_tokens, chunks=chunks.able, stream_tokens=chunks.each, clock=clock
        )
        self.demand = DemandMeter(clock)
        self._steps: deque[Step] = deque()
        self._began = self._ended = 0.0
        self._on = False
        context.traces.measured = self._measured

    # ------------------------------------------------------------------ one step

    def before_step(self) -> None:
        """Called before each step or sleep: size the chunks of the next step."""
        self._began = self._clock.monotonic()
        on = self._context.router_config().policy is RouterPolicy.COST
        if on:
            self._chunks.limit(*self.router.chunk())
        elif self._on:
            self._chunks.release()
        self._on = on

    def scheduled(self, output: Any) -> None:
        """Note what a step will compute. output: vLLM's SchedulerOutput."""
        self._steps.append(
            self.router.scheduled(output.num_scheduled_tokens, output.total_num_scheduled_tokens)
        )

    def after_step(self, running: int) -> None:
        """Called after each step. running: number of scheduled steps that have not run yet."""
        now = self._clock.monotonic()
        idle = self._began - self._ended > _BREAK_S
        seconds = now - (self._began if idle else self._ended)
        self._ended = now
        while len(self._steps) > running:
            step = self._steps.popleft()
            target_s = self.router.tightest_itl_s
            for request_id, outcome in self.router.stepped(step, seconds):
                self._context.traces.first_token(
                    request_id, outcome.first_token_ms, outcome.regret_ms
                )
            if target_s and step.streams:
                prompts = step.computed[0] > 0 or not step.known
                gap_s = self.router.rates.base(step.streams) if prompts else seconds
                self.demand.stepped(seconds, min(gap_s, seconds), target_s)

    # ------------------------------------------------------------------ one request

    def place(self, request: Any, able: Decision, now: Situation) -> Decision:
        """Decide about a request, if the policy is `cost`. Otherwise only predict.

        request: vLLM's Request. able: what the other policies say."""
        config = now.config
        ttft_ms, itl_ms = request_targets.targets(request.sampling_params)
        targets = Targets(
            (ttft_ms or config.ttft_ms) / 1e3, round((itl_ms or config.itl_ms) / 1e3, 3) or 0.001
        )
        waited_s = max(0.0, time.time() - request.arrival_time)
        decided = self.router.place(request.request_id, able, now, targets, waited_s)
        return decided if config.policy is RouterPolicy.COST else able

    def admitted(self, request_id: str, now: Situation, decision: Decision) -> None:
        """Note that vLLM has taken a request as it was decided."""
        choice, predicted = self.router.admitted(request_id, decision.remote)
        if choice:  # neither preempted before, nor of the self-check
            self._context.traces.predicted(request_id, choice, predicted)
            here_s = self.router.rates.work(span(now.hit_tokens, now.remote_tokens))
            self.demand.decided(now, decision, here_s)

    def prefill_s(self, start: int, tokens: int) -> float:
        """Return how long it takes to compute `tokens` after `start` others. 0: unknown."""
        return self.router.rates.work(span(start, tokens))

    def begin_here_in(self, request_id: str) -> float | None:
        """See `CostRouter.begin_here_in`."""
        return self.router.begin_here_in(request_id)

    def settled(self, request_id: str, loaded: bool, outcome: Outcome) -> None:
        """Note that a remote prefill has ended."""
        self.router.settled(request_id, loaded)
        if not loaded and outcome is not Outcome.CANCELLED:
            self.demand.fell_back()

    @property
    def own_rate(self) -> float:
        """Prompt tokens that this engine computes in a second. 0: not measured. Any thread."""
        seconds = self.router.rates.work(span(0, _RATE_TOKENS))
        return _RATE_TOKENS / seconds if seconds > 0 else 0.0

    def finished(self, request_id: str) -> None:
        """Note that a request is over."""
        self.router.finished(request_id)

    def _measured(self, done: Measured) -> None:
        self.router.committed(done)
