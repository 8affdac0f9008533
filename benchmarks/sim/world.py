"""The clock and the events of a simulation."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable


class World:
    """Simulated time in seconds, from 0. It is a `pullfill.clock.Clock`.

    Events of the same time run in the order in which they were added. So one seed gives one result.
    """

    def __init__(self, seed: int = 0) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    def monotonic(self) -> float:
        return self.now

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Add an event: call `what` at the time `when`."""
        heapq.heappush(self._events, (when, next(self._serial), what))

    def run(self, until: float = math.inf) -> None:
        """Run the events before the time `until`, and those that they add."""
        while self._events and self._events[0][0] < until:
            self.now, _, what = heapq.heappop(self._events)
            what()

    def noisy(self, seconds: float, jitter: float) -> float:
        """Return a random duration around `seconds`. jitter: its relative standard deviation."""
        return seconds * math.exp(self.random.gauss(0.0, jitter)) if jitter else seconds
