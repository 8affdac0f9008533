"""Which decode workers a prefill worker stays connected to while it has no job of them.

With 256 workers of each kind, a connection for each pair would be 65,536 connections. So each
decode worker stays connected to the `most` prefill workers that rank highest for it. In addition
each prefill worker stays connected to the `LEAST` decode workers that rank highest for it. Other
pairs connect when a job needs it (control_connections.py). With `most` prefill workers or fewer
every pair is connected.

The rank of a pair is a hash of the two names (rendezvous hashing). So all prefill workers compute
the same ranks without talking to each other. A worker that comes or goes changes only its own
connections and those that replace them.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from hashlib import blake2b

from pullfill.config import STANDING_LINKS

LEAST = 4
"""How many decode workers a prefill worker stays connected to at least. So a prefill worker that no
decode worker can reach is noticed, also if there are far more prefill than decode workers."""


def key(name: str) -> int:
    """64 bits that look random."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())


def rank(decode: int, prefill: int) -> int:
    """Return the rank of a pair, from both keys. Pairs of a higher rank are connected first."""
    # A product with an odd number, because a fleet of 256 + 256 workers makes 65,536 of these in
    # each prefill worker when it starts. Its high bits depend on all bits of both keys.
    return (decode ^ prefill) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF


@dataclass(slots=True)
class _Place:
    """Our rank at one decode worker.

    key: of the decode worker's name.
    ahead: number of prefill workers that rank higher there."""

    key: int
    rank: int
    ahead: int


class Standing:
    """See the module. For the prefill worker `me`."""

    def __init__(self, me: str, most: int = STANDING_LINKS) -> None:
        self._me = me
        self._key = key(me)
        self._most = most
        self._others: dict[str, int] = {}
        self._places: dict[str, _Place] = {}

    def prefill(self, name: str, pulls: bool) -> None:
        """Note whether another prefill worker is in the cluster and pulls jobs."""
        if pulls == (name in self._others) or name == self._me:
            return
        if not pulls:
            theirs = self._others.pop(name)
            for place in self._places.values():
                place.ahead -= rank(place.key, theirs) > place.rank
            return
        theirs = self._others[name] = key(name)
        for place in self._places.values():
            place.ahead += rank(place.key, theirs) > place.rank

    def decode(self, name: str, here: bool) -> None:
        """Note whether a decode worker can be connected."""
        if not here:
            self._places.pop(name, None)
        elif name not in self._places:
            decode = key(name)
            ours = rank(decode, self._key)
            ahead = sum(rank(decode, theirs) > ours for theirs in self._others.values())
            self._places[name] = _Place(decode, ours, ahead)

    @property
    def pool(self) -> int:
        """Number of prefill workers that pull jobs, this one included.

        0 while each decode worker is connected to all of them, and can count them itself."""
        workers = len(self._others) + 1
        return workers if workers > self._most else 0

    def wanted(self) -> set[str]:
        """The decode workers to stay connected to."""
        places = self._places
        best = heapq.nlargest(min(LEAST, self._most), places, key=lambda d: places[d].rank)
        return {d for d, place in places.items() if place.ahead < self._most} | set(best)
