"""Which request killed a decode worker, and how a suspect is tried again.

A worker died when its connection was lost and its process does not come back over a new one. Every
request that was in flight there is a suspect. What is known is kept for each fingerprint
(`engine.fingerprint`), so the second try of a user counts as a second try.

    unknown ──a worker dies with it──▶ suspected ──its turn comes──▶ on probation
    on probation ──an output comes──▶ cleared: it goes on like any other request
    on probation ──the worker dies, no other request there was unproven──▶ charged
    on probation ──the worker dies, others there were unproven──▶ suspected, now of two deaths
    charged ──the process is back: it had not died──▶ suspected
    charged ──the registry drops the worker, or CONFIRM_S pass──▶ refused
    charged ──another frontend had a suspect there too──▶ suspected, now of two deaths
    refused ──REFUSE_S pass, or `pullfill suspects clear`──▶ unknown

A request is *unproven* at a worker until the worker sends an output of it. A worker has at most one
request on probation, and none starts there while another request is unproven, so that a death names
one fingerprint. Only then is it charged. A wrong suspicion costs a wait, never an answer.

A frontend does not see the requests of others. So each writes to etcd what it had at a worker that
died. A suspect of another frontend there ends the charge. An unproven request that was no suspect
ends the first charge only.

Whoever is refused explains all deaths that it was at: they no longer count against those that are
cleared. Who is not cleared yet still has to be, for two at one worker may both be deadly.

Single event loop. The per-step path is not touched: one call for each request's first output.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from pullfill import log
from pullfill.frontend import metrics
from pullfill.frontend.flight import Flight, Suspect, name_of, needs_turn
from pullfill.frontend.probation import Turns

_log = log.get("frontend.suspects")

REFUSE_S = 600.0
"""How long a fingerprint stays refused, and how long a suspicion is remembered."""
CONFIRM_S = 8.0
"""How long the process of a lost worker may take to come back. Longer than a lease lives (5 s): a
worker that died is dropped by the registry before."""
APART_S = 2.0
"""Two frontends that had a suspect at one death try them again at different times within this."""
NOT_CLEARED = 3
"""After so many deaths without a culprit an output clears nobody any more."""
MAX_DEATHS = 6
"""After so many a request is given up."""
MAX_KNOWN = 4096
"""Fingerprints remembered."""


class Board(Protocol):
    """The refused fingerprints of all frontends: `registry.suspects.SuspectBoard`."""

    def __len__(self) -> int: ...

    @property
    def shared(self) -> bool:
        """Whether there are other frontends."""
        ...

    def left_s(self, fingerprint: str) -> float:
        """How long it is refused; 0 if it is not."""
        ...

    def post(self, fingerprint: str, deaths: int, prompt_tokens: int, ttl_s: float) -> None:
        """Refuse it at every frontend. Returns at once."""
        ...

    def testify(self, instance_id: str, suspects: int, others: int) -> None:
        """Tell other frontends how many suspects and other unproven requests were at a worker that
        was lost. Returns at once."""
        ...

    async def testimony(self, instance_id: str) -> tuple[int, int]:
        """The same of all other frontends together, which get a moment to say it; (0, 0) if nobody
        can say."""
        ...


class _NoBoard:
    shared = False

    def __len__(self) -> int:
        return 0

    def left_s(self, fingerprint: str) -> float:
        return 0.0

    def post(self, fingerprint: str, deaths: int, prompt_tokens: int, ttl_s: float) -> None: ...

    def testify(self, instance_id: str, suspects: int, others: int) -> None: ...

    async def testimony(self, instance_id: str) -> tuple[int, int]:
        return 0, 0


class Suspects:
    """See the module. patience_s: how long it is worth waiting for another worker to come.

    on_refused: told of a fingerprint that is refused from now on. on_free: told when requests that
    wait for their turn may have one.
    """

    def __init__(
        self,
        patience_s: float,
        on_refused: Callable[[Suspect], None],
        on_free: Callable[[], None],
        board: Board | None = None,
    ) -> None:
        self._on_refused = on_refused
        self._on_free = on_free
        self._board = _NoBoard() if board is None else board
        self._loop = asyncio.get_running_loop()
        self._known: dict[str, Suspect] = {}
        self._charges: dict[str, Suspect] = {}
        self._explained: dict[str, None] = {}
        self._verdicts: dict[str, asyncio.Task[None]] = {}
        self.turns = Turns(patience_s, lambda: self._board.shared)

    def listed(self) -> list[dict[str, object]]:
        """What is suspected here and not cleared, for people."""
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
        """A new request. Why it is refused; "" if it is not."""
        if not self._known and not len(self._board):
            return ""
        name, now = name_of(flight), self._loop.time()
        left_s, known = self._board.left_s(name), self._known.get(name)
        if known is not None:
            left_s = max(left_s, known.refused_until - now)
            if left_s <= 0 and known.seen_at + REFUSE_S < now:
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
        names = {name_of(f) for f in unproven}
        if unproven:
            tried = sum(needs_turn(f) for f in unproven)
            self._board.testify(instance_of(process), tried, len(unproven) - tried)
        only = self._known.get(names.pop()) if len(names) == 1 else None
        if only is not None and only.open and not only.charged:
            self._charge(only, process)
            return
        for flight in flights:
            suspect = self._known.pop(name_of(flight), None)
            if suspect is None:
                suspect = Suspect(flight.fingerprint, len(flight.request.prompt_token_ids or ()))
                metrics.SUSPECTS.labels("suspected").inc()
            self._known[flight.fingerprint] = suspect
            if process not in suspect.deaths:
                suspect.deaths.append(process)
                suspect.likely = False
            suspect.likely |= flight in unproven
            suspect.seen_at, suspect.cleared = now, False
            self._suspect(flight, suspect)
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def on_return(self, process: str) -> None:
        """A process that was taken for dead has connected again."""
        suspect = self._charges.pop(process, None)
        if suspect is not None:
            suspect.charged = False
        for other in list(self._known.values()):
            if process in other.deaths:
                other.deaths.remove(process)
                if not other.deaths and not other.charged:
                    del self._known[other.fingerprint]
        self.turns.open = {f for f in self.turns.open if needs_turn(f)}
        self._on_free()

    def on_gone(self, process: str) -> None:
        """The registry has dropped the worker, or it had time enough to come back: it did die."""
        if process in self._charges and process not in self._verdicts:
            task = asyncio.create_task(self._judge(process), name=f"verdict-{process}")
            self._verdicts[process] = task
            task.add_done_callback(lambda _: self._verdicts.pop(process, None))

    async def _judge(self, process: str) -> None:
        """Refuse who is charged with this death, unless another frontend may have caused it."""
        tried, others = await self._board.testimony(instance_of(process))
        suspect = self._charges.pop(process, None)
        if suspect is None:
            return  # the process is back
        suspect.charged = False
        suspect.deaths.append(process)
        count = len(suspect.deaths)
        if tried or count == 1 or (others and count == 2):
            suspect.not_before = self._loop.time() + random.uniform(0.0, APART_S)
            _log.warning("others than suspect %s may have killed %s", suspect.fingerprint, process)
            self._on_free()
            return
        suspect.refused_until = self._loop.time() + REFUSE_S
        metrics.SUSPECTS.labels("convicted").inc()
        _log.error("refused from now on: %s", sentence(suspect))
        self._board.post(suspect.fingerprint, count, suspect.prompt_tokens, REFUSE_S)
        self._on_refused(suspect)
        self._explained.update(dict.fromkeys(suspect.deaths))
        while len(self._explained) > MAX_KNOWN:
            del self._explained[next(iter(self._explained))]
        for other in list(self._known.values()):
            if other.cleared:
                self._explain(other)
        self._on_free()

    def on_output(self, flight: Flight) -> None:
        """The first output of a request from the worker it is at."""
        flight.proven = True
        suspect = flight.suspect
        if suspect is not None and suspect.open and not _not_cleared(flight):
            suspect.cleared = True
            self._explain(suspect)
            metrics.SUSPECTS.labels("cleared").inc()
        if self.turns.open:
            self.turns.open.discard(flight)
            self._on_free()

    def on_end(self, flight: Flight, finished: bool) -> None:
        """The request has ended; finished: as its engine meant it to."""
        suspect = flight.suspect
        if finished and suspect is not None and not (suspect.charged or suspect.refused_until):
            suspect.deaths.clear()
            self._known.pop(suspect.fingerprint, None)
        if self.turns.open:
            self.turns.open.discard(flight)
            self._on_free()

    def forget(self, name: str) -> None:
        """The command has cleared this fingerprint, or the registry's entry has run out."""
        suspect = self._known.pop(name, None)
        if suspect is not None:
            suspect.deaths.clear()
            suspect.refused_until = 0.0
            self._on_free()

    # ---------------------------------------------------------------- inside

    def _suspect(self, flight: Flight, suspect: Suspect | None) -> None:
        flight.suspect = suspect
        if needs_turn(flight):
            self.turns.open.add(flight)

    def _charge(self, suspect: Suspect, process: str) -> None:
        _log.warning("suspect %s was alone when %s was lost", suspect.fingerprint, process)
        suspect.charged, suspect.seen_at = True, self._loop.time()
        self._charges[process] = suspect
        self._loop.call_later(CONFIRM_S, self.on_gone, process)

    def _explain(self, suspect: Suspect) -> None:
        """Forget those of its deaths that are another's."""
        suspect.deaths = [d for d in suspect.deaths if d not in self._explained]
        if not suspect.deaths:
            self._known.pop(suspect.fingerprint, None)


def instance_of(process: str) -> str:
    """The instance id in the name of a process (`link.process_of`)."""
    return process.partition("@")[0]


def sentence(suspect: Suspect) -> str:
    """For the user of a request that is refused."""
    workers = ", ".join(map(instance_of, suspect.deaths))
    return (
        f"{len(suspect.deaths)} decode workers died while this request was in flight ({workers}), "
        f"so it is not sent again. Requests with its fingerprint {suspect.fingerprint} are refused "
        f"for {REFUSE_S / 60:.0f} minutes; to allow it before: pullfill suspects clear "
        f"{suspect.fingerprint}"
    )


def _not_cleared(flight: Flight) -> bool:
    return flight.suspect is not None and len(flight.suspect.deaths) >= NOT_CLEARED
