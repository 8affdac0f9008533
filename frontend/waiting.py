"""Holds requests that are at no decode worker, until each is placed or its time is over.

Owned by the `Dispatcher`, single event loop. A request is added with `hold` and removed with
`drop`. In between `soon` and `all_soon` call `place` for it. At its deadline `expire` is called.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

from pullfill.frontend.flight import Flight, likely, name_of

RESEND_WAIT_S = 0.8
"""The least time a request waits for another worker after its own was lost."""
RESEND_WAIT_MAX_S = 2.5
"""The most time. A worker whose connection broke may be connected again by then."""
SILENT_WAIT_S = 4.0
"""Between these bounds the wait ends this long after the lost worker's last sign of life. So an
error comes within 5 s, although it takes time to notice the loss."""
STALL_S = 4.5
"""If several workers are lost without a token in between, all waits end this long after the first
one's last sign of life."""
LAST_TRY_S = 0.25
"""But each wait has at least this much time to find a worker that is ready."""
_TURN_S = 0.005
"""How long requests are placed before other callbacks of the event loop run."""


def patience_s(flight: Flight, heard_at: float, lost: bool, now: float) -> float:
    """Return how long a request that leaves its worker waits for another. Sets `stalled_at`.

    heard_at: the worker's last sign of life. lost: whether it is lost."""
    wait = max(RESEND_WAIT_S, min(RESEND_WAIT_MAX_S, heard_at + SILENT_WAIT_S - now))
    if not lost or not flight.stalled_at:
        flight.stalled_at = max(heard_at, now + RESEND_WAIT_S - SILENT_WAIT_S)
    return max(LAST_TRY_S, min(wait, flight.stalled_at + STALL_S - now))


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
        self._timer: asyncio.Handle | None = None
        self._due = 0.0
        self._all = False

    def hold(self, flight: Flight) -> None:
        """Add a request, which waits until `flight.deadline`."""
        self._held[flight.request_id] = flight
        self._arm(flight.deadline)

    def drop(self, request_id: str) -> None:
        """Remove a request. No error if it did not wait."""
        self._held.pop(request_id, None)

    def of(self, fingerprint: str) -> list[Flight]:
        """The waiting requests with this fingerprint."""
        return [f for f in self._held.values() if name_of(f) == fingerprint]

    def soon(self, flights: Iterable[Flight]) -> None:
        """Place these requests soon. A lost worker may leave hundreds, so in slices of _TURN_S."""
        idle = not self._queue
        self._queue.extend(flights)
        if idle and self._queue:
            self._loop.call_soon(self._some)

    def all_soon(self) -> None:
        """Place all soon, the innocent first. Calls in one turn of the loop are merged."""
        if self._held and not self._all:
            self._all = True
            self._loop.call_soon(self._every)

    def _every(self) -> None:
        self._all = False
        self.soon(sorted(self._held.values(), key=likely))

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
        """Set the timer to `deadline`, unless it is set earlier."""
        at = deadline + 0.005
        if self._timer is not None:
            if self._due <= at:
                return
            self._timer.cancel()
        # For a time that has passed, uvloop returns a handle that does not tell it.
        self._due = at
        self._timer = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        for flight in list(self._held.values()):
            if flight.deadline <= now and self._held.get(flight.request_id) is flight:
                self._expire(flight)
        if self._held:
            self._arm(min(flight.deadline for flight in self._held.values()))
