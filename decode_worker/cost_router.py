"""The policy `cost`: keeps what was learned and what is under way, decides, and looks back.

    place         a prompt that could go either way, or must stay: where, and in chunks or not
    admitted      vLLM has taken it, so the decision counts
    scheduled     what a step computes
    stepped       how long it took. First tokens are compared with their predictions
    committed     what a prefill worker has measured of a remote prefill
    settled       a remote prefill has ended
    finished      the request is over

Engine thread only, but for `committed`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import count

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.decode_worker import cost_choice
from pullfill.decode_worker.cost_choice import Choice, Expectation, Last, Prompt, Streams
from pullfill.decode_worker.cost_groups import Away, Here, change
from pullfill.decode_worker.cost_rates import (
    Bias,
    Handoff,
    LocalRates,
    Queue,
    RemoteRates,
    span,
)
from pullfill.decode_worker.cost_requests import Outcome, Placed, Step, Targets
from pullfill.decode_worker.request_trace import Measured
from pullfill.decode_worker.rules import Decision, Situation, by_length
from pullfill.runtime import metrics
from pullfill.wire import PredictedMs, RouterPolicy

REMOTE_REASON, LOCAL_REASON = "cost_remote", "cost_local"
CHUNKED_REASON, PROBE_REASON = "cost_chunked", "cost_probe"
_REASONS = {
    Choice.REMOTE: REMOTE_REASON,
    Choice.AT_ONCE: LOCAL_REASON,
    Choice.CHUNKED: CHUNKED_REASON,
}

PROBE_TOKENS = 64
"""A shorter prompt says little about a prefill worker's speed."""
STREAM_TOKENS = 8
"""A request that gets at most so many tokens in a step counts as a stream. A stream gets one token
and its drafts. If there are more drafts than that, the limit is higher."""


