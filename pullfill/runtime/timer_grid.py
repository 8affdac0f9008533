"""Aligns the periodic timers of a process, so that they share wake-ups.

An idle worker pings NATS, renews its lease, checks for silent peers, and so on. A wake-up of the
event loop costs more CPU than each of these. So all of them take their times from one grid: the
multiples of the interval, plus a phase. The phase is random per process, so processes that start
together reach the servers at different times.

The grids of 0.5, 1 and 2 s coincide. Other intervals have grids of their own.
"""

from __future__ import annotations

import math
import os
import random

_LEAST = 0.25
"""Share of the interval. `at` skips a grid point that is nearer than this."""

_phase = random.random()


def at(now: float, every_s: float) -> float:
    """Return the next grid point that is at least a quarter of `every_s` after `now`.

    It is at most 1.25 times `every_s` after `now`.

    now: seconds of time.monotonic(), which is the clock of asyncio's loops."""
    beats = math.floor((now - _phase) / every_s) + 1
    if (when := _phase + beats * every_s) - now < _LEAST * every_s:
        when = _phase + (beats + 1) * every_s
    return when


def left(now: float, every_s: float) -> float:
    """Return the seconds from `now` to `at(now, every_s)`."""
    return at(now, every_s) - now


def before(until: float, every_s: float) -> float:
    """Return the last grid point that is not after `until`, in seconds of time.monotonic()."""
    return _phase + math.floor((until - _phase) / every_s) * every_s


def _choose_phase() -> None:
    global _phase
    _phase = random.random()


os.register_at_fork(after_in_child=_choose_phase)
