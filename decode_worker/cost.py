"""What a prefill is expected to cost here and at a prefill worker, for `router.policy = cost`.

    predict      what each choice would cost. The rule `cost` (rules.py) takes the cheapest
    admitted     vLLM has taken the request, so the decision counts
    plan         what the next step computes (worker/step_rule.py)
    stepped      what it has computed, and how long it took, and first tokens
    settled      a remote prefill has ended
    finished     the request is over

Predictions are made under every policy, so a change of policy begins with what was learned.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.rate import Rate, Share, fade, lately
from pullfill.worker import step_rule
from pullfill.worker.step_cost import Errors, StepCost
from pullfill.worker.step_meter import Step, StepModel
from pullfill.worker.step_rule import Prompt, Streams

# A shorter prompt says little about a prefill worker's speed.
PROBE_TOKENS = 64
# A plan tries step lengths for each target that streams have. Clients name targets, and with 200
# different ones a plan would take 70 ms. So similar ones count as the smallest of them.
_TARGETS = 8
# At most so many gaps that a stream can spare are counted. Streams are grouped by that number, too,
# and a plan takes longer with each group.
_SPARE = 4

# The length of prompt that tells an engine's rate.
RATE_TOKENS = 1024


class Queue(msgspec.Struct, frozen=True):
    """What the job of a prompt would meet."""

    workers: int = 1  # how many prefill workers pull
    jobs: int = 0  # in front of it, those in work included
    tokens: int = 0  # of these jobs, that are not computed yet
    rate: float = 0.0  # prompt tokens that one of the workers computes in a second. 0: unknown
    harm: float = 0.0  # what a second of that costs streams there, by the step rule's price


class Targets(msgspec.Struct, frozen=True):
    """What one request asked for, in seconds."""

    ttft_s: float
    itl_s: float


class Option(msgspec.Struct, frozen=True):
    """What one choice is expected to cost."""

    ttft_s: float  # seconds from now to the first token
    # About the number of requests that miss their targets by this choice: the prompt itself, whose
    # first token may be late, others behind it, and the streams, whose next tokens may be.
    cost: float


class Prefill(msgspec.Struct):
    """One prompt, from its prediction to its end."""

    targets: Targets
    decided: float
    waited_s: float  # how long it had waited when decided
    left: int  # prompt tokens that are not computed yet, after `at` others
    at: int
    local: Option  # computed here, in steps that spare the streams
    remote: Option | None = None  # by a prefill worker. None: none was measured yet
    # What is known of prefill workers is old, or nothing is, and no other prompt is about to find
    # out.
    probe: bool = False
    # Seconds that one prefill worker computes until it is done: it, and what goes before it.
    work: float = 0.0
    tokens: int = 0  # of the prompt, that were not cached
    alone: bool = False  # a prefill worker was free
    # What was chosen. None: nothing can be learned from it, as it became another choice.
    option: Option | None = None
    took_s: float | None = None  # from the decision to the first token. None: it has not come

    @property
    def regret_s(self) -> float | None:
        """How much sooner the other choice was expected. None: nothing to compare with."""
        other = self.remote if self.option is self.local else self.local
        if self.took_s is None or self.option is None or other is None:
            return None
        return max(0.0, self.took_s - other.ttft_s)

    def prompt(self, name: str) -> Prompt:
        """Return it as the step rule takes it."""
        arrival = self.decided - self.waited_s
        return Prompt(name, self.at, self.left, arrival + self.targets.ttft_s, arrival)


@dataclass(slots=True)
class Stream:
    """A request of ours that generates.

    since: number of the step of its first token. over: steps since then that took longer than its
    target of the time between tokens. prompt_tokens: that were not cached."""

    itl_s: float
    since: int
    prompt_tokens: int
    over: int = 0


class CostModel(StepModel):
    """See the module. Engine thread."""

    def __init__(
        self,
        step_tokens: int = 2048,  # most tokens in a step of this engine
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(clock)
        self._step_tokens = max(1, step_tokens)
        # What a remote prefill takes beside `Prefill.work` and the step here that makes the token.
        # It is not a share of the work: else short prompts, which hardly take anything but this,
        # would teach that long ones take minutes.
        self._beside = Rate()
        # The same for one with jobs in front. It also waits for jobs that come later and are due
        # sooner, or that others have sent. That passes, so it fades.
        self._behind = Rate()
        self._newest = -math.inf  # when it was decided about the last one that told that
        self._late = Errors()  # of the predictions of remote prefills
        self._rate = 0.0  # of prefill workers, as last told
        self.prompts = Share(clock)  # of the time, own and pulled ones
        self.first_tokens = Share(clock)  # uncached prompt tokens of own requests, each second
        self.prompt_s = self.ended = (0.0, 0.0, 0.0)  # seconds and tokens; as in a LoadReport
        # Each request that was admitted and is not over is in one of these.
        self._here: dict[str, Prefill] = {}
        self._away: dict[str, Prefill] = {}
        # Those whose KV has come and that no step has taken yet, in the order of their commits.
        self._loaded: dict[str, Prefill] = {}
        self._streams: dict[str, Stream] = {}
        self._admitted: tuple[dict[str, Any], ...]
        self._admitted = self._here, self._away, self._loaded, self._streams

    # ------------------------------------------------------------------ predictions

    @property
    def cost(self) -> StepCost:
        learned = super().cost
        if self.measured or not self._rate:
            return learned
        # If a worker that computes no prompt were taken to be slow, it would get none, and its
        # speed would stay unknown. So it is as fast as prefill workers are until it is measured.
        return msgspec.structs.replace(learned, token_s=1.0 / self._rate, pair_s=0.0)

    def base(self, streams: int) -> float:
        """Seconds of a step that only decodes."""
        return self.cost.base(streams, self.kv_tokens)

    def predict(
        self,
        queue: Queue,
        targets: Targets,
        start: int,
        tokens: int,
        waited_s: float = 0.0,
    ) -> Prefill:
        """Predict what each choice costs for a prompt of `tokens` tokens after a hit of `start`.

        queue: what its job would meet. waited_s: how long it has waited already."""
        now = self._clock.monotonic()
        self._rate = queue.rate or self._rate
        arrival = now - waited_s
        prompt = Prompt("", start, tokens, arrival + targets.ttft_s, arrival)
        ours = [each.prompt(name) for name, each in self._here.items()]
        cost, seconds = step_rule.quote(
            prompt, self.kept(), [*ours, *self.jobs], self.cost, self.errors,
            now=now, step_tokens=self._step_tokens,
        )  # fmt: skip
        one = Prefill(targets, now, waited_s, tokens, start, Option(seconds, cost), tokens=tokens)
        one.probe = not (self._away or self._beside.fresh(now) or self._behind.fresh(now))
        if self._rate and queue.workers:
            # What a prompt attends to counts there as it does here.
            here = self.cost
            times = RATE_TOKENS / self._rate / max(here.work(0, RATE_TOKENS), 1e-9)
            there = StepCost(token_s=here.token_s * times, pair_s=here.pair_s * times)
            one.alone = queue.jobs < queue.workers  # a prefill worker is free
            jobs, others_s, beside_s = list[Prompt](), 0.0, self._beside.a
            if not one.alone:
                jobs, others_s = self._jobs(queue, there, now)
                beside_s = max(beside_s, self._behind.a * fade(now - self._behind.at))
            beside_s += self.base(self.streams)
            cost, seconds = step_rule.quote(
                prompt, Streams(), jobs, there, self.errors,
                now=now + others_s + beside_s, step_tokens=self._step_tokens,
            )  # fmt: skip
            one.work = others_s + seconds
            ttft_s, left_s = one.work + beside_s, targets.ttft_s - waited_s
            alone_s = there.work(start, tokens)
            if ttft_s <= left_s:
                if not one.alone:  # prompts that come later may go before it
                    cost += self._late.beyond(left_s / ttft_s)
            elif others_s + beside_s + alone_s > left_s:
                # It has no vote there. But it has one if it could be in time here.
                cost += here.work(start, tokens) <= left_s
            cost += queue.harm * alone_s
            one.remote = Option(ttft_s, cost)
        return one

    def _jobs(self, queue: Queue, there: StepCost, now: float) -> tuple[list[Prompt], float]:
        """Return the jobs that one prefill worker has in front, or the seconds of them.

        All workers share the jobs evenly. How long others' jobs are, and when they are due, is not
        known. So they are taken to be like ours. Without ours all of them come first."""
        tokens = queue.tokens / queue.workers
        ours = [each.prompt(name) for name, each in islice(self._away.items(), step_rule.LOOK)]
        if not (known := sum(each.left for each in ours)):
            return [], there.work(0, RATE_TOKENS) / RATE_TOKENS * tokens
        count = min(tokens / known * len(ours), step_rule.LOOK - 1.0)
        jobs = [ours[int(number * len(ours) / count)] for number in range(math.ceil(count))]
        if jobs:  # one of them is in work, so a part of it is left
            part = count - len(jobs) + 1.0
            which = next((at for at, each in enumerate(jobs) if each.due > now), 0)
            left = round(part * jobs[which].left)
            jobs[which] = msgspec.structs.replace(jobs[which], left=left)
        return jobs, 0.0

    def pace(self, ttft_s: float) -> tuple[float, float]:
        """Return the `Load` of a job with this target: tokens_per_s, harm. Any thread."""
        seconds, price = step_rule.beside(
            RATE_TOKENS, ttft_s, self.kept(), self.cost, self.errors, step_tokens=self._step_tokens
        )
        if not self.measured or seconds <= 0.0:
            return 0.0, 0.0
        return RATE_TOKENS / seconds, price / seconds

    def kept(self) -> Streams:
        found: list[tuple[float, int]] = []
        for stream in list(self._streams.values()):  # another thread may ask
            # The 99th percentile of its gaps meets the target: one of 100 may be longer.
            left = (self.steps - stream.since) // 100 - stream.over
            if left >= 0:
                # The last one is kept for a step that takes longer than predicted.
                found.append((stream.itl_s, min(max(0, left - 1), _SPARE)))
        if len(each := {itl_s for itl_s, _ in found}) > _TARGETS:
            near = _near(each)
            found = [(near[itl_s], spare) for itl_s, spare in found]
        return Streams(len(self._streams), self.kv_tokens, Counter(found))

    # ------------------------------------------------------------------ what is under way

    def admitted(self, name: str, one: Prefill, remote: bool) -> bool:
        """Make a decision count. Returns False if it was decided about before.

        remote: False: vLLM computes it here, whatever was decided."""
        if any(name in each for each in self._admitted):
            return False
        one.option = one.remote if remote else one.local
        (self._away if remote else self._here)[name] = one
        return True

    def settled(self, name: str, loaded: bool) -> None:
        """Note that a remote prefill has ended. If its KV was not loaded, it is computed here."""
        if (one := self._away.pop(name, None)) is None:
            return
        if loaded:
            self._loaded[name] = one
        else:
            one.option = None
            self._here[name] = one

    def stepped(self, step: Step, seconds: float) -> None:
        """Learn from a step that has run."""
        now = self._clock.monotonic()
        first: list[str] = []
        for name in [name for name in self._here if name in step.tokens]:
            one, tokens = self._here[name], step.tokens[name]
            one.at, one.left = one.at + tokens, max(0, one.left - tokens)
            if not one.left:
                first.append(name)
        first += [name for name in self._loaded if name in step.tokens]
        if step.parts:
            prompts_s = max(0.0, seconds - self.base(step.streams))
            self.prompts.add(prompts_s)
            tokens = sum(count for _, count in step.parts)
            self.prompt_s = lately(self.prompt_s, (prompts_s, tokens, 1.0))
        self.learn(step, seconds)
        for stream in self._streams.values():
            stream.over += seconds > stream.itl_s
        for name in first:
            self._first_token(name, now)

    def finished(self, name: str) -> None:
        """Forget a request that is over."""
        if stream := self._streams.get(name):
            tokens = self.steps - stream.since + 1
            self.ended = lately(self.ended, (stream.prompt_tokens, tokens, 1.0))
        for each in self._admitted:
            each.pop(name, None)

    @property
    def undone(self) -> bool:
        """Whether prompts of our own are computed here. Any thread."""
        return bool(self._here)

    @property
    def prompt_token_s(self) -> float:
        """Seconds that a prompt token took lately."""
        seconds, tokens, _ = self.prompt_s
        return seconds / max(1.0, tokens)

    @property
    def requests(self) -> int:
        """Number of those that were admitted and are not over."""
        return sum(map(len, self._admitted))

    @property
    def streams(self) -> int:
        return len(self._streams)

    # ------------------------------------------------------------------ looking back

    def _first_token(self, name: str, now: float) -> None:
        away = name in self._loaded
        one = (self._loaded if away else self._here).pop(name)
        one.took_s = took = now - one.decided
        self.first_tokens.add(one.tokens)
        self._streams[name] = Stream(one.targets.itl_s, self.steps, one.tokens)
        if not away:
            return
        beside_s = max(0.0, took - self.base(self.streams) - one.work)
        # A job that others went before was late. That tells nothing of those that are not.
        if one.work and (one.alone or one.decided >= self._newest):
            self._newest = max(self._newest, one.decided)
            (self._beside if one.alone else self._behind).observe(1.0, 0.0, beside_s, now)
        if one.option is not None:
            self._late.stepped(one.option.ttft_s, took)


def _near(targets: Collection[float]) -> dict[float, float]:
    """Return for each target the one that stands for it, of at most _TARGETS. See there."""
    ordered = sorted(targets)
    size = max(1, -(-len(ordered) // _TARGETS))
    return {target: ordered[at - at % size] for at, target in enumerate(ordered)}
