"""Finds the request that kills decode workers, and refuses it.

A worker has died if its connection is lost and its process does not connect again. A worker that
drains gives back what it does not finish, so nothing is in flight when it ends. A request counts
the deaths at which it was in flight. A request that its user sends again goes on counting. From its
first death on, it goes to the worker with the fewest other such requests (`around`). At two deaths
it ends with an error, and for `router.refuse_s` all frontends refuse its fingerprint
(`registry.suspect_records`). Requests like it that are at a worker go on there.

Each frontend counts its own requests. Single event loop. Costs one call per request at its end.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pullfill.engine import front_wire
from pullfill.frontend import counters
from pullfill.frontend.flight import Flight, likely, name_of
from pullfill.registry.suspect_records import SuspectBoard
from pullfill.runtime import log

if TYPE_CHECKING:
    from pullfill.frontend.decode_connection import DecodeConnection
    from pullfill.frontend.dispatch import Dispatcher

_log = log.get("frontend.suspects")

# A death after its first token counts a third: it is seldom the cause, and streams beside a deadly
# request would end.
# How much a death counts, without and with tokens of the request, and when it is refused.
SILENT, STARTED, MOST = 3, 1, 6
# A lost worker may leave thousands, and each of them looks at each worker.
# More than so many other such requests at a worker count as so many.
CROWD = 16
# How many deaths and how many requests that were not answered are remembered.
MAX_KNOWN = 4096


@dataclass(slots=True, eq=False)
class Suspects:
    """See the module.

    dispatcher: has the requests that have not ended, and the workers that take requests. It places
    all again when requests count fewer deaths than before, or are refused from now on."""

    board: SuspectBoard
    dispatcher: Dispatcher
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _died: dict[str, tuple[str, float]] = field(default_factory=dict)
    _unanswered: dict[str, tuple[dict[str, int], float]] = field(default_factory=dict)

    def meet(self, flight: Flight) -> None:
        """Count for a new request the deaths of one like it that got no answer."""
        if not self._unanswered:
            return  # a fingerprint costs one pass over the prompt
        deaths, at = self._unanswered.get(name_of(flight), ({}, 0.0))
        if at + self.board.refuse_s() > self._loop.time():
            flight.deaths = dict(deaths)
        if guilty(flight):
            self._convict(flight)

    def refusal(self, flight: Flight) -> str:
        """Return why no worker may get a request, for its user. Empty: one may."""
        if not len(self.board):
            return ""
        name = name_of(flight)
        if (left_s := self.board.left_s(name)) <= 0:
            return ""
        allow = f"to allow it before: pullfill suspects clear {name}"
        if not guilty(flight):
            counters.SUSPECTS.labels("refused").inc()
            return (
                f"requests with the fingerprint {name} are refused for another {left_s:.0f} s, "
                f"because decode workers died with one like it; {allow}"
            )
        workers = ", ".join(process.partition("@")[0] for process in flight.deaths)
        return (
            f"{len(flight.deaths)} decode workers died while this request was in flight "
            f"({workers}), so it is not sent again. Requests with its fingerprint {name} are "
            f"refused for {left_s:.0f} s; {allow}"
        )

    def on_death(self, worker: DecodeConnection, flights: Sequence[Flight]) -> None:
        """A worker was lost with these requests in flight."""
        now, host = self._loop.time(), worker.record.host_id
        _keep(self._died, worker.process, (host, now))
        for flight in flights:
            if not flight.deaths:
                counters.SUSPECTS.labels("suspected").inc()
            flight.deaths[worker.process] = STARTED if flight.tokens else SILENT
        for flight in filter(guilty, flights):
            self._loop.call_later(self.dispatcher.waits.sure, self._judge, flight)
            if likely(flight):
                # The two deaths of a request without a token are explained: they do not count for
                # streams.
                others = self.dispatcher.flights.values()
                _forget(flight.deaths, [f.deaths for f in others if f.tokens and not guilty(f)])
        ready = {other.record.host_id for other in self.dispatcher.workers}
        # Each connection sends its own heartbeats, so their ends are noticed up to two intervals
        # apart.
        since = now - 2 * front_wire.HEARTBEAT_IVL_MS / 1000.0
        gone = [p for p, (h, at) in self._died.items() if h == host and at >= since]
        # All workers of the host are lost at once, and workers of other hosts live.
        if len(gone) > 1 and ready and host not in ready:
            _log.warning("host %s is gone: its deaths count for no request", worker.record.host)
            self._excuse(gone)

    def on_return(self, process: str) -> None:
        """A process has connected. If it was taken for dead, it had not died."""
        if process in self._died:
            self._excuse([process])

    def around(
        self, flight: Flight, workers: Sequence[DecodeConnection], now: float
    ) -> Sequence[DecodeConnection]:
        """Return the workers, of at least one, to which a request may be sent. Empty: not now."""
        if not flight.deaths:
            return workers
        name = name_of(flight)
        if likely(flight):
            # Without tokens it waits for a worker where each other request has had an output since
            # it was sent there.
            flight.waits_since = flight.waits_since or now
            quiet = [
                worker
                for worker in workers
                if all(f.proven or name_of(f) == name for f in worker.flights.values())
            ]
            if not quiet and now < flight.waits_since + self.dispatcher.waits.apart:
                return ()
            workers = quiet or workers
        if len(workers) < 2:
            return workers

        def others(worker: DecodeConnection) -> tuple[int, int]:
            latest = reversed(worker.flights.values())
            such = (f for f in latest if f.deaths and name_of(f) != name)
            there = list(itertools.islice(such, CROWD))
            return sum(map(likely, there)), len(there)

        crowds = [others(worker) for worker in workers]
        least = min(crowds)
        return [w for w, crowd in zip(workers, crowds, strict=True) if crowd == least]

    def on_end(self, flight: Flight, finished: bool) -> None:
        """Handle the end of a request. finished: its answer was completed."""
        if not flight.deaths:
            return
        self._unanswered.pop(name_of(flight), None)
        if not finished and self.board.left_s(name_of(flight)) <= 0:
            _keep(self._unanswered, name_of(flight), (flight.deaths, self._loop.time()))

    def _judge(self, flight: Flight) -> None:
        there = self.dispatcher.flights.get(flight.request_id) is flight
        if there and guilty(flight):  # else it has ended, or was excused
            self._convict(flight)

    def _convict(self, flight: Flight) -> None:
        """Refuse the request, and those like it."""
        name = name_of(flight)
        self._unanswered.pop(name, None)
        if self.board.left_s(name) <= 0:  # else another choice of its answer was judged before
            counters.SUSPECTS.labels("convicted").inc()
            self.board.post(name, len(flight.deaths), len(flight.request.prompt_token_ids or ()))
            _log.error("requests with this fingerprint are refused now: %s", self.refusal(flight))
        self.dispatcher.place_all()

    def _excuse(self, processes: Sequence[str]) -> None:
        """These deaths count for nobody."""
        counts = [flight.deaths for flight in self.dispatcher.flights.values()]
        counts += [deaths for deaths, _ in self._unanswered.values()]
        for process in processes:
            del self._died[process]
        _forget(processes, counts)
        self.dispatcher.place_all()


def guilty(flight: Flight) -> bool:
    """Whether a request has to be refused."""
    return sum(flight.deaths.values()) >= MOST


def _forget(processes: Iterable[str], counts: Iterable[dict[str, int]]) -> None:
    for process in list(processes):
        for deaths in counts:
            deaths.pop(process, None)


def _keep(table: dict[str, Any], key: str, value: object) -> None:
    table[key] = value
    while len(table) > MAX_KNOWN:
        del table[next(iter(table))]
