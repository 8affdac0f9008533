"""Measures the steps of one engine, and plans the next one. One for every worker.

vLLM's calls on one side, the step rule (step_rule.py) on the other. A prefill worker has no own
prompts and no streams. A worker with a decode side tells more of both: decode_worker/meter.py.
What was learned also serves when the policy is changed, so steps are measured under each policy.
Engine thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.engine import request_limits
from pullfill.engine.requests import OWN_CLIENT
from pullfill.engine.view import View
from pullfill.wire import RouterConfig, RouterPolicy
from pullfill.worker import step_rule
from pullfill.worker.step_cost import EVERY, Errors, Fit, StepCost
from pullfill.worker.step_rule import LEAST_TOKENS, Plan, Prompt, Streams

# A request that gets at most so many tokens in a step counts as a stream. A stream gets one
# token and its drafts. If there are more drafts than that, the limit is higher.
_STREAM_TOKENS = 8


class Step(msgspec.Struct, frozen=True):
    """What one step computes.

    streams: how many requests get a token or two. kv_tokens: in the KV of these.
    parts: of prompts: tokens before, and tokens. tokens: of each request."""

    streams: int
    kv_tokens: int
    parts: tuple[tuple[int, int], ...]
    tokens: Mapping[str, int]


class StepModel:
    """What was learned of the steps of one engine. It does no I/O.

    For minutes all steps may have as many streams. So what a stream or a token costs in proportion
    to the rest is remembered for thousands of steps. How fast the engine is as a whole is learned
    from the last few dozen. All parts are learned together: with prompts in most steps, nothing
    else tells what of a step's time is theirs.

    kv_tokens: in the KV of its streams, as last counted. steps: how many have run.
    measured: steps that told what prompts take. jobs: prompts of others in the last plan."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._fit = Fit((0.005, 2.5e-4, 1.2e-7, 1.2e-4, 7.6e-8))  # the fields of `StepCost`
        self.errors = Errors()
        self.kv_tokens = self.steps = self.measured = 0
        self.jobs: Sequence[Prompt] = ()
        self._clock = clock
        self._tell()

    @property
    def cost(self) -> StepCost:
        """How long steps of this engine take, as learned."""
        return self._cost

    def kept(self) -> Streams:
        """Return the streams, with the targets of those that keep theirs."""
        # Streams on a prefill worker are of vLLM's own clients. Nothing is known of their targets.
        return Streams()

    def plan(self, own: Sequence[Prompt], jobs: Sequence[Prompt], step_tokens: int) -> Plan:
        """Plan the next step.

        own, jobs: all prompts that are not computed. Jobs are those of a prefill side.
        step_tokens: most prompt tokens in it."""
        self.jobs = jobs
        return step_rule.plan(
            self.kept(), [*own, *jobs], self.cost, self.errors, now=self._clock.monotonic(),
            step_tokens=step_tokens, turn=self.steps,
        )  # fmt: skip

    def learn(self, step: Step, seconds: float) -> None:
        """Learn from a step that has run."""
        self.steps += 1
        if step.streams and (step.parts or self.errors.new):
            cost = self.cost
            work = sum(cost.work(at, tokens) for at, tokens in step.parts)
            self.errors.stepped(cost.base(step.streams, step.kv_tokens) + work, seconds)
        tokens = sum(count for _, count in step.parts)
        pairs = sum(count * (at + count / 2.0) for at, count in step.parts)
        self.measured += tokens > 16  # fewer take less than a step varies
        if step.streams or tokens:
            self._fit.observe((1.0, step.streams, step.kv_tokens, tokens, pairs), seconds)
        if self.steps < EVERY or self.steps % EVERY == 0:
            self._tell()

    def _tell(self) -> None:
        self._cost = StepCost(*self._fit.learned())


