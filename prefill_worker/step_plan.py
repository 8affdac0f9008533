"""What is done when a step of the prefill worker's engine has run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pullfill.prefill_worker.task import PrefillTask


@dataclass(slots=True)
class Write:
    """Blocks of one task that are complete after this step, or may be read into."""

    task: PrefillTask
    local: list[int]
    remote: list[int]
    last: bool


@dataclass(slots=True)
class Reports:
    """Request ids that vLLM must be told of."""

    read_ok: set[str] = field(default_factory=set)
    read_failed: set[str] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)


@dataclass(slots=True)
class StepPlan:
    """What to do when one step has run: write the blocks that it computes, and begin prefix reads
    that had to wait for it.

    tokens: number of tokens that it computes.
    planned: when it was scheduled."""

    writes: list[Write] = field(default_factory=list)
    reads: list[Write] = field(default_factory=list)
    reports: Reports = field(default_factory=Reports)
    tokens: int = 0
    planned: float = field(default_factory=time.monotonic, compare=False)
