"""Chooses where a prompt is computed, for `router.policy = cost`: remote, here at once, or here in
chunks that are small enough for the running streams.

Everything here is pure. A prediction says how long the first token would take, and how long the
longest step would be meanwhile. The cost of a choice is about the number of requests that miss
their targets by it: the prompt itself, whose first token may be late, and the streams that run
here, whose next token may be.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from pullfill.decode_worker.cost_rates import LocalRates, span

MIN_CHUNK = 32
"""Smallest chunk, in tokens. Smaller ones waste more time than they save, and a prompt must end."""
ITL_SHARE = 0.8
"""Share of the streams' target that a step with a chunk may take. The rest is for the error of the
prediction, and for what happens between steps."""
_TTFT_SHARP, _ITL_SHARP = 6.0, 16.0
"""How sharply a miss begins at the target. Times to a first token are predicted less well."""
_LATER = 0.05
"""Weight of the time itself, in targets. It decides between choices that miss no target, or all."""
HOLD = 0.9
"""A choice is kept while it costs at most 1 / HOLD times as much as the best one."""
HOLD_S = 5.0
"""How long the last choice is kept to. After that it counts no more than the others."""


class Choice(enum.StrEnum):
    REMOTE = "remote"
    AT_ONCE = "local"
    CHUNKED = "local_chunked"


class Streams(msgspec.Struct, frozen=True):
    """The running streams: how many there are for each ITL target, in seconds."""

    by_target: tuple[tuple[float, int], ...] = ()

    @property
    def count(self) -> int:
        return sum(count for _, count in self.by_target)


class Prompt(msgspec.Struct, frozen=True):
    """The prompt to place, and what this engine is doing.

    tokens: tokens beyond the hit. start: tokens of the hit.
    waited_s: how long it has waited already. ttft_s: target for its first token.
    backlog_s, backlog_tokens: computation of other prompts that is still to be done here.
    step_tokens: most tokens in a step."""

    tokens: int
    start: int
    ttft_s: float
    waited_s: float = 0.0
    backlog_s: float = 0.0
    backlog_tokens: int = 0
    step_tokens: int = 2048


class Expectation(msgspec.Struct, frozen=True):
    """What one choice is expected to cost.

    ttft_s: seconds from now to the first token. step_s: longest step of the streams meanwhile.
    harm_s: time that the streams wait beyond their targets, summed over them.
    cost: see the module."""

    choice: Choice
    ttft_s: float
    step_s: float
    harm_s: float
    cost: float


class Last(msgspec.Struct, frozen=True):
    """The last choice about a prompt of this length, and when it was made."""

    choice: Choice
    at: float


def chunk_tokens(rates: LocalRates, streams: Streams, start: int, most: int) -> int:
    """Return how many prompt tokens the next step may compute without a stream missing its target.

    start: number of tokens in front of them. most: returned if no stream runs.

    A step without prompts takes time as well. A target below half of that time is ignored, because
    smaller chunks hardly help. If all targets are ignored, twice that time is the target."""
    if not streams.by_target:
        return most
    base = rates.base(streams.count)
    able = (target for target, _ in streams.by_target if 2 * target > base)
    room = max(0.0, ITL_SHARE * min(able, default=2 * base) - base)
    return int(min(max(rates.fits(room, start), MIN_CHUNK), most))


def local(prompt: Prompt, rates: LocalRates, streams: Streams, *, chunked: bool) -> Expectation:
    """Predict the prefill by this worker."""
    middle = prompt.start + prompt.tokens // 2
    most = max(1, prompt.step_tokens)
    chunk = chunk_tokens(rates, streams, middle, most) if chunked else most
    tokens = prompt.tokens + prompt.backlog_tokens
    steps = max(1, -(-tokens // chunk))
    base = rates.base(streams.count)
    work = rates.work(span(prompt.start, prompt.tokens)) + prompt.backlog_s
    end = prompt.start + prompt.tokens
    # The last chunk attends to most. If chunks are sized for that, it has fewer tokens.
    last = min(chunk_tokens(rates, streams, end, most) if chunked else most, prompt.tokens)
    longest = base + rates.work(span(end - last, last))
    return _expect(
        Choice.CHUNKED if chunked else Choice.AT_ONCE,
        prompt, streams, work + steps * base, longest, base, steps,
    )  # fmt: skip


def remote(prompt: Prompt, rates: LocalRates, streams: Streams, ttft_s: float) -> Expectation:
    """Predict the prefill by a prefill worker. The last token is computed here, in a usual step."""
    base = rates.base(streams.count)
    return _expect(Choice.REMOTE, prompt, streams, ttft_s, base, base, 1)


def _expect(
    choice: Choice,
    prompt: Prompt,
    streams: Streams,
    ttft_s: float,
    longest: float,
    base: float,
    steps: int,
) -> Expectation:
    harm = missed = 0.0
    for target, count in streams.by_target:
        harm += count * steps * max(0.0, longest - max(target, base))
        missed += count * (miss(longest, target, _ITL_SHARP) - miss(base, target, _ITL_SHARP))
    cost = _late(prompt, ttft_s) + max(0.0, missed)
    return Expectation(choice, ttft_s, longest, harm, cost)


def corrected(found: Expectation, prompt: Prompt, factor: float) -> Expectation:
    """Return the expectation with a first token that takes `factor` times as long."""
    before = _late(prompt, found.ttft_s)
    ttft_s = found.ttft_s * factor
    cost = found.cost - before + _late(prompt, ttft_s)
    return Expectation(found.choice, ttft_s, found.step_s, found.harm_s, cost)


def _late(prompt: Prompt, ttft_s: float) -> float:
    """The cost of a first token after this time."""
    late = prompt.waited_s + ttft_s
    return miss(late, prompt.ttft_s, _TTFT_SHARP) + _LATER * late / prompt.ttft_s


def miss(seconds: float, target: float, sharp: float) -> float:
    """Return how likely it is that a time that is predicted so misses the target, from 0 to 1."""
    if seconds * 10 < target:
        return 0.0
    ratio: float = (target / seconds) ** sharp
    return 1.0 / (1.0 + ratio)


def choose(options: Sequence[Expectation], last: Last | None, now: float) -> Expectation:
    """Return the option with the lowest cost. The last choice is kept if it costs little more.

    options: at least one."""
    best = min(options, key=lambda option: option.cost)
    if last is None or now - last.at > HOLD_S:
        return best
    kept = next((option for option in options if option.choice is last.choice), best)
    return kept if kept.cost * HOLD <= best.cost else best
