"""When and where a suspect is sent again.

A worker has at most one request on probation, and no probation starts while another request there
is unproven. So the death of the worker names one request.

Waiting for a turn is bounded. An unproven request holds a worker for `_turn_s` at most. A request
that had outputs when its worker died waits at most STREAM_WAIT_S, and is then sent anyway. One
that had none does not go to the last ready worker while others are served there, for `patience_s`
after the last death. Requests without suspicion go to workers that have no probation. Where there
are none they wait NEW_WAIT_S at most.

Owned by `Suspects`. Single event loop.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from pullfill.frontend.flight import Flight, needs_turn
from pullfill.frontend.link import Link

STREAM_WAIT_S = 2.0
"""How long an answer that is under way waits for its turn."""
OTHERS_S = 1.0
"""Other frontends get so long to try their answers under way before we try a prompt that had no
output, once a worker is ready after a death: the two must not meet at one worker."""
NEW_WAIT_S = 1.0
"""How long a request without suspicion waits, if all workers have a probation."""
TURN_S = 2.0
TURN_TOKENS_PER_S = 500.0
"""A turn on probation: TURN_S, and a second for so many prompt tokens."""


class Turns:
    """See the module. patience_s: how long it is worth waiting for another worker to come. shared:
    whether there are other frontends. open: the requests that wait for their turn or are on
    probation. last_death: loop time."""

    def __init__(self, patience_s: float, shared: Callable[[], bool]) -> None:
        self._patience_s = patience_s
        self._shared = shared
        # Two frontends that try their suspects at the same workers in the same order learn nothing.
        self._salt = random.random()
        # Of hundreds that ask in one turn of the loop only the first looks at every request.
        self._full_at = 0.0
        self.open: set[Flight] = set()
        self.last_death = 0.0

    def around(self, flight: Flight, workers: Sequence[Link], now: float) -> Sequence[Link]:
        """Of these workers those that a request without suspicion may use; none: it has to wait."""
        if not self.open:
            return workers
        slots = self._slots(workers)
        if others := [w for w in workers if w not in slots]:
            return others
        flight.asked_at = flight.asked_at or now
        if now >= flight.asked_at + NEW_WAIT_S:
            return workers
        return [w for w in workers if not any(map(_on_probation, w.flights.values()))]

    def turn(self, flight: Flight, workers: Sequence[Link], now: float) -> Link | None:
        """Where a suspect may go now; None: it has to wait. `workers` is never empty."""
        suspect = flight.suspect
        assert suspect is not None
        flight.asked_at = flight.asked_at or now
        self.open.add(flight)
        if now < suspect.not_before:
            return None
        if not suspect.grave and now >= flight.asked_at + STREAM_WAIT_S:
            return min(workers, key=lambda w: len(w.flights))
        since = max(flight.asked_at, self.last_death)
        if suspect.grave and now < since + OTHERS_S and self._shared():
            return None
        if suspect.grave and len(workers) == 1 and workers[0].flights:
            if now < since + self._patience_s:
                return None
        if now == self._full_at:
            return None
        for worker in self._slots(workers):
            if not any(_holds(f, now) for f in worker.flights.values()):
                return worker
        self._full_at = now
        return None

    def _slots(self, workers: Sequence[Link]) -> Sequence[Link]:
        """The workers for probations: those with the fewest requests, and all but one at most."""

        def rank(worker: Link) -> tuple[bool, int, int, int]:
            flights = worker.flights.values()
            free = not any(map(_on_probation, flights))
            unproven = sum(not f.proven for f in flights)
            return free, unproven, len(flights), hash((self._salt, worker.instance_id))

        count = min(len(self.open), max(1, len(workers) - 1))
        return sorted(workers, key=rank)[:count]


def _on_probation(flight: Flight) -> bool:
    return not flight.proven and needs_turn(flight)


def _holds(flight: Flight, now: float) -> bool:
    """Whether it keeps others from starting a probation at its worker."""
    if flight.proven:
        return False
    turn_s = TURN_S + len(flight.request.prompt_token_ids or ()) / TURN_TOKENS_PER_S
    if flight.suspect is not None and len(flight.suspect.deaths) > 1:
        turn_s *= 4
    return now < flight.sent_at + turn_s
