"""How soon a request wants its first token, and which urgency a prefill worker takes a job of next.

Jobs of one urgency come in the order in which they were published.

Between urgencies: deficit round robin, charged in uncached tokens. Each urgency has a credit, and
the most urgent one that has any left is served first. When only urgencies without credit have jobs,
each urgency gets WEIGHT x QUANTUM again, until one of them has credit. So urgent jobs come first
as long as they ask for no more than their share, and no urgency is left without its share. An
urgency without jobs saves one round at most.

Each prefill worker counts for itself. The shares of all workers are those of each.
"""

from __future__ import annotations

import enum

QUANTUM = 2048
"""Tokens per round and unit of weight."""


class Urgency(enum.IntEnum):
    """How soon the request wants its first token. The most urgent one is the smallest."""

    TIGHT = 0
    NORMAL = 1
    LOOSE = 2

    @property
    def label(self) -> str:
        return self.name.lower()


WEIGHT = {Urgency.TIGHT: 4, Urgency.NORMAL: 2, Urgency.LOOSE: 1}


def urgency_of(ttft_ms: float | None, tight_ms: float, loose_ms: float) -> Urgency:
    """Return the urgency of a request.

    ttft_ms: its target for the time to its first token. None: it names none, and is normal.
    tight_ms: longest target that is tight. loose_ms: shortest one that is loose."""
    if ttft_ms is None or tight_ms < ttft_ms < loose_ms:
        return Urgency.NORMAL
    return Urgency.TIGHT if ttft_ms <= tight_ms else Urgency.LOOSE


class Turns:
    """One prefill worker's choice between urgencies. Pure: it does no I/O and reads no clock."""

    def __init__(self) -> None:
        self._credit = {urgency: weight * QUANTUM for urgency, weight in WEIGHT.items()}

    def order(self) -> list[Urgency]:
        """Return all urgencies. Take the next job from the first one that has a job."""
        return sorted(Urgency, key=lambda one: (self._rounds(one), one))

    def took(self, urgency: Urgency, tokens: int) -> None:
        """Charge a job that this worker has taken, in the order of `order`."""
        if rounds := self._rounds(urgency):  # no urgency that has a job had credit
            for each, weight in WEIGHT.items():
                most = weight * QUANTUM
                self._credit[each] = min(most, self._credit[each] + rounds * most)
        self._credit[urgency] -= tokens

    def _rounds(self, urgency: Urgency) -> int:
        """Rounds until it has credit. After a long job these are many."""
        credit = self._credit[urgency]
        return 0 if credit > 0 else 1 + -credit // (WEIGHT[urgency] * QUANTUM)
