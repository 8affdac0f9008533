"""Measures how many prompt tokens this worker computes in a second of work."""

from __future__ import annotations

from collections.abc import Iterable

from pullfill.prefill_worker.task import PrefillTask
from pullfill.wire import Load

HALF_S = 10.0
"""After this many seconds of work an older measurement counts half."""


class Meter:
    """Call `step` on the engine thread. Any thread may call `load`."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._until = 0.0

    def step(self, tokens: int, planned: float, done: float) -> None:
        """Note that a step computed `tokens` tokens.

        planned, done: when the step was scheduled, and when it had run. Steps that are in flight at
        the same time share that time."""
        seconds = done - max(planned, self._until)
        self._until = done
        if tokens and seconds > 0:
            weight = 0.5 ** (seconds / HALF_S)
            self._tokens = self._tokens * weight + tokens
            self._seconds = self._seconds * weight + seconds

    def load(self, tasks: Iterable[PrefillTask]) -> Load:
        """Return the load to report to decode workers. tasks: all tasks under way."""
        done = sum((t.scheduled - t.first_target) * t.block_size for t in tasks)
        rate = self._tokens / self._seconds if self._seconds else 0.0
        return Load(tokens_per_s=min(rate, 1e12), done_tokens=max(0, done))
