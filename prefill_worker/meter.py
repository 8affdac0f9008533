"""How many prompt tokens this worker computes in a second of work, lately."""

from __future__ import annotations

from collections.abc import Iterable

from pullfill.prefill_worker.task import PrefillTask
from pullfill.wire import Load

HALF_S = 10.0
"""Of work, after which an older measurement counts half."""


class Meter:
    """`step` belongs to the engine thread; `load` may be called by any."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._until = 0.0

    def step(self, tokens: int, planned: float, done: float) -> None:
        """A step computed so many tokens. planned, done: when it was scheduled and had run; steps
        in flight together share the time."""
        seconds = done - max(planned, self._until)
        self._until = done
        if tokens and seconds > 0:
            weight = 0.5 ** (seconds / HALF_S)
            self._tokens = self._tokens * weight + tokens
            self._seconds = self._seconds * weight + seconds

    def load(self, tasks: Iterable[PrefillTask]) -> Load:
        """For decode workers. tasks: all under way."""
        done = sum((t.scheduled_blocks - t.first_target) * t.block_size for t in tasks)
        rate = self._tokens / self._seconds if self._seconds else 0.0
        return Load(tokens_per_s=min(rate, 1e12), done_tokens=max(0, done))
