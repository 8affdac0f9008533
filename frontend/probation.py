"""When and where a suspect is sent again.

A worker has at most one request on probation, and no probation starts while another request there
is unproven. So the death of the worker points to one request. Of several requests with the same
fingerprint one is on probation, and the others wait for its result.

With other frontends, a grave suspect is sent only after they were told (`registry.probations`).
Until its probation ends they send no request with its fingerprint, and none to its worker.

All waits are bounded:

- An unproven request prevents probations at its worker for `turn_s` at most. At a full worker it
  waits for longer, and a death beside it would prove nothing.
- So for CROWDED_S after the last death a suspect without an output goes to no worker with an
  unproven request, and for `patience_s` not to the only ready worker while others are served there.
  After CROWDED_S, requests that have no other worker wait until the suspect is sent, for at most
  LAST_WAIT_S. If there is still an unproven request one turn later, the suspect is sent anyway.
- A request that had outputs when its worker died waits STREAM_WAIT_S for a turn. Then it goes to
  any worker without a probation, like a request without suspicion.
- If all workers have a probation, both wait LAST_WAIT_S at most.

Owned by `Suspects`. Single event loop.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pullfill.frontend.decode_connection import DecodeConnection
from pullfill.frontend.flight import Flight, needs_turn
from pullfill.registry.probations import Probations

STREAM_WAIT_S = 2.0
"""How long an answer that is under way waits for a turn on probation."""
OTHERS_S = 1.0
"""When a worker is ready after a death, frontends first try their answers under way. A prompt
without an output waits for this long, so that the two do not meet at one worker."""
LAST_WAIT_S = 10.0
"""How long other requests wait if all workers have a probation."""
TURN_S = 10.0
"""Longest turn, plus time for the prompt. At an idle worker a turn takes one step, but at a full
one the request waits in a queue first."""
TURN_TOKENS_PER_S = 500.0
"""For this many prompt tokens a turn may take a second longer."""
CROWDED_S = 60.0
"""How long after the last death a prompt without an output is tried only where no other request is
without one. Requests wait for longer than TURN_S at a full worker."""
DUE_S = 1.0
"""Other requests wait for a suspect that asked for a turn within this time, after CROWDED_S."""
VERDICT_S = 30.0
"""A probation that other frontends were told of may last this much longer than its turn: until all
have answered, and until it is certain that the worker died."""


class Turns:
    """See the module.

    patience_s: how long it is worth waiting for another worker.
    open: the requests that wait for a turn or are on probation.
    last_death: loop time of the last death.
    workers: those that are connected, by instance id. The dispatcher keeps it."""

    def __init__(self, patience_s: float, probations: Probations) -> None:
        self._patience_s = patience_s
        self._probations = probations
        # Random: if two frontends try their suspects at the same workers in the same order, each
        # death points to both.
        self._salt = random.random()
        # Cached for one turn of the loop, in which hundreds of requests may ask.
        self._full_at = 0.0
        self._shared = 0.0, False
        self.open: set[Flight] = set()
        self.last_death = 0.0
        self._due_at = -DUE_S
        self.workers: dict[str, DecodeConnection] = {}

    def around(
        self, flight: Flight, workers: Sequence[DecodeConnection], now: float
    ) -> Sequence[DecodeConnection]:
        """Return the workers that a request without suspicion may use. Empty: it has to wait."""
        if not self.open and not self._probations.any:
            return workers
        slots = self._slots(workers) if self.open else ()
        if others := [w for w in workers if w not in slots and not self._taken(w)]:
            return others
        flight.asked_at = flight.asked_at or now
        if now < min(self._due_at + DUE_S, flight.asked_at + LAST_WAIT_S):
            return ()
        return self._beside(flight, workers, now)

    def _beside(
        self, flight: Flight, workers: Sequence[DecodeConnection], now: float
    ) -> Sequence[DecodeConnection]:
        """Return the workers without a probation. After LAST_WAIT_S return all of them."""
        if now >= flight.asked_at + LAST_WAIT_S:
            return workers
        free = [w for w in workers if not self._taken(w)]
        return [w for w in free if not any(map(_on_probation, w.flights.values()))]

    def turn(
        self, flight: Flight, workers: Sequence[DecodeConnection], now: float
    ) -> DecodeConnection | None:
        """Return the worker that a suspect may go to now. None: it has to wait.

        workers: must not be empty."""
        suspect = flight.suspect
        assert suspect is not None
        flight.asked_at = flight.asked_at or now
        self.open.add(flight)
        if now < suspect.not_before:
            return None
        if not suspect.grave and now >= flight.asked_at + STREAM_WAIT_S:
            beside = self._beside(flight, workers, now)
            return min(beside, key=lambda worker: len(worker.flights), default=None)
        first = suspect.trying
        if first is not None and first is not flight and first.worker is not None:
            if holds(first, now):
                return None
        since = max(flight.asked_at, self.last_death)
        if now != self._shared[0]:
            self._shared = now, self._probations.shared
        shared = self._shared[1]
        if suspect.grave and now < since + OTHERS_S and shared:
            return None
        if suspect.grave and len(workers) == 1 and workers[0].flights:
            if now < since + self._patience_s:
                return None
        patient = suspect.grave and now < since + CROWDED_S
        if suspect.grave and not patient:
            self._due_at = now
            if now >= since + CROWDED_S + LAST_WAIT_S + turn_s(flight):
                suspect.trying = flight
                beside = self._beside(flight, workers, now)
                return min(beside, key=lambda worker: len(worker.flights))
        if suspect.grave and shared:
            found = self._announced(flight, workers, now, patient)
        elif now == self._full_at:
            return None
        else:
            found = self._free(workers, now, patient)
        if found is not None:
            suspect.trying = flight
        return found

    def _announced(
        self, flight: Flight, workers: Sequence[DecodeConnection], now: float, patient: bool
    ) -> DecodeConnection | None:
        """Return the worker that other frontends leave to this suspect. None: ask them first."""
        name = flight.fingerprint
        if self._probations.elsewhere(name):
            return None
        mine = self._probations.mine(name)
        if mine is None:
            if now != self._full_at and (worker := self._free(workers, now, patient)) is not None:
                ttl_s = turn_s(flight) + VERDICT_S
                self._probations.take(name, worker.instance_id, ttl_s)
            return None
        for worker in workers:
            if worker.instance_id == mine.instance_id and _quiet(worker, now, patient):
                if not (patient and mine.late):
                    return worker if mine.ready else None
        self._probations.release(name)  # the worker has gone, or it is not quiet
        return None

    def _free(
        self, workers: Sequence[DecodeConnection], now: float, patient: bool
    ) -> DecodeConnection | None:
        """Return a worker where a probation may start, or None."""
        for worker in self._slots(workers):
            if _quiet(worker, now, patient) and not self._taken(worker):
                return worker
        self._full_at = now
        return None

    def quiet(self, instance_id: str, now: float) -> bool:
        """Whether no request at the worker prevents a probation of another frontend there."""
        worker = self.workers.get(instance_id)
        return worker is None or not any(self.prevents(f, now) for f in worker.flights.values())

    def prevents(self, flight: Flight, now: float) -> bool:
        """Whether the request prevents a probation of another frontend at its worker."""
        patient = now < self.last_death + CROWDED_S
        return holds(flight, now) or (patient and not flight.proven)

    def _taken(self, worker: DecodeConnection) -> bool:
        return self._probations.taken(worker.instance_id)

    def _slots(self, workers: Sequence[DecodeConnection]) -> Sequence[DecodeConnection]:
        """Return the workers for probations: those with the fewest unproven requests.

        Of several workers at least one is left out."""

        def rank(worker: DecodeConnection) -> tuple[bool, int, int, int]:
            flights = worker.flights.values()
            free = not any(map(_on_probation, flights)) and not self._taken(worker)
            unproven = sum(not f.proven for f in flights)
            return free, unproven, len(flights), hash((self._salt, worker.instance_id))

        count = min(len(self.open), max(1, len(workers) - 1))
        return sorted(workers, key=rank)[:count]


def turn_s(flight: Flight) -> float:
    """Return how long an unproven request may prevent probations at its worker."""
    seconds = TURN_S + len(flight.request.prompt_token_ids or ()) / TURN_TOKENS_PER_S
    if flight.suspect is not None and len(flight.suspect.deaths) > 1:
        seconds *= 4
    return seconds


def holds(flight: Flight, now: float) -> bool:
    """Whether the request prevents probations at its worker."""
    return not flight.proven and now < flight.sent_at + turn_s(flight)


def _quiet(worker: DecodeConnection, now: float, patient: bool) -> bool:
    """Whether a probation may start there.

    patient: not beside an unproven request, however long it has been there."""
    return not any(
        holds(flight, now) or (patient and not flight.proven) for flight in worker.flights.values()
    )


def _on_probation(flight: Flight) -> bool:
    return not flight.proven and needs_turn(flight)