class CostRouter:
    """See the module.

    step_tokens: most tokens in a step of this engine. stream_tokens: of one stream.
    chunks: whether prompts can be computed in chunks here.
    watch: is told the error of each prediction, as a share of the outcome."""

    def __init__(
        self,
        step_tokens: int = 2048,
        *,
        chunks: bool = True,
        stream_tokens: int = STREAM_TOKENS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.rates = LocalRates()
        self.remote = RemoteRates()
        self._step_tokens = step_tokens
        self._stream_tokens = max(stream_tokens, STREAM_TOKENS)
        self._chunks = chunks
        self._clock = clock
        self._bias = {choice: Bias() for choice in Choice}
        self._requests: dict[str, Placed] = {}
        self._here = Here()
        self._away = Away()
        # Requests whose KV has come and that no step has taken yet, with serials of their commits.
        self._loaded: dict[str, int] = {}
        self._commits = count()
        self._itl: dict[float, int] = {}
        self._last: dict[int, Last] = {}
        self._committed: deque[Measured] = deque()
        self.watch: Callable[[float], None] = lambda _: None
        self._proposed: dict[str, Placed] = {}

    # ------------------------------------------------------------------ deciding

    def place(
        self,
        request_id: str,
        able: Decision,
        now: Situation,
        targets: Targets,
        waited_s: float = 0.0,
    ) -> Decision:
        """Decide about one prompt.

        able: what `rules.decide` says: remote if nothing prevents that.
        waited_s: how long the prompt has waited already."""
        self._learn()
        clock = self._clock.monotonic()
        tokens = max(1, now.prompt_tokens - now.hit_tokens)
        # The running streams, and those that begin when remote prefills have ended.
        streams = self._away.streams(self._itl)
        prompt = Prompt(
            tokens, now.hit_tokens, targets.ttft_s, waited_s, self._here.seconds(self.rates),
            self._here.tokens, self._step_tokens,
        )  # fmt: skip
        queue, raw = self._away.queue(now, clock), dict[Choice, float]()
        self.rates.assume(self.remote.each(queue.instances), clock)
        options = []
        for chunked in (False, True) if self._chunks else (False,):
            found = cost_choice.local(prompt, self.rates, streams, chunked=chunked)
            raw[found.choice] = found.ttft_s
            options.append(self._corrected(found, prompt, streams, clock))
        own = span(now.hit_tokens, now.remote_tokens)
        raw[Choice.REMOTE] = self.remote.seconds(queue, own, now.kv_bytes, clock)
        there = cost_choice.remote(prompt, self.rates, streams, raw[Choice.REMOTE])
        there = self._corrected(there, prompt, streams, clock)
        # A prompt that fits into one chunk is the same either way.
        if len(options) > 1 and raw[Choice.AT_ONCE] == raw[Choice.CHUNKED]:
            options.pop()
        decision, choice = self._decide(able, now, options, there, queue, clock)
        known = (*options, there) if self.remote.known(queue.instances) else tuple(options)
        request = Placed(
            targets, clock, choice, tokens, now.hit_tokens, known, raw[choice], queue,
            waited_s=waited_s, left=tokens, at=now.hit_tokens,
        )  # fmt: skip
        if choice is Choice.REMOTE:
            alone = replace(queue, jobs=0)
            request.compute_s = self.remote.seconds(alone, own, 0.0, clock)
        self._proposed[request_id] = request
        return decision

    def _decide(
        self,
        able: Decision,
        now: Situation,
        options: list[Expectation],
        there: Expectation,
        queue: Queue,
        clock: float,
    ) -> tuple[Decision, Choice]:
        if now.config.policy is not RouterPolicy.COST:
            return able, Choice.REMOTE if able.remote else Choice.AT_ONCE
        here = min(options, key=lambda option: option.cost)
        if not able.remote:
            return able, here.choice
        if not self._away and not self.remote.fresh(queue.instances, clock):
            # What is known of the prefill workers is old, or nothing is. One prompt finds out.
            if now.remote_tokens >= PROBE_TOKENS:
                return Decision(True, PROBE_REASON), Choice.REMOTE
        if not self.remote.known(queue.instances):
            decision = by_length(now)
            return decision, Choice.REMOTE if decision.remote else here.choice
        key = (now.prompt_tokens - now.hit_tokens).bit_length()
        best = cost_choice.choose([*options, there], self._last.get(key), clock)
        self._last[key] = Last(best.choice, clock)
        return Decision(best.choice is Choice.REMOTE, _REASONS[best.choice]), best.choice

    def _corrected(
        self, found: Expectation, prompt: Prompt, streams: Streams, clock: float
    ) -> Expectation:
        factor = self._bias[found.choice].factor(clock)
        return cost_choice.corrected(found, prompt, factor)

    # ------------------------------------------------------------------ what is under way

    def admitted(self, request_id: str, remote: bool) -> tuple[str, PredictedMs | None]:
        """Make the last decision about a request count. Returns its choice and its predictions.

        remote: False: vLLM computes it here, whatever was decided."""
        made = self._proposed.pop(request_id, None)
        if made is None or request_id in self._requests:
            return "", None
        if not remote and made.choice is Choice.REMOTE:
            made.choice = Choice.CHUNKED if self._chunks else Choice.AT_ONCE
            made.raw_s = 0.0
        self._requests[request_id] = made
        if remote:
            self._away.add(request_id, made, self._clock.monotonic())
        else:
            self._here.add(request_id, made)
        return made.choice.value, _shown(made.options)

    def begin_here_in(self, request_id: str) -> float | None:
        """Return in how many seconds a remote prompt must begin here to meet its target for the
        first token. None: it cannot any more, or nothing is known."""
        if (request := self._away.get(request_id)) is None:
            return None
        here = min(o.ttft_s for o in request.options if o.choice is not Choice.REMOTE)
        left = request.targets.ttft_s - request.waited_s - here
        return left if left > 0 else None

    def settled(self, request_id: str, loaded: bool) -> None:
        """Note that a remote prefill has ended. If its KV was not loaded, it is computed here."""
        request = self._away.pop(request_id, self._clock.monotonic())
        if request is not None and loaded:
            self._loaded[request_id] = next(self._commits)
        elif request is not None:
            request.raw_s = 0.0
            request.choice = Choice.CHUNKED if self._chunks else Choice.AT_ONCE
            self._here.add(request_id, request)

    def scheduled(self, tokens: Mapping[str, int], total: int) -> Step:
        """Note what the next step will compute.

        tokens: number of tokens for each request in it. total: their sum."""
        x1 = x2 = 0.0
        prompts, others = 0, total
        first = []
        for name, request, now in self._here.among(tokens):
            if now > self._stream_tokens:
                prompts, others = prompts + 1, others - now
                own = span(request.at, now)
                x1, x2 = x1 + own[0], x2 + own[1]
            self._here.computed(request, now)
            if not request.left:
                first.append(name)
        if self._loaded:
            first += sorted(tokens.keys() & self._loaded.keys(), key=self._loaded.__getitem__)
        for name in first:
            self._here.pop(name)
            self._loaded.pop(name, None)
        streams = len(tokens) - prompts
        return Step(streams, (x1, x2), tuple(first), others <= self._stream_tokens * streams)

    def stepped(self, step: Step, seconds: float) -> list[tuple[str, Outcome]]:
        """Learn from a step that has run. Returns the requests whose first token it made."""
        now = self._clock.monotonic()
        if step.known:
            self.rates.step(step.streams, step.computed, seconds, now)
        return [
            (name, self._first_token(request, now))
            for name in step.first
            if (request := self._requests.get(name)) is not None
        ]

    def finished(self, request_id: str) -> None:
        """Forget a request that is over."""
        self._proposed.pop(request_id, None)
        self._here.pop(request_id)
        self._away.pop(request_id, self._clock.monotonic())
        self._loaded.pop(request_id, None)
        request = self._requests.pop(request_id, None)
        if request is not None and request.streaming:
            change(self._itl, request.targets.itl_s, -1)

    def chunk(self) -> tuple[int, int]:
        """Return how many prompt tokens the next step may compute, and in how many prompts.

        0: as many as fit into a step."""
        if not self._itl or not self._chunks:
            return 0, 0
        streams = Streams(tuple(self._itl.items()))
        start = at_once = 0
        for request in self._here:
            start = max(start, request.at)
            if request.choice is Choice.AT_ONCE and not self._slow_down(request, streams):
                at_once += request.left
        most = cost_choice.chunk_tokens(self.rates, streams, start, self._step_tokens)
        # A prompt that is computed at once gets what it needs. Those that come meanwhile do not.
        return (at_once, 1) if at_once > most else (most, len(self._here))

    def _slow_down(self, request: Placed, streams: Streams) -> bool:
        """Whether a prompt that is computed at once goes on in chunks: streams have begun."""
        waited = self._clock.monotonic() - request.decided + request.waited_s
        left = Prompt(
            max(1, request.left), request.at, request.targets.ttft_s, waited,
            step_tokens=self._step_tokens,
        )  # fmt: skip
        chunks = cost_choice.local(left, self.rates, streams, chunked=True)
        if chunks.cost > cost_choice.local(left, self.rates, streams, chunked=False).cost:
            return False
        request.choice, request.raw_s = Choice.CHUNKED, 0.0
        return True

    @property
    def streams(self) -> int:
        return sum(self._itl.values())

    @property
    def tightest_itl_s(self) -> float:
        """The least target of the running streams. 0: there is no stream.

        A target that not even one stream alone meets would be missed however many workers there
        are. If no other is left, twice the time of such a step takes its place."""
        alone = self.rates.alone
        return min((t for t in self._itl if t > alone), default=2 * alone if self._itl else 0.0)

    # ------------------------------------------------------------------ looking back

    def committed(self, done: Measured) -> None:
        """Note what a prefill worker has measured. asyncio thread."""
        self._committed.append(done)

    def _learn(self) -> None:
        """Take what `committed` has noted."""
        while self._committed:
            done = self._committed.popleft()
            if (request := self._requests.get(done.request_id)) is not None:
                request.measured = done

    def _first_token(self, request: Placed, now: float) -> Outcome:
        self._learn()
        request.streaming = True
        change(self._itl, request.targets.itl_s, 1)
        took = now - request.decided
        path = request.choice.value
        if request.choice is Choice.REMOTE and request.measured is not None:
            self._learn_handoff(request, request.measured, took, now)
        chosen = next((o for o in request.options if o.choice is request.choice), None)
        others = [o.ttft_s for o in request.options if o.choice is not request.choice]
        metrics.COST_OUTCOME.observe(path, took)
        if request.raw_s <= 0 or chosen is None:
            return Outcome(took * 1e3, None)
        self._bias[request.choice].observe(took, request.raw_s, now)
        metrics.COST_PREDICTED.observe(path, chosen.ttft_s)
        error = abs(chosen.ttft_s / took - 1.0) if took > 0 else 0.0
        metrics.COST_ERROR.observe(path, error)
        self.watch(error)
        regret = max(0.0, took - min(others)) if others else None
        if regret is not None:
            metrics.COST_REGRET.observe(path, regret)
        return Outcome(took * 1e3, None if regret is None else regret * 1e3)

    def _learn_handoff(self, request: Placed, done: Measured, took: float, now: float) -> None:
        stages = done.stages
        # Everything until the end of the computation, without the way of the claim.
        compute = done.at - request.decided - (stages.tail_ms + stages.claim_ms) / 1e3
        write = stages.kv_write_ms / 1e3
        more = took - compute - max(0.0, write - stages.prefill_ms / 1e3)
        own = span(request.start, request.tokens - 1)
        handoff = Handoff(
            done.instance, done.transport, request.queue.share, own, done.kv_bytes,
            max(0.0, compute), write, max(0.0, more),
        )  # fmt: skip
        self.remote.observe(handoff, now)


def _shown(options: Iterable[Expectation]) -> PredictedMs | None:
    found = {option.choice: option.ttft_s * 1e3 for option in options}
    return PredictedMs(
        local=found.get(Choice.AT_ONCE),
        local_chunked=found.get(Choice.CHUNKED),
        remote=found.get(Choice.REMOTE),
    )
