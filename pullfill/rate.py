"""Estimators: of all that takes time (prefills, links, reads), of what share it takes, of sums.

A `Rate` fits `y = a * x1 + b * x2` to the newest observations, with a and b at least 0. Old
observations lose weight with each new one and with time, so a change of speed is learned from the
next few observations, however often they come.
"""

from __future__ import annotations

import math

from pullfill.clock import Clock

# A rate that was not observed for this long is not believed any more, so that one bad
# measurement cannot keep prompts away from a worker for ever.
FORGET_S = 30.0
# Weight that is left to older observations when a new one comes.
_KEEP = 0.7
# How strongly a solution is held to the one before. It decides where the observations do not,
# for example when all of them have the same x1 and x2.
_STAY = 0.02
# An observation counts as at most so many times the expected value, and at least the fraction.
# So one pause of the machine does not spoil the fit, the second observation included. If the next
# one is as far off in the same direction, the speed has changed, and what was learned before is
# forgotten.
_CLIP = 4.0
# What an addition leaves of a sum.
_LEAVES = 0.97
# Over how many seconds a share of the time is measured.
SHARE_S = 5.0

Three = tuple[float, float, float]


class Rate:
    """See the module. One thread observes. Any thread may read.

    a, b: the solution. count: number of observations. at: when the last one came."""

    __slots__ = ("_clipped", "_s11", "_s12", "_s22", "_t1", "_t2", "a", "at", "b", "count")

    def __init__(self) -> None:
        self._s11 = self._s12 = self._s22 = self._t1 = self._t2 = 0.0
        self._clipped = 0
        self.a = self.b = self.at = 0.0
        self.count = 0

    def of(self, x1: float, x2: float = 0.0) -> float:
        """Return y."""
        return self.a * x1 + self.b * x2

    def fresh(self, now: float, forget_s: float = FORGET_S) -> bool:
        """Whether it was observed lately."""
        return self.count > 0 and now - self.at <= forget_s

    def observe(self, x1: float, x2: float, y: float, now: float) -> None:
        """Learn from one observation. now: seconds of a monotonic clock."""
        if not math.isfinite(y) or y < 0:
            return
        left = _KEEP * 0.5 ** (max(0.0, now - self.at) / (FORGET_S / 4)) if self.count else 0.0
        expected = self.of(x1, x2)
        if expected > 0:
            within = min(max(y, expected / _CLIP), expected * _CLIP)
            off = (y > within) - (y < within)
            if off and off == self._clipped:
                left, self._clipped = 0.0, 0
            else:
                y, self._clipped = within, off
        # The error of a time grows with its length. So each weighs by its size, and not by its
        # square: with one x this gives the sum of the times over the sum of the sizes.
        w = 1.0 / max(x1 + x2, 1e-9)
        self._s11 = self._s11 * left + w * x1 * x1
        self._s12 = self._s12 * left + w * x1 * x2
        self._s22 = self._s22 * left + w * x2 * x2
        self._t1 = self._t1 * left + w * x1 * y
        self._t2 = self._t2 * left + w * x2 * y
        self.count += 1
        self.at = now
        self._solve()

    def _solve(self) -> None:
        s11, s22 = self._s11, self._s22
        stay = _STAY if self.count > 1 else 0.0
        t1 = self._t1 + stay * s11 * self.a
        t2 = self._t2 + stay * s22 * self.b
        m11, m22 = s11 * (1 + stay), s22 * (1 + stay)
        det = m11 * m22 - self._s12 * self._s12
        if det > 1e-9 * m11 * m22:
            a = (t1 * m22 - t2 * self._s12) / det
            b = (t2 * m11 - t1 * self._s12) / det
        else:
            a, b = (t1 / m11 if m11 else 0.0), 0.0
        # With one of them at its bound, the best value of the other follows from its sums alone.
        if b < 0:
            a, b = (t1 / m11 if m11 else 0.0), 0.0
        elif a < 0:
            a, b = 0.0, (t2 / m22 if m22 else 0.0)
        self.a, self.b = max(0.0, a), max(0.0, b)


class Share:
    """What share of the time something took lately: of the last SHARE_S, about."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = self._at = clock.monotonic()
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """Note that it took so long until now."""
        now = self._clock.monotonic()
        self._seconds = seconds + self._seconds * fade(now - self._at)
        self._at = now

    def share(self) -> float:
        """Return the share."""
        now = self._clock.monotonic()
        # There is no time before the beginning.
        whole = SHARE_S * (1.0 - fade(max(now - self._began, 0.5)))
        return self._seconds * fade(now - self._at) / whole


def lately(sums: Three, more: Three) -> Three:
    """Add to sums of what came lately: about the last 33 additions count."""
    a, b, c = (new + _LEAVES * old for new, old in zip(more, sums, strict=True))
    return a, b, c


def fade(seconds: float) -> float:
    """What is left of a share after so long without any more."""
    return math.exp(-seconds / SHARE_S)
