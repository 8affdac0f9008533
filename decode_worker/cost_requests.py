"""What the policy `cost` knows of each request, from its decision to its end."""

from __future__ import annotations

from dataclasses import dataclass

from pullfill.decode_worker.cost_choice import Choice, Expectation
from pullfill.decode_worker.cost_rates import Queue, Span
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
