"""What the serving benchmark's parts promise each other.

A *workload* is a list of `Ask`s, made from a seed before anything runs. A *system* is started
fresh by its launcher and gives a `Running`. The *load* sends the asks and returns an `Answer` each.
All times are seconds of `time.monotonic`, in answers relative to the start of the window.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path


class Kind(enum.StrEnum):
    """SHORT: the streams whose ITL is watched; LONG: prompts that interfere; TURN: of a chat."""

    SHORT = "short"
    LONG = "long"
    TURN = "turn"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. prompt: token ids (as `/v1/completions` takes them).

    at_s: when it is sent, from the window's start; None: as soon as `lane` is free. Asks of one
    lane (a stream, a conversation) follow each other, whatever `at_s` says.
    grows: the answer's tokens and the prompt of this ask are put in front of the next one's prompt.
    """

    kind: Kind
    prompt: tuple[int, ...]
    max_tokens: int
    lane: str
    at_s: float | None = None
    grows: bool = False


@dataclass(slots=True)
class Answer:
    """What came. sent_s: when the request was sent; due_s: when it should have been (open loop),
    else the same. token_s: when each token came. cached: prompt tokens the server said it had.
    error: why it failed, or ""."""

    ask: Ask
    sent_s: float
    due_s: float
    token_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: int | None = None
    request_id: str = ""
    error: str = ""


@dataclass(slots=True)
class Running:
    """A system that is ready. url: where it answers. pids: every process of it and what it is
    called; whatever they start belongs to them."""

    name: str
    url: str
    model: str
    pids: dict[int, str]
    ready_s: float
    set_policy: Callable[..., None] | None = None
    """Sets `router.policy` while the system runs, and by keyword other settings of the router.
    Returns when the workers follow. None: the system has no such setting."""


Launcher = Callable[[Path], AbstractContextManager[Running]]
"""Starts a system with its logs and state below the folder; ends all of it at exit. Raises
`benchmarks.live.BenchError` when it does not start."""


@dataclass(frozen=True, slots=True)
class System:
    """name: short, as in tables; note: how it was set up, as a reader must know it; aggregated: one
    engine does a request's prefill and decode (they are who must be beaten); ours: pullfill."""

    name: str
    note: str
    launch: Launcher
    aggregated: bool = False
    ours: bool = False


class Name(enum.StrEnum):
    """Systems that the verdicts look for. 1P1D where nothing else is said."""

    AGGREGATED = "aggregated"
    AGGREGATED_256 = "aggregated-256"
    ROUND_ROBIN = "round-robin"
    NIXL = "nixl"
    PULLFILL = "pullfill"
    ONE_CORE = "one-core"
