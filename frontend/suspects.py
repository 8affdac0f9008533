"""Finds the request that killed a decode worker, and refuses it.

A worker has died if its connection was lost and its process does not connect again. Every request
that was in flight there is a suspect. Suspects are known by fingerprint (`engine.fingerprint`), so
a request that its user sends again is the same suspect.

    unknown ──a worker dies with it──▶ suspected ──its turn comes──▶ on probation
    on probation ──an output comes──▶ cleared: it goes on like any other request
    on probation ──the worker dies, no other request there was unproven──▶ charged
    on probation ──the worker dies, others there were unproven──▶ suspected, now of two deaths
    charged ──the process is back: it had not died──▶ suspected
    charged ──the registry drops the worker, or CONFIRM_S pass──▶ refused
    charged ──another frontend had a suspect there, or does not say──▶ suspected, now of two deaths
    refused ──REFUSE_S pass, or `pullfill suspects clear`──▶ unknown

A request is *unproven* at a worker until the worker sends an output of it. A worker has at most one
request on probation, and none starts there while another request is unproven. So a death points to
one fingerprint, and only then is it charged. A wrong suspicion costs a wait, never an answer.

Requests with the same fingerprint are the same suspect. Only one of them is tried at a time. The
others that are unproven are taken back from their workers, where they may still wait in a queue.
Two deaths at which no other request was unproven also lead to a charge. A request may end more than
two workers if it is sent to several frontends before they have heard of its first death.

A frontend does not see the requests of others. So frontends tell each other their deaths and
probations (`registry.probations`), and a suspect of one is a suspect of all. A charge is dropped if
another frontend had a suspect at the same worker, or does not tell what it had there. If it had an
unproven request that was no suspect, only the first charge is dropped.

When a request is refused, its deaths no longer count against other requests that were cleared.
Requests that are not cleared yet stay suspects: two requests at one worker may both be deadly.

Single event loop. Costs nothing per engine step, only one call per request, at its first output.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pullfill.frontend import metrics
from pullfill.frontend.flight import REFUSE_S, Flight, Suspect, instance_of, name_of, needs_turn
from pullfill.frontend.probation import Turns
from pullfill.registry.suspect_records import SuspectBoard
from pullfill.runtime import log

_log = log.get("frontend.suspects")

CONFIRM_S = 8.0
"""How long the process of a lost worker may take to connect again. Longer than a lease (5 s), so
the registry drops a worker that died before this has passed."""
APART_S = 2.0
"""Frontends that each had a suspect at one death try again after random times within this."""
NOT_CLEARED = 3
"""A request that was at this many unexplained deaths is not cleared by an output any more."""
MAX_DEATHS = 6
"""After this many deaths a request is given up."""
RECALL_S = 1.0
"""A request that was taken back from a worker is a suspect if the worker is lost within this time.
It is not tried again before."""
MAX_KNOWN = 4096
"""How many fingerprints are remembered."""
MAX_PROCESSES = 256
"""How many dead workers are remembered, with the requests that were unproven there."""


class Suspects:
    """See the module. Implements `registry.probations.Listener`.

    patience_s: how long it is worth waiting for another worker.
    on_refused: called with a fingerprint that is refused from now on.
    on_free: called when requests that wait for a turn on probation may have one.
    on_recalled: takes a request back from its worker, to wait for a turn.
    board: what all frontends know.
    flights: returns all requests of this frontend that have not ended.
    """

    def __init__(
        self,
        patience_s: float,
        on_refused: Callable[[Suspect], None],
        on_free: Callable[[], None],
        on_recalled: Callable[[Flight], None],
        board: SuspectBoard,
        flights: Callable[[], Iterable[Flight]],
    ) -> None:
        self._on_refused = on_refused
        self._on_free = on_free
        self._on_recalled = on_recalled
        self._board = board
        self._others = board.probations
        self._flights = flights
        self._loop = asyncio.get_running_loop()
        self._known: dict[str, Suspect] = {}
        self._charges: dict[str, Suspect] = {}
        self._explained: dict[str, None] = {}
        self._verdicts: dict[str, asyncio.Task[None]] = {}
        self._unproven: dict[str, set[str]] = {}
        self._gone: dict[str, None] = {}
        self._copies: set[str] = set()
        self.turns = Turns(patience_s, self._others)

    def listed(self) -> list[dict[str, object]]:
        """The suspects of this frontend that are not cleared, for people."""
        now = self._loop.time()
        return [
            {
                "fingerprint": suspect.fingerprint,
                "state": "refused" if suspect.refused_until > now else "suspected",
                "deaths": len(suspect.deaths),
                "prompt_tokens": suspect.prompt_tokens,
                "left_s": round(max(suspect.refused_until, suspect.seen_at + REFUSE_S) - now, 1),
            }
            for suspect in self._known.values()
            if suspect.open and suspect.seen_at + REFUSE_S > now
        ]

    # ---------------------------------------------------------------- what happens

    def meet(self, flight: Flight) -> str:
        """Check a new request. Returns why it is refused. Empty: it is not."""
        if not self._known and not len(self._board):
            return ""
        now = self._loop.time()
        # While a suspect is known, each new request needs a fingerprint.
        while (oldest := next(iter(self._known.values()), None)) and oldest.expired(now):
            del self._known[oldest.fingerprint]
        name = name_of(flight)
        left_s, known = self._board.left_s(name), self._known.get(name)
        if known is not None:
            left_s = max(left_s, known.refused_until - now)
            if left_s <= 0 and known.expired(now):
                del self._known[name]
                known = None
        if left_s > 0:
            metrics.SUSPECTS.labels("refused").inc()
            return (
                f"requests with the fingerprint {flight.fingerprint} are refused for another "
                f"{left_s:.0f} s: decode workers died with one like it. To allow it before: "
                f"pullfill suspects clear {flight.fingerprint}"
            )
        self._suspect(flight, known)
        return ""

    def on_death(self, process: str, flights: Sequence[Flight]) -> None:
        """A worker was lost with these requests in flight."""
        now = self.turns.last_death = self._loop.time()
        unproven = {f for f in flights if not f.proven or _not_cleared(f)}
        told = {name_of(f): needs_turn(f) for f in unproven}
        told |= {s.fingerprint: True for s in self._known.values() if s.left.get(process, 0) > now}
        names = set(told)
        self._add_unproven(process, names)
        if names or self._others.shared:  # others must know, even if there were none
            self._others.testify(process, instance_of(process), told)
        only = self._known.get(next(iter(names))) if len(names) == 1 else None
        if only is not None and only.open and not only.charged:
            for flight in flights:
                if flight.fingerprint == only.fingerprint:
                    flight.suspect = only
            self._charge(only, process)
            return
        for flight in flights:
            suspect = self._known.pop(name_of(flight), None) or self._new(flight)
            self._known[flight.fingerprint] = suspect
            if process not in suspect.deaths:
                suspect.deaths.append(process)
                suspect.likely = False
            suspect.likely |= flight in unproven
            suspect.seen_at, suspect.cleared = now, False
            self._others.release(flight.fingerprint)
            self._suspect(flight, suspect)
        self._recall(names, flights)
        self._add_deaths(process, names.difference(map(name_of, flights)), True)

    def on_death_elsewhere(self, process: str, names: set[str], fresh: bool) -> None:
        """Another frontend had these requests, without an output, at a worker that died.
        fresh: it died just now."""
        self._add_unproven(process, names)
        self._add_deaths(process, names, fresh)
        self._recall(names)

    def _add_deaths(self, process: str, names: set[str], fresh: bool) -> None:
        now = self._loop.time()
        for name in names:
            suspect = self._known.setdefault(name, Suspect(name, 0))
            if process in suspect.deaths or suspect.charged:
                continue
            suspect.deaths.append(process)
            suspect.likely, suspect.seen_at, suspect.cleared = True, now, False
            if fresh and len(self._alone(suspect)) > 1:
                self._copies.add(process)
                self._charge(suspect, process)
        _forget_oldest(self._known, MAX_KNOWN)

    def on_absolved_elsewhere(self, process: str, names: set[str]) -> None:
        """These requests had an output at another worker, or that worker had not died."""
        self._unproven.get(process, set()).difference_update(names)
        self._absolve(process, [self._known[name] for name in names if name in self._known])

    def on_refused_elsewhere(self, name: str, left_s: float, deaths: int) -> None:
        """A frontend, maybe this one, has decided that all refuse this request from now on.
        deaths: number of deaths, as that frontend counts them."""
        suspect = self._known.get(name)
        if suspect is not None and not suspect.refused_until:
            suspect.refused_until = self._loop.time() + left_s
            suspect.charged, suspect.deaths_elsewhere = False, deaths
            self._settle(suspect)
        self._others.release(name)  # only now: others that did not know would try it

    def on_probations(self) -> None:
        """A probation of any frontend began, became ready or ended."""
        self._on_free()

    def quiet(self, instance_id: str) -> bool:
        """Whether none of our requests at that worker could be suspected if it died now."""
        return self.turns.quiet(instance_id, self._loop.time())

    def on_return(self, process: str) -> None:
        """A process that was taken for dead has connected again."""
        self._gone.pop(process, None)
        suspect = self._charges.pop(process, None)
        if suspect is not None:
            suspect.charged = False
        if self._unproven.pop(process, None) is not None:
            self._others.retract(instance_of(process))
        self._absolve(process, list(self._known.values()))

    def on_gone(self, process: str) -> None:
        """The worker has died: the registry has dropped it, or it did not come back in time."""
        self._gone[process] = None
        _forget_oldest(self._gone, MAX_PROCESSES)
        if process in self._charges and process not in self._verdicts:
            task = asyncio.create_task(self._judge(process), name=f"verdict-{process}")
            self._verdicts[process] = task
            task.add_done_callback(lambda _: self._verdicts.pop(process, None))

    async def _judge(self, process: str) -> None:
        """Refuse the request charged with this death, unless one of another frontend may be it."""
        charged = self._charges.get(process)
        if charged is None:
            return  # the process is back
        name, trial = charged.fingerprint, self._others.mine(charged.fingerprint)
        told = await self._others.testimony(instance_of(process), name)
        copies = process in self._copies
        self._copies.discard(process)
        if (suspect := self._charges.pop(process, None)) is None:
            return  # the process came back meanwhile
        suspect.charged = False
        if suspect.refused_until:
            return  # another frontend has refused it
        if process not in suspect.deaths:
            suspect.deaths.append(process)
        count = len(suspect.deaths)
        unsure = not told.complete and (trial is None or not trial.sure)
        if copies and len(self._alone(suspect)) < 2:
            unsure = True
        # Count only the deaths at which it had no output.
        weight = sum(suspect.fingerprint in self._unproven.get(d, ()) for d in suspect.deaths)
        if unsure or told.tried or count == 1 or (told.others and weight <= 2):
            suspect.not_before = self._loop.time() + random.uniform(0.0, APART_S)
            _log.warning(
                "not certain that suspect %s killed %s: trying it again later",
                suspect.fingerprint, process,
            )  # fmt: skip
            self._others.release(suspect.fingerprint)
            self._on_free()
            return
        suspect.refused_until = self._loop.time() + REFUSE_S
        metrics.SUSPECTS.labels("convicted").inc()
        _log.error("refusing requests with this fingerprint from now on: %s", suspect.sentence)
        self._board.post(suspect.fingerprint, count, suspect.prompt_tokens, REFUSE_S)
        self._settle(suspect)

    def _settle(self, suspect: Suspect) -> None:
        """Handle a refusal: end waiting requests like it, and count its deaths against no other."""
        self._on_refused(suspect)
        self._explained.update(dict.fromkeys(suspect.deaths))
        _forget_oldest(self._explained, MAX_KNOWN)
        for other in list(self._known.values()):
            if other.cleared:
                self._explain(other)
        self._on_free()

    def on_output(self, flight: Flight) -> None:
        """Handle the first output of a request from its current worker."""
        flight.proven = True
        suspect = flight.suspect
        if suspect is not None and suspect.open and not _not_cleared(flight):
            suspect.cleared = True
            self._others.absolve(suspect.fingerprint)
            self._others.release(suspect.fingerprint)
            self._explain(suspect)
            metrics.SUSPECTS.labels("cleared").inc()
        self._end_turn(flight)

    def on_end(self, flight: Flight, finished: bool) -> None:
        """Handle the end of a request. finished: whether its answer was completed."""
        suspect = flight.suspect
        if suspect is not None and suspect.trying is flight:
            suspect.trying = None
        if suspect is not None and not (suspect.charged or suspect.refused_until):
            if finished:
                suspect.deaths.clear()
                self._known.pop(suspect.fingerprint, None)
                self._others.absolve(suspect.fingerprint)
            if suspect.trying is None:
                self._others.release(suspect.fingerprint)
        self._end_turn(flight)

    def forget(self, name: str) -> None:
        """Forget a fingerprint: it was cleared by command, or its registry entry has expired."""
        suspect = self._known.pop(name, None)
        if suspect is not None:
            suspect.deaths.clear()
            suspect.refused_until = 0.0
            self._others.absolve(name)
            self._others.release(name)
            self._on_free()

    # ---------------------------------------------------------------- inside

    def _new(self, flight: Flight) -> Suspect:
        metrics.SUSPECTS.labels("suspected").inc()
        name, prompt = name_of(flight), flight.request.prompt_token_ids or ()
        suspect = self._known[name] = Suspect(name, len(prompt))
        return suspect

    def _suspect(self, flight: Flight, suspect: Suspect | None) -> None:
        flight.suspect = suspect
        if suspect is not None and not suspect.prompt_tokens:  # known from another frontend
            suspect.prompt_tokens = len(flight.request.prompt_token_ids or ())
        if needs_turn(flight):
            self.turns.open.add(flight)

    def _recall(self, names: set[str], lost: Sequence[Flight] = ()) -> None:
        """Take unproven requests with these fingerprints back from living workers.
        lost: the requests of the worker that died."""
        gone, now = set(lost), self._loop.time()
        for flight in [f for f in self._flights() if not f.proven and f not in gone]:
            suspect = self._known.get(name_of(flight))
            if suspect is None or flight.fingerprint not in names:
                continue
            self._suspect(flight, suspect)
            if flight.worker is not None and suspect.open:
                suspect.left[flight.worker.process] = suspect.not_before = now + RECALL_S
                self._on_recalled(flight)

    def _add_unproven(self, process: str, names: set[str]) -> None:
        self._unproven.setdefault(process, set()).update(names)
        _forget_oldest(self._unproven, MAX_PROCESSES)

    def _alone(self, suspect: Suspect) -> list[str]:
        """Its deaths at which no other request was unproven, at any frontend that has answered."""
        return [d for d in suspect.deaths if self._unproven.get(d) == {suspect.fingerprint}]

    def _absolve(self, process: str, suspects: list[Suspect]) -> None:
        """Drop this death from the suspects: they have not caused it, or there was none."""
        for suspect in suspects:
            if process in suspect.deaths:
                suspect.deaths.remove(process)
                if not suspect.deaths and not suspect.charged:
                    del self._known[suspect.fingerprint]
        self.turns.open = {f for f in self.turns.open if needs_turn(f)}
        self._on_free()

    def _end_turn(self, flight: Flight) -> None:
        if self.turns.open:
            self.turns.open.discard(flight)
            self._on_free()

    def _charge(self, suspect: Suspect, process: str) -> None:
        _log.warning("suspect %s was alone when %s was lost", suspect.fingerprint, process)
        suspect.charged, suspect.seen_at = True, self._loop.time()
        self._charges[process] = suspect
        if process in self._gone:
            self.on_gone(process)
        else:
            self._loop.call_later(CONFIRM_S, self.on_gone, process)

    def _explain(self, suspect: Suspect) -> None:
        """Drop those of its deaths that another request has caused."""
        suspect.deaths = [d for d in suspect.deaths if d not in self._explained]
        if not suspect.deaths:
            self._known.pop(suspect.fingerprint, None)


def _forget_oldest(table: dict[str, Any], most: int) -> None:
    while len(table) > most:
        del table[next(iter(table))]


def _not_cleared(flight: Flight) -> bool:
    return flight.suspect is not None and len(flight.suspect.deaths) >= NOT_CLEARED
