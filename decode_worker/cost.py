"""What a prefill is expected to cost here and at a prefill worker, for `router.policy = cost`.

    predict      what each choice would cost. The rule `cost` (rules.py) takes the cheapest
    admitted     vLLM has taken the request, so the decision counts
    scheduled    what a step computes
    stepped      how long it took. First tokens are compared with their predictions
    settled      a remote prefill has ended
    finished     the request is over

Predictions are made under every policy, so a change of policy begins with what was learned.

A stretch of a prompt is told as `span(start, tokens)`: two numbers that its computation time is
linear in, one for its tokens and one for what they attend to.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.rate import Rate
from pullfill.wire import PredictedMs

# A shorter prompt says little about a prefill worker's speed.
PROBE_TOKENS = 64
# Smallest chunk, in tokens. Smaller ones waste more time than they save, and a prompt must end.
MIN_CHUNK = 32
# Share of the streams' target that a step with a chunk may take. The rest is for the error of
# the prediction, and for what happens between steps.
ITL_SHARE = 0.8
# How sharply a miss begins at the target. Times to a first token are predicted less well.
_TTFT_SHARP, _ITL_SHARP = 6.0, 16.0
# Weight of the time itself, in targets. It decides between choices that miss no target, or all.
_LATER = 0.05
# A request that gets at most so many tokens in a step counts as a stream. A stream gets one
# token and its drafts. If there are more drafts than that, the limit is higher.
_STREAM_TOKENS = 8

# The number of running streams for each target of the time between tokens, in seconds.
Streams = Mapping[float, int]
Span = tuple[float, float]


def span(start: int, tokens: int) -> Span:
    """Return the two numbers for `tokens` tokens that follow `start` others. See the module."""
    return tokens / 256.0, tokens * (start + tokens / 2.0) / 262_144.0


class Queue(msgspec.Struct, frozen=True):
    """What the job of a prompt would meet."""

    workers: int = 1  # how many prefill workers pull
    jobs: int = 0  # in front of it, those in work included
    tokens: int = 0  # of these jobs, that are not computed yet

    @property
    def ahead(self) -> float:
        """The tokens that one prefill worker has to compute before it can begin this prompt.

        The jobs in front are shared evenly by all prefill workers."""
        if self.jobs < self.workers:
            return 0.0  # a prefill worker is free
        return self.tokens / max(1, self.workers)


class Choice(enum.StrEnum):
    """Where a prompt is computed. LOCAL: in chunks that are small enough for the streams."""

    REMOTE = "remote"
    LOCAL = "local"


class Targets(msgspec.Struct, frozen=True):
    """What one request asked for, in seconds."""

    ttft_s: float
    itl_s: float


class Option(msgspec.Struct, frozen=True):
    """What one choice is expected to cost."""

    ttft_s: float  # seconds from now to the first token
    # About the number of requests that miss their targets by this choice: the prompt itself, whose
    # first token may be late, and the streams, whose next token may be.
    cost: float


class Prefill(msgspec.Struct):
    """One prompt, from its prediction to its end."""

    targets: Targets
    decided: float
    waited_s: float  # how long it had waited when decided
    left: int  # prompt tokens that are not computed yet, after `at` others
    at: int
    # What each choice costs. Without REMOTE: no remote prefill was measured yet.
    options: dict[Choice, Option] = {}
    # What is known of prefill workers is old, or nothing is, and no other prompt is about to find
    # out.
    probe: bool = False
    # What one prefill worker computes until it is done: its part of the queue, and the prompt.
    work: Span = (0.0, 0.0)
    choice: Choice = Choice.LOCAL
    # What was chosen. None: nothing can be learned from it, as it became another choice.
    option: Option | None = None
    streaming: bool = False  # its first token is out

    def cheapest(self) -> Choice:
        """Return the choice that has the least cost. Of equals it is LOCAL."""
        return min(self.options, key=lambda choice: self.options[choice].cost)


class Step(msgspec.Struct, frozen=True):
    """What one step computes."""

    streams: int  # requests that get a token or two
    computed: Span  # span of the prompts
    first: tuple[str, ...]  # requests that get their first token
    known: bool  # false: it computes more than this, so its time teaches nothing


@dataclass(frozen=True, slots=True)
class FirstToken:
    """How a decision ended, in milliseconds."""

    first_token_ms: float
    regret_ms: float | None = None  # None: nothing to compare with
    # Error of the prediction, as a share of the outcome. None: there was none.
    error: float | None = None


class Prompts:
    """Prompts that are being computed, with their sums. A decision reads the sums, not each prompt:
    otherwise a decision beside 1,000 prompts takes milliseconds."""

    def __init__(self) -> None:
        self.all: dict[str, Prefill] = {}
        # Number of these prompts for each target of the time between tokens.
        self.itl: dict[float, int] = {}
        self.tokens = 0
        # Adding and subtracting makes no rounding error, because a span is a multiple of 2**-19.
        self._x1 = self._x2 = 0.0

    @property
    def span(self) -> Span:
        return self._x1, self._x2

    def add(self, name: str, one: Prefill) -> None:
        self.all[name] = one
        self._count(one, 1)
        change(self.itl, one.targets.itl_s, 1)

    def pop(self, name: str) -> Prefill | None:
        if (one := self.all.pop(name, None)) is not None:
            self._count(one, -1)
            change(self.itl, one.targets.itl_s, -1)
        return one

    def computed(self, one: Prefill, tokens: int) -> None:
        """Note that the next step computes so many tokens of a prompt."""
        self._count(one, -1)
        one.at += tokens
        one.left = max(0, one.left - tokens)
        self._count(one, 1)

    def _count(self, one: Prefill, sign: int) -> None:
        x1, x2 = span(one.at, one.left)
        self._x1 += sign * x1
        self._x2 += sign * x2
        self.tokens += sign * one.left


class EngineRates:
    """How fast this worker's own engine is. Engine thread.

    A step takes a time that grows with the number of streams, and more if it computes prompts."""

    def __init__(self) -> None:
        self._decode = Rate()
        self._prefill = Rate()

    def step(self, streams: int, computed: Span, seconds: float, now: float) -> None:
        """Learn from one step. streams: requests that got one token in it."""
        if computed[0] > 0:
            self._prefill.observe(*computed, max(0.0, seconds - self.base(streams)), now)
        elif streams:
            self._decode.observe(1.0, streams / 8.0, seconds, now)

    def assume(self, remote: Rate, now: float) -> None:
        """Believe that prompts are computed as fast as prefill workers do, unless they were
        measured lately.

        Without this, a worker that computes no prompt would never learn that it could. An old
        measurement counts if it is faster."""
        usual, fit = span(0, 1024), self._prefill
        if not fit.count or (not fit.fresh(now) and 0 < remote.of(*usual) < fit.of(*usual)):
            fit.a, fit.b = remote.a, remote.b

    def base(self, streams: int) -> float:
        """Seconds of a step that only decodes."""
        return self._decode.of(1.0, streams / 8.0)

    def work(self, of: Span) -> float:
        """Seconds that the computation of a span adds to steps."""
        return self._prefill.of(*of)

    def chunk(self, streams: Streams, start: int, most: int) -> int:
        """Return how many prompt tokens the next step may compute without a stream missing its
        target.

        start: number of tokens in front of them. most: returned if no stream runs.

        A step without prompts takes time as well. A target below half of that time is ignored,
        because smaller chunks hardly help. If all are ignored, twice that time is the target."""
        if not streams:
            return most
        base = self.base(sum(streams.values()))
        able = (target for target in streams if 2 * target > base)
        room = max(0.0, ITL_SHARE * min(able, default=2 * base) - base)
        each = self._prefill.of(1 / 256.0, start / 262_144.0)
        return int(min(max(room / each if each > 0 else math.inf, MIN_CHUNK), most))


class CostModel:
    """See the module. Engine thread."""

    def __init__(
        self,
        step_tokens: int = 2048,  # most tokens in a step of this engine
        *,
        stream_tokens: int = 1,  # of one stream
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.rates = EngineRates()
        self._step_tokens = max(1, step_tokens)
        self._stream_tokens = max(stream_tokens, _STREAM_TOKENS)
        self._clock = clock
        # Seconds from the decision to the first token over the span of `Prefill.work`, less the
        # step here that makes the token. Whatever else a remote prefill takes is part of it.
        self._remote = Rate()
        self._requests: dict[str, Prefill] = {}
        self._here, self._away = Prompts(), Prompts()
        # Requests whose KV has come and that no step has taken yet, in the order of their commits.
        self._loaded: dict[str, None] = {}
        self._itl: dict[float, int] = {}

    # ------------------------------------------------------------------ predictions

    def predict(
        self,
        queue: Queue,
        targets: Targets,
        start: int,
        tokens: int,
        waited_s: float = 0.0,
        *,
        chunks: bool = True,
    ) -> Prefill:
        """Predict what each choice costs for a prompt of `tokens` tokens after a hit of `start`.

        queue: what its job would meet. waited_s: how long it has waited already.
        chunks: whether steps are limited to what `chunk` returns."""
        now, away, remote = self._clock.monotonic(), self._away, self._remote
        self.rates.assume(remote, now)
        one = Prefill(targets, now, waited_s, tokens, start)
        # The running streams, and those that begin when remote prefills have ended.
        streams = dict(self._itl)
        for target, count in away.itl.items():
            streams[target] = streams.get(target, 0) + count
        one.options[Choice.LOCAL] = self._local(one, streams, chunks)
        x1, x2 = span(start, max(0, tokens - 1))
        # How long the prompts in front are is not known, so neither is what they attend to.
        one.work = x1 + queue.ahead / 256.0, x2
        one.probe = not away.all and not remote.fresh(now)
        if remote.count and queue.workers:
            base = self.rates.base(sum(streams.values()))
            ttft_s = remote.of(*one.work) + base
            one.options[Choice.REMOTE] = self._option(one, ttft_s, base, streams)
        return one

    def _local(self, one: Prefill, streams: Streams, chunks: bool) -> Option:
        rates, most = self.rates, self._step_tokens
        at, left, end = one.at, one.left, one.at + one.left
        before = self._here  # these prompts are computed first
        chunk = last = most
        if chunks:
            chunk = rates.chunk(streams, at + left // 2, most)
            # The last chunk attends to most. So it has fewer tokens.
            last = rates.chunk(streams, end, most)
        last = min(last, left)
        steps = max(1, -(-(left + before.tokens) // chunk))
        base = rates.base(sum(streams.values()))
        ttft_s = rates.work(span(at, left)) + rates.work(before.span) + steps * base
        longest = base + rates.work(span(end - last, last))
        return self._option(one, ttft_s, longest, streams)

    def _option(self, one: Prefill, ttft_s: float, step_s: float, streams: Streams) -> Option:
        """step_s: the longest step of the streams meanwhile."""
        late, target = one.waited_s + ttft_s, one.targets.ttft_s
        cost = miss(late, target, _TTFT_SHARP) + _LATER * late / target
        base = self.rates.base(sum(streams.values()))
        for target, count in streams.items():
            more = miss(step_s, target, _ITL_SHARP) - miss(base, target, _ITL_SHARP)
            cost += count * max(0.0, more)
        return Option(ttft_s, cost)

    # ------------------------------------------------------------------ what is under way

    def admitted(self, name: str, one: Prefill, remote: bool) -> PredictedMs | None:
        """Make a decision count. Returns what was predicted. None: it was decided about before.

        remote: False: vLLM computes it here, whatever was decided."""
        if name in self._requests:
            return None
        one.choice = Choice.REMOTE if remote else Choice.LOCAL
        one.option = one.options.get(one.choice)
        self._requests[name] = one
        (self._away if remote else self._here).add(name, one)
        found = {choice.value: option.ttft_s * 1e3 for choice, option in one.options.items()}
        return PredictedMs(**found)

    def settled(self, name: str, loaded: bool) -> None:
        """Note that a remote prefill has ended. If its KV was not loaded, it is computed here."""
        if (one := self._away.pop(name)) is None:
            return
        if loaded:
            self._loaded[name] = None
        else:
            one.choice, one.option = Choice.LOCAL, None
            self._here.add(name, one)

    def scheduled(self, tokens: Mapping[str, int], total: int) -> Step:
        """Note what the next step will compute.

        tokens: number of tokens for each request in it. total: their sum."""
        x1 = x2 = 0.0
        prompts, others, here = 0, total, self._here.all
        first = []
        few = here if len(here) < len(tokens) else tokens
        for name in [name for name in few if name in here and tokens.get(name)]:
            one, now = here[name], tokens[name]
            if now > self._stream_tokens:
                prompts, others = prompts + 1, others - now
                own = span(one.at, now)
                x1, x2 = x1 + own[0], x2 + own[1]
            self._here.computed(one, now)
            if not one.left:
                self._here.pop(name)
                first.append(name)
        for name in [name for name in self._loaded if name in tokens]:
            del self._loaded[name]
            first.append(name)
        streams = len(tokens) - prompts
        return Step(streams, (x1, x2), tuple(first), others <= self._stream_tokens * streams)

    def stepped(self, step: Step, seconds: float) -> list[tuple[str, FirstToken]]:
        """Learn from a step that has run. Returns the requests whose first token it made."""
        now = self._clock.monotonic()
        if step.known:
            self.rates.step(step.streams, step.computed, seconds, now)
        return [
            (name, self._first_token(one, now))
            for name in step.first
            if (one := self._requests.get(name)) is not None
        ]

    def finished(self, name: str) -> None:
        """Forget a request that is over."""
        self._here.pop(name)
        self._away.pop(name)
        self._loaded.pop(name, None)
        one = self._requests.pop(name, None)
        if one is not None and one.streaming:
            change(self._itl, one.targets.itl_s, -1)

    def chunk(self) -> tuple[int, int]:
        """Return how many prompt tokens the next step may compute, and in how many prompts.

        0: as many as fit into a step."""
        if not self._itl:
            return 0, 0
        here = self._here.all.values()
        start = max((one.at for one in here), default=0)
        return self.rates.chunk(self._itl, start, self._step_tokens), len(here)

    @property
    def streams(self) -> int:
        return sum(self._itl.values())

    # ------------------------------------------------------------------ looking back

    def _first_token(self, one: Prefill, now: float) -> FirstToken:
        one.streaming = True
        change(self._itl, one.targets.itl_s, 1)
        took = now - one.decided
        if one.choice is Choice.REMOTE:
            step_s = self.rates.base(self.streams)
            self._remote.observe(*one.work, max(0.0, took - step_s), now)
        if one.option is None or one.option.ttft_s <= 0:
            return FirstToken(took * 1e3)
        error = abs(one.option.ttft_s / took - 1.0) if took > 0 else 0.0
        other = Choice.LOCAL if one.choice is Choice.REMOTE else Choice.REMOTE
        if other not in one.options:
            return FirstToken(took * 1e3, error=error)
        regret = max(0.0, took - one.options[other].ttft_s)
        return FirstToken(took * 1e3, regret * 1e3, error)


def miss(seconds: float, target: float, sharp: float) -> float:
    """Return how likely it is that a time that is predicted so misses the target, from 0 to 1."""
    if seconds * 10 < target:
        return 0.0
    ratio: float = (target / seconds) ** sharp
    return 1.0 / (1.0 + ratio)


def change(counts: dict[float, int], key: float, by: int) -> None:
    """Add to one of several counts. One that becomes 0 is left out."""
    counts[key] = counts.get(key, 0) + by
    if not counts[key]:
        del counts[key]
