"""Which waiting job a prefill worker takes next.

A job that must wait for a prefill worker waits in a *lane*: jobs of one urgency, and of about one
size. Of one lane the oldest job comes first.

Between urgencies: deficit round robin, charged in uncached tokens. Each urgency has a credit, and
the most urgent one that has any left is served. When none of those that wait has any, each gets
WEIGHT x QUANTUM again. So urgent jobs come first as long as they ask for no more than their share,
and no urgency is left without its share. An urgency that nobody waits in saves one round at most.
A job that is taken while no other job waits is not charged.

Within an urgency: the shortest jobs first. A lane of longer jobs comes next once shorter ones have
passed it by PATIENCE times the length of its jobs.

Each prefill worker counts for itself. The shares of all workers are those of each.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from typing import NamedTuple

from pullfill.errors import BadMessage

QUANTUM = 2048
"""Tokens per round and unit of weight."""
SIZES = (1024, 4096, 16384)
"""Most tokens of a job in the lanes of an urgency, but for the last lane, which has no limit."""
PATIENCE = 4
"""See the module."""


class Urgency(enum.IntEnum):
    """How soon the request wants its first token. The most urgent one is the smallest."""

    TIGHT = 0
    NORMAL = 1
    LOOSE = 2

    @property
    def label(self) -> str:
        return self.name.lower()


WEIGHT = {Urgency.TIGHT: 4, Urgency.NORMAL: 2, Urgency.LOOSE: 1}
_LABELS = {urgency.label: urgency for urgency in Urgency}


def urgency_of(ttft_ms: float | None, tight_ms: float, loose_ms: float) -> Urgency:
    """Return the urgency of a request.

    ttft_ms: its target for the time to its first token. None: it names none, and is normal.
    tight_ms: longest target that is tight. loose_ms: shortest one that is loose."""
    if ttft_ms is None or tight_ms < ttft_ms < loose_ms:
        return Urgency.NORMAL
    return Urgency.TIGHT if ttft_ms <= tight_ms else Urgency.LOOSE


def read_urgency(label: str | None) -> Urgency:
    """The urgency of this label. Normal if it is none."""
    return _LABELS.get(label or "", Urgency.NORMAL)


class Lane(NamedTuple):
    """The waiting jobs of one urgency and of about one size.

    size: index in SIZES of the most tokens of its jobs. len(SIZES): there is no limit."""

    urgency: Urgency
    size: int

    @property
    def label(self) -> str:
        """Its name, as in `tight-0`."""
        return f"{self.urgency.label}-{self.size}"


LANES = tuple(Lane(urgency, size) for urgency in Urgency for size in range(len(SIZES) + 1))
_BY_LABEL = {lane.label: lane for lane in LANES}


def lane_of(urgency: Urgency, tokens: int) -> Lane:
    """Return the lane of a job that computes so many tokens."""
    return Lane(urgency, bisect_left(SIZES, tokens))


def parse_lane(label: str) -> Lane:
    """Return the lane with this label. Raises BadMessage."""
    if (lane := _BY_LABEL.get(label)) is None:
        raise BadMessage(f"not a lane: {label[:100]!r}")
    return lane


class Turns:
    """One prefill worker's choice of lanes. Pure: it does no I/O and reads no clock."""

    def __init__(self) -> None:
        self._credit = {urgency: WEIGHT[urgency] * QUANTUM for urgency in Urgency}
        # The lanes that hold jobs, and how many tokens of shorter jobs have passed each.
        self._passed: dict[Lane, int] = {}

    def __bool__(self) -> bool:
        """Whether a job waits in any lane."""
        return bool(self._passed)

    def fill(self, lane: Lane, passed: int = 0) -> None:
        """Note that a job waits in this lane. passed: tokens that have passed it, if it is new."""
        self._passed.setdefault(lane, passed)

    def empty(self, lane: Lane) -> int:
        """Note that no job waits in this lane. Returns how many tokens have passed it."""
        return self._passed.pop(lane, 0)

    @property
    def urgent(self) -> bool:
        """Whether the next job is tight."""
        lane = self.next()
        return lane is not None and lane.urgency is Urgency.TIGHT

    def next(self) -> Lane | None:
        """Return the lane to take a job from now. None: no job waits."""
        if not self._passed:
            return None
        waiting = sorted({lane.urgency for lane in self._passed})
        if all(self._credit[one] <= 0 for one in waiting):
            # All rounds in one go: a long job costs many of them.
            rounds = 1 + min(-self._credit[one] // (WEIGHT[one] * QUANTUM) for one in waiting)
            for each, weight in WEIGHT.items():
                most = weight * QUANTUM
                self._credit[each] = min(most, self._credit[each] + rounds * most)
        urgency = next(one for one in waiting if self._credit[one] > 0)
        lanes = sorted(lane for lane in self._passed if lane.urgency is urgency)
        late = [one for one in lanes[1:] if self._passed[one] >= PATIENCE * SIZES[one.size - 1]]
        return late[-1] if late else lanes[0]

    def took(self, urgency: Urgency, tokens: int, lane: Lane | None = None) -> None:
        """Charge a job that this worker has taken.

        lane: None if the job has not waited in a lane."""
        if not self._passed:
            return  # no other job waits
        self._credit[urgency] -= tokens
        if lane is None:
            return
        for other in self._passed:
            if other.urgency is lane.urgency and other.size > lane.size:
                self._passed[other] += tokens
        if lane in self._passed:
            self._passed[lane] = 0