class StepMeter:
    """See the module.

    config: the router's settings. Only under the policy `cost` steps are planned.
    computes: takes a request's id. Returns whether the next step may compute its prompt.
    deferred: the prompts that the next step must not begin. True: vLLM has asked our connector
    about that prompt, and it stays here."""

    def __init__(
        self,
        view: View,
        model: StepModel,
        config: Callable[[], RouterConfig],
        computes: Callable[[str], bool] = lambda _: True,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.model = model
        self._view = view
        self._chunks = view.chunks
        self._stream_tokens = max(view.chunks.each, _STREAM_TOKENS)
        self._config = config
        self._computes = computes
        self._clock = clock
        self._steps: deque[Step] = deque()
        self._began = self._ended = 0.0
        # Of prompts that are not computed: when each is due, when it came, and its hit.
        self._known: dict[str, tuple[float, float, int]] = {}
        self.deferred: dict[str, bool] = {}
        self._begins: set[str] = set()  # prompts that the last plan has begun

    def before_step(self) -> None:
        """Called before each step or sleep, once vLLM knows which KV has come: plan the step."""
        if not self._steps:
            self._began = self._clock.monotonic()
        if self._config().policy is RouterPolicy.COST and not self._chunks.idle:
            self._plan()
            return
        self.model.jobs = ()  # there is nothing to order, or jobs are not followed any more
        self.deferred = {}
        self._chunks.release()

    def _plan(self) -> None:
        chunks, model = self._chunks, self.model
        streams, model.kv_tokens = chunks.streams()
        taken = streams * chunks.each
        known, self._known = self._known, {}
        now, wall = self._clock.monotonic(), time.time()
        own: list[Prompt] = []
        jobs: list[Prompt] = []
        short: list[str] = []
        begins: set[str] = set()
        whole = not chunks.able
        for request in chunks.prompts():
            name, at = request.request_id, request.num_computed_tokens
            if not self._computes(name):
                continue
            whole = whole or chunks.whole(request)
            if (found := known.get(name)) is None:
                ttft_ms, _ = request_limits.targets_of(request.sampling_params)
                arrival = now - max(0.0, wall - request.arrival_time)
                due = arrival + (ttft_ms or self._config().ttft_ms) / 1e3
                found = due, arrival, at or self._view.hit(request)
            self._known[name] = found
            due, arrival, hit = found
            if not at:
                begins.add(name)
            at = at or hit
            if request.num_tokens - at <= LEAST_TOKENS:
                # Its KV has come, for example. It takes a step no time, and comes first. vLLM may
                # take the drafts of a stream with it.
                taken += max(chunks.each, request.num_tokens - at)
                short.append(name)
                continue
            job = request.client_index == OWN_CLIENT
            left = request.num_tokens - at
            prompt = Prompt(name, at, left, due, arrival, request.priority)
            (jobs if job else own).append(prompt)
        plan = model.plan(own, jobs, max(1, chunks.step_tokens - taken))
        order = {name: place for place, name in enumerate(plan.order)}
        order |= dict.fromkeys(short, -1)
        # vLLM computes what has begun before what waits. So no prompt begins before its turn, or it
        # could not be overtaken. If vLLM could not begin one that was planned, others may.
        held = begins - plan.tokens.keys() - set(short)
        if whole or begins & self._begins:
            held = set()
        self._begins = begins - held
        self.deferred = {name: self.deferred.get(name, False) for name in held}
        if whole:  # vLLM cuts none of them, or not this one
            chunks.take(order, 0, chunks.step_tokens)
            return
        # No stream and no short prompt is cut.
        each = max(chunks.each, LEAST_TOKENS, *plan.tokens.values())
        # One token more, so that vLLM asks about prompts that it does not know. Some go elsewhere.
        asks = not all(self.deferred.values())
        chunks.take(order, each, taken + plan.total + asks)

    def scheduled(self, output: Any) -> None:
        """Note what a step will compute. output: vLLM's SchedulerOutput."""
        if not self._steps and self._began <= self._ended:
            # Nobody has called `before_step` since the last one: stock vLLM does so within a step.
            self._began = self._clock.monotonic()
        every, most = self._chunks.parts(output), self._stream_tokens
        parts = tuple(part for part in every if part[1] > most)
        self.model.kv_tokens = kv_tokens = sum(at for at, count in every if count <= most)
        streams = len(every) - len(parts)
        self._steps.append(Step(streams, kv_tokens, parts, output.num_scheduled_tokens))

    def after_step(self, running: int) -> None:
        """Called after each step. running: number of scheduled steps that have not run yet."""
        now = self._clock.monotonic()
        # After a longer pause than what vLLM does between two steps, the engine was idle.
        idle = self._began - self._ended > 0.002
        seconds = now - (self._began if idle else self._ended)
        self._ended = now
        while len(self._steps) > running:
            self.stepped(self._steps.popleft(), seconds)

    def stepped(self, step: Step, seconds: float) -> None:
        """A step has run."""
        self.model.learn(step, seconds)
