"""Measures the steps of an engine with a decode side, and what they tell of its requests.

What a prefill costs here and elsewhere is the policy `cost` (cost.py). Engine thread.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.decode_worker.context import DecodeContext
from pullfill.decode_worker.cost import RATE_TOKENS, CostModel, Prefill, Queue, Targets
from pullfill.decode_worker.demand import DemandMeter
from pullfill.decode_worker.rules import Decision, Situation
from pullfill.engine import request_limits
from pullfill.engine.front_wire import LoadReport
from pullfill.engine.view import View
from pullfill.errors import Outcome
from pullfill.wire import RouterConfig
from pullfill.worker.step_meter import Step, StepMeter


class DecodeMeter(StepMeter):
    """See the module."""

    model: CostModel

    def __init__(self, context: DecodeContext, view: View, clock: Clock = SYSTEM_CLOCK) -> None:
        model = CostModel(view.chunks.step_tokens, clock)
        super().__init__(view, model, context.router_config, clock=clock)
        self.demand = DemandMeter(clock)

    def stepped(self, step: Step, seconds: float) -> None:
        streams = self.model.streams
        self.model.stepped(step, seconds)
        if streams and step.streams:
            gap_s = self.model.base(step.streams) if step.parts else seconds
            # Not the streams' own targets: one request could ask for dozens of workers.
            target_s = self._config().itl_ms / 1e3
            self.demand.stepped(seconds, min(gap_s, seconds), target_s)

    def report(self, draining: bool) -> LoadReport:
        """Return what frontends are told of the load."""
        model, cost = self.model, self.model.cost
        return msgspec.structs.replace(
            self._view.load(draining),
            seats=self._view.config.scheduler_config.max_num_seqs,
            requests=model.requests,
            streams=model.streams,
            stream_tokens=model.kv_tokens,
            # Rounded, because a report is sent only if it has changed.
            prompt_share=round(min(1.0, model.prompts.share()), 2),
            step_s=(cost.base_s, cost.stream_s, cost.kv_s),
            prompt_token_s=model.prompt_token_s,
            prompt_tokens_per_s=round(model.first_tokens.share()),
            ended=model.ended,
        )

    def predict(self, request: Any, hit_tokens: int, queue: Queue, config: RouterConfig) -> Prefill:
        """Predict what the prefill of a request costs. request: vLLM's Request."""
        ttft_ms, itl_ms = request_limits.targets_of(request.sampling_params)
        # Targets are rounded, so that streams with about the same one are counted together.
        itl_s = round((itl_ms or config.itl_ms) / 1e3, 3) or 0.001
        return self.model.predict(
            queue,
            Targets((ttft_ms or config.ttft_ms) / 1e3, itl_s),
            hit_tokens,
            max(1, request.num_prompt_tokens - hit_tokens),
            max(0.0, time.time() - request.arrival_time),
        )

    def admitted(self, request_id: str, now: Situation, decision: Decision) -> None:
        """Note that vLLM has taken a request as it was decided.

        Nothing is noted of one that was preempted and comes again."""
        if now.costs is not None and self.model.admitted(request_id, now.costs, decision.remote):
            here_s = self.prefill_s(now.hit_tokens, now.remote_tokens)
            self.demand.decided(now, decision, here_s)

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
