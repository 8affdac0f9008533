"""Sends a request to another decode worker when the chosen one says that it was chosen wrongly.

A frontend chooses by what it knows, and that may be old: other frontends send to the same workers.
So with the first try of a request goes a `Picture`: what the choice was made on. The worker
compares it with the truth (decode_worker/redirects.py). If it was far off, the worker has not taken
the request, and says what is true (`Redirect`). With that the choice is made again, among all
workers, and is final: the request goes out as ADD.

The client notices nothing, because no token can have been sent. A redirect is neither an error nor
a migration. `explain` shows it, and `pullfill_redirect_total` counts it.

If a worker dies before it has answered, or the second worker dies, the dispatcher sends the request
elsewhere. That is a migration, and afterwards nobody redirects the request any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pullfill import wire
from pullfill.engine import front_wire
from pullfill.engine.front_wire import Redirect, RedirectReason
from pullfill.errors import BadMessage
from pullfill.frontend import metrics
from pullfill.frontend.balancer import Balancer
from pullfill.frontend.decode_connection import DecodeConnection
from pullfill.frontend.flight import Flight, keep_room
from pullfill.frontend.waiting import RESEND_WAIT_S
from pullfill.wire.codec import decoder

_CANNOT = frozenset({RedirectReason.DRAINING, RedirectReason.INTAKE_FULL})
"""Reasons that say that the worker cannot take the request at all."""

_redirect = decoder(Redirect)


class Redirects:
    """Owned by the `Dispatcher`, on its event loop.

    enabled: returns whether requests may be redirected."""

    def __init__(self, balancer: Balancer, enabled: Callable[[], bool]) -> None:
        self._balancer = balancer
        self._enabled = enabled

    def kind(self, flight: Flight, several: bool) -> tuple[bytes, ...]:
        """Return the first frames of the message that sends a request: TRY and a picture, or ADD.

        Call it after the choice. several: whether another worker could take it."""
        flight.tried = False
        if several and not flight.attempt and self._enabled():
            picture = self._balancer.picture(flight)
            if picture is not None:
                flight.tried = True
                return front_wire.TRY, wire.encode(picture)
        return (front_wire.ADD,)

    def take(self, worker: DecodeConnection, payload: Any, now: float) -> Flight | None:
        """Take a worker's `Redirect`. Returns its request, which must be routed again.

        None: it has ended meanwhile. Raises BadMessage, also if the worker had to take it."""
        told = _redirect(payload.buffer)
        flight = worker.flights.get(told.request_id)
        if flight is None:
            return None
        if not flight.tried:
            raise BadMessage("a redirect of a request that it had to take")
        del worker.flights[told.request_id]
        worker.load, worker.load_at = told.load, now
        self._balancer.redirected(flight, worker, told.held_tokens)
        flight.worker, flight.redirect = None, (worker.instance_id, told)
        flight.attempt += 1
        flight.spans.left(f"redirected: {told.reason}")
        flight.deadline = now + RESEND_WAIT_S
        keep_room(flight, worker)
        if told.reason in _CANNOT:
            flight.avoid = worker
        return flight

    def sent(self, flight: Flight, worker: DecodeConnection) -> bool:
        """Note where a request has gone. Returns whether this was after a redirect."""
        if flight.redirect is None:
            return False
        (before, told), flight.redirect = flight.redirect, None
        moved = before != worker.instance_id
        if moved:
            flight.trace.redirected_from, flight.trace.redirect_reason = before, told.reason
        metrics.REDIRECT.labels(told.reason, "moved" if moved else "stayed").inc()
        return True
