"""One engine request of this frontend, and what is known of requests with its fingerprint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pullfill.engine.fingerprint import fingerprint
from pullfill.engine.front_wire import Redirect
from pullfill.engine.migration import room_for
from pullfill.frontend.decode_choice import Choice
from pullfill.frontend.explain import Trace
from pullfill.frontend.fleet import Share
from pullfill.frontend.spans import NoSpans, begin_spans
from pullfill.prefix.chain import HashArray
from pullfill.runtime import log

if TYPE_CHECKING:
    from pullfill.frontend.decode_connection import DecodeConnection

_log = log.get("frontend.flight")

REFUSE_S = 600.0
"""How long a fingerprint is refused, and how long a suspicion is remembered."""


@dataclass(slots=True, eq=False)
class Suspect:
    """What is known about one fingerprint. Times are loop times.

    deaths: the processes that died with it, except those that another request has caused.
    likely: whether it had no output from the last process that died.
    seen_at: when the last of them died.
    not_before: when it may be tried again.
    left: workers that a request was taken back from, by process. If such a worker dies before the
    given time, the request counts as in flight there.
    trying: the request of this frontend with this fingerprint that is on probation.
    deaths_elsewhere: number of deaths that another frontend counted when it refused the request.
    """

    fingerprint: str
    prompt_tokens: int
    deaths: list[str] = field(default_factory=list)
    seen_at: float = 0.0
    not_before: float = 0.0
    likely: bool = False
    cleared: bool = False
    charged: bool = False
    refused_until: float = 0.0
    trying: Flight | None = None
    deaths_elsewhere: int = 0
    left: dict[str, float] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        """Whether it may only be sent on probation."""
        return bool(self.deaths) and not self.cleared

    @property
    def grave(self) -> bool:
        """Whether it is the likely cause: it had no output, or was at several deaths."""
        return self.likely or len(self.deaths) > 1

    def expired(self, now: float) -> bool:
        """Whether it is not suspected any more."""
        old = max(self.refused_until, self.seen_at + REFUSE_S) < now
        return old and not self.charged and self.trying is None

    @property
    def sentence(self) -> str:
        """The message for the user of a refused request."""
        workers = ", ".join(map(instance_of, self.deaths))
        count = max(len(self.deaths), self.deaths_elsewhere)
        return (
            f"{count} decode workers died while this request was in flight ({workers}), "
            f"so it is not sent again. Requests with its fingerprint {self.fingerprint} are "
            f"refused for {REFUSE_S / 60:.0f} minutes; to allow it before: pullfill suspects clear "
            f"{self.fingerprint}"
        )


@dataclass(slots=True, frozen=True)
class Hashed:
    """The hashes of the first blocks of a prompt of `tokens` tokens. None: it has none.

    block: tokens per block."""

    block: int
    tokens: int
    hashes: HashArray | None


@dataclass(slots=True, eq=False)
class Flight:
    """A request from `submit` to its end. Owned by the `Dispatcher`. Times are loop times.

    arrived, submitted: `time.monotonic` of the HTTP request and of `submit`.
    failure: what to tell the user if it must end now.
    worker: where it is. None: it waits until `deadline`.
    wire_id: its id at the worker.
    tokens: those that the sink has.
    attempt: number of workers that it has left, or that have not taken it.
    tried: its worker may redirect it.
    redirect: who has redirected it, and with what facts. None: it was sent since.
    avoid: the last worker that gave it back. That worker may live on.
    room: the `max_model_len` that the next worker must have.
    stalled_at: since when none of its workers has shown life. 0: one does.
    fingerprint: "" until it is needed.
    suspect: what is known of that fingerprint. None: nothing.
    proven: its worker has sent an output of it.
    sent_at: when it was sent to its worker.
    asked_at: since when it waits for its turn on probation. 0: it does not wait.
    hashed: the hashes of its prompt. None: they were not needed yet.
    choice: how its next worker was chosen. share: what it adds to the load of its worker.
    counted: number of tokens that were out when it was sent to its worker.
    """

    request: Any
    request_id: str
    trace: Trace
    # The loop's own clock stands still within one iteration under uvloop.
    arrived: float
    submitted: float
    failure: str
    worker: DecodeConnection | None = None
    wire_id: str = ""
    tokens: list[int] = field(default_factory=list)
    attempt: int = 0
    tried: bool = False
    redirect: tuple[str, Redirect] | None = None
    avoid: DecodeConnection | None = None
    room: int = 0
    deadline: float = 0.0
    stalled_at: float = 0.0
    fingerprint: str = ""
    suspect: Suspect | None = None
    proven: bool = False
    sent_at: float = 0.0
    asked_at: float = 0.0
    hashed: Hashed | None = None
    choice: Choice | None = None
    share: Share | None = None
    counted: int = 0
    spans: NoSpans = field(init=False)

    def __post_init__(self) -> None:
        self.spans = begin_spans(self.request.trace_headers, self.trace.key, self.arrived)

    def with_room(self, workers: Sequence[DecodeConnection]) -> Sequence[DecodeConnection]:
        """Return the workers that have room for the request. If all have, the same object."""
        if not self.room:
            return workers
        found = [w for w in workers if w.welcome and w.welcome.max_model_len >= self.room]
        # For another list the balancer makes its tables anew.
        return found if len(found) < len(workers) else workers


def keep_room(flight: Flight, worker: DecodeConnection) -> None:
    """The request leaves a worker. The next one must have room for the same answer."""
    if not flight.room and worker.welcome is not None:
        flight.room = min(room_for(flight.request), worker.welcome.max_model_len)


def name_of(flight: Flight) -> str:
    """Return the request's fingerprint, or its own id if that cannot be computed."""
    if not flight.fingerprint:
        try:
            flight.fingerprint = fingerprint(flight.request)
        except Exception:
            _log.exception("request %s has no fingerprint", flight.trace.key)
            flight.fingerprint = flight.request_id
    return flight.fingerprint


def ids_of(flight: Flight) -> dict[str, Any]:
    """Return `extra` for a log line about the request."""
    return log.ids(request_id=flight.trace.key, attempt=flight.attempt)


def needs_turn(flight: Flight) -> bool:
    """Whether the request may only be sent on probation, or is on probation."""
    return flight.suspect is not None and flight.suspect.open


def rank_of(flight: Flight) -> tuple[int, bool, int]:
    """Sort key for turns. The least suspicious goes first, then the longest answer under way."""
    suspect = flight.suspect
    if suspect is None or not suspect.open:
        return 0, False, 0
    return len(suspect.deaths), suspect.likely, -len(flight.tokens)


def instance_of(process: str) -> str:
    """The instance id in the name of a process (`decode_connection.process_of`)."""
    return process.partition("@")[0]
