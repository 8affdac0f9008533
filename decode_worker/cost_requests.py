"""What the policy `cost` knows of each request, from its decision to its end."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pullfill.decode_worker.conditional_router import Situation
from pullfill.decode_worker.cost_choice import Choice, Expectation
from pullfill.decode_worker.cost_rates import Queue, Span, span
from pullfill.decode_worker.request_trace import Measured


@dataclass(frozen=True, slots=True)
class Targets:
    """What one request asked for, in seconds."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """What one step computes.

    streams: requests that get a token or two. computed: span of the prompts.
    first: requests that get their first token.
    known: False: it computes more than this, so its time teaches nothing."""

    streams: int
    computed: Span
    first: tuple[str, ...]
    known: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a decision ended, in milliseconds. regret: None: nothing to compare with."""

    first_token_ms: float
    regret_ms: float | None


@dataclass(slots=True)
class Placed:
    """A request from its decision to its end.

    raw_s: the prediction for `choice` without its bias. options: all predictions.
    compute_s: predicted computation of a remote prompt, alone.
    began: when a prefill worker is thought to have begun with it. 0: not yet.
    left: prompt tokens that are not computed yet, after `at` others.
    streaming: its first token is out."""

    targets: Targets
    decided: float
    choice: Choice
    tokens: int
    start: int
    options: tuple[Expectation, ...]
    raw_s: float
    queue: Queue
    waited_s: float = 0.0
    began: float = 0.0
    compute_s: float = 0.0
    left: int = 0
    at: int = 0
    streaming: bool = False
    measured: Measured | None = None


def queue_before(now: Situation, away: Collection[Placed], clock: float) -> Queue:
    """Return what is in front of a new job. Our own jobs progress with time, as predicted.

    away: our requests that a prefill worker computes, or will, oldest first."""
    x1 = x2 = whole1 = whole2 = 0.0
    tokens = 0
    finishes: list[float] = []
    for request in away:
        # As many as there are workers have begun. Each of the others begins when one has ended.
        before = finishes[max(0, len(finishes) - max(1, now.pool))] if finishes else clock
        begin = request.began or max(clock, before)
        finishes.append(begin + request.compute_s)
        took = max(request.compute_s, 1e-6)
        left = min(1.0, max(0.1, (finishes[-1] - clock) / took))
        own = span(request.start, request.tokens)
        whole1, whole2 = whole1 + own[0], whole2 + own[1]
        x1, x2 = x1 + left * own[0], x2 + left * own[1]
        tokens += request.tokens
    # Nobody says how long the prompts of other decode workers are. They are taken to be like
    # ours, or to be as long as this one.
    others = max(0, now.ahead_tokens - tokens) / 256.0
    mine = span(now.hit_tokens, now.remote_tokens)
    each = whole2 / whole1 if whole1 else mine[1] / mine[0] if mine[0] else 0.0
    jobs = max(now.ahead_jobs, len(away))
    return Queue(now.pullers, max(1, now.pool), jobs, (x1 + others, x2 + others * each))
