"""Requests that are at no decode worker: each is placed, or told that its time is over.

Owned by the `Dispatcher`, single event loop. A request is added with `hold`, taken out with `drop`.
In between `place` is called for it whenever it may be sent: by `soon`, by `all_soon`, and at its
deadline while it waits for its turn on probation. Else `expire` is called at its deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

from pullfill.frontend.flight import Flight, Suspect, rank_of

_TURN_S = 0.005
"""How long requests are placed before other callbacks of the loop get a turn."""


class Waiting:
    """See the module. place: must not raise."""

    def __init__(
        self, place: Callable[[Flight, float], None], expire: Callable[[Flight], None]
    ) -> None:
        self._place = place
        self._expire = expire
        self._loop = asyncio.get_running_loop()
        self._held: dict[str, Flight] = {}
        self._queue: deque[Flight] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._all = False

    def hold(self, flight: Flight) -> None:
        """It waits until `flight.deadline`."""
        self._held[flight.request_id] = flight
        self._arm(flight.deadline)

    def drop(self, request_id: str) -> None:
        """It waits no more. No error if it did not."""
        self._held.pop(request_id, None)

    def of(self, suspect: Suspect) -> list[Flight]:
        """The waiting requests with this fingerprint."""
        return [f for f in self._held.values() if f.suspect is suspect]

    def soon(self, flights: Iterable[Flight]) -> None:
        """Place these, a few milliseconds at a time: a lost worker may leave hundreds."""
        idle = not self._queue
        self._queue.extend(flights)
        if idle and self._queue:
            self._loop.call_soon(self._some)

    def all_soon(self) -> None:
        """Place all, the least suspicious first. Many calls in one turn of the loop are one."""
        if self._held and not self._all:
            self._all = True
            self._loop.call_soon(self._every)

    def _every(self) -> None:
        self._all = False
        self.soon(sorted(self._held.values(), key=rank_of))

    def _some(self) -> None:
        now, until = self._loop.time(), time.monotonic() + _TURN_S
        try:
            while self._queue:
                flight = self._queue.popleft()
                if self._held.get(flight.request_id) is flight:
                    self._place(flight, now)
                if time.monotonic() >= until:
                    break
        finally:
            if self._queue:
                self._loop.call_soon(self._some)

    def _arm(self, deadline: float) -> None:
        """Look at what waits then, or before."""
        at = deadline + 0.005
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        for flight in sorted(self._held.values(), key=rank_of):
            if flight.deadline <= now and self._held.get(flight.request_id) is flight:
                if flight.asked_at:
                    self._place(flight, now)
                else:
                    self._expire(flight)
        if self._held:
            self._arm(min(flight.deadline for flight in self._held.values()))
