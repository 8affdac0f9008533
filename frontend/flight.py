"""One request of this frontend, from `submit` to its end. The dispatcher makes it and ends it."""

from __future__ import annotations

from asyncio import TimerHandle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pullfill.engine.migration import fingerprint
from pullfill.frontend.request_log import RequestRecord
from pullfill.frontend.routing.choice import Prompt, Share
from pullfill.runtime import log

if TYPE_CHECKING:
    from pullfill.frontend.decode_connection import DecodeConnection

_log = log.get("frontend.flight")


@dataclass(frozen=True)
class Waits:
    """How long requests wait for a decode worker, in seconds."""

    # A new request waits so long for a first worker.
    first: float = 2.0
    # A request whose worker was lost waits at least and at most so long for another. A worker whose
    # connection broke may be connected again by then.
    least: float = 0.8
    most: float = 2.5
    # Between these bounds the wait ends this long after the worker's last sign of life. So an error
    # comes within 5 s, although it takes time to notice the loss.
    stalled: float = 4.5
    # A request whose worker was lost waits at least so long for one that is being started.
    restart: float = 0.0
    # A death counts after this time (`suspects`). A process whose connection broke connects again
    # after 0.5 s, or ZMQ's longest retry (2 s).
    sure: float = 3.0
    # A request that was at a death waits so long for a worker where it ends nobody else, and looks
    # every `look`. Long enough for the first outputs of requests that were just sent. Not a turn
    # for each: of an innocent crash with 100 waiting prompts all go on after it.
    apart: float = 1.0
    look: float = 0.05


WAITS = Waits()


@dataclass(slots=True, eq=False)
class Flight:
    """See the module. Times are loop times.

    record: what is told of it.
    failure: what to tell the user if it must end now.
    worker: where it is. None: it waits. timer: ends the waiting.
    wire_id: its id at the worker.
    tokens: those that the sink has.
    attempt: number of workers that it has left, or that have not taken it.
    avoid: the last worker that gave it back. That worker may live on.
    room: the `max_model_len` that the next worker must have.
    fingerprint: "" until it is needed.
    deaths: the processes that died with it, and how much each counts (`suspects`).
    proven: its worker has sent an output of it.
    waits_since: since when it waits for a worker where it ends nobody else (`suspects`). 0: never.
    hashed: its prompt with hashes. None: they were not needed yet.
    share: what it adds to the load of its worker.
    """

    request: Any
    request_id: str
    record: RequestRecord
    failure: str
    worker: DecodeConnection | None = None
    wire_id: str = ""
    tokens: list[int] = field(default_factory=list)
    attempt: int = 0
    avoid: DecodeConnection | None = None
    room: int = 0
    timer: TimerHandle | None = None
    fingerprint: str = ""
    deaths: dict[str, int] = field(default_factory=dict)
    proven: bool = False
    waits_since: float = 0.0
    hashed: Prompt | None = None
    share: Share | None = None

    def stop_waiting(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def name_of(flight: Flight) -> str:
    """Return the request's fingerprint, or its own id if that cannot be computed."""
    if not flight.fingerprint:
        try:
            flight.fingerprint = fingerprint(flight.request)
        except Exception:
            _log.exception("request %s has no fingerprint", flight.record.key)
            flight.fingerprint = flight.request_id
    return flight.fingerprint


def ids_of(flight: Flight) -> dict[str, Any]:
    """Return `extra` for a log line about the request."""
    return log.ids(request_id=flight.record.key, attempt=flight.attempt)


def likely(flight: Flight) -> bool:
    """Whether a request may well end its worker: it was at a death, and has no tokens."""
    return bool(flight.deaths) and not flight.tokens
