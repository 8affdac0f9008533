"""Whether the streams of a worker that is both leave time for prefill jobs.

Without streams there is time. Otherwise each step that computes a part of a job delays every stream
by the time of that step. So the worker pulls jobs only while such a step fits into the target for
the time between two tokens (`router.itl_ms`). It also pulls before the first step is measured: a
worker that always has streams would otherwise never measure one.

When the streams leave no time any more, jobs under way are finished. They are few (puller.py).
"""

from __future__ import annotations

from collections.abc import Callable

from pullfill.clock import SYSTEM_CLOCK, Clock

CALM_S = 0.5
"""Pulling begins again when the streams have left time for this long."""
LOOK_S = 0.05
"""How often to look."""


class Slack:
    """See the module. asyncio thread only.

    requests: number of clients' requests that this worker has.
    step_s: seconds of a full step of prefill work, as measured. None: not measured yet.
    itl_s: the target for the time between two tokens."""

    def __init__(
        self,
        requests: Callable[[], int],
        step_s: Callable[[], float | None],
        itl_s: Callable[[], float],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._requests = requests
        self._step_s = step_s
        self._itl_s = itl_s
        self._clock = clock
        self._why = ""
        self._busy_at = 0.0

    def look(self) -> str:
        """Return why this worker must pull no jobs now. Empty: it may pull."""
        now = self._clock.monotonic()
        if why := self._now():
            self._why, self._busy_at = why, now
        elif self._why and now - self._busy_at >= CALM_S:
            self._why = ""
        return self._why

    def _now(self) -> str:
        if not self._requests():
            return ""
        step_s, itl_s = self._step_s(), self._itl_s()
        if step_s is None or step_s <= itl_s:
            return ""
        return "its own streams leave no time"
