"""Makes all that a process does every second or so fall into the same moments.

An idle worker pings NATS, keeps its lease, looks whether anybody is silent, and so on. Each of
these wakes its loop, and a wake-up costs more than what is done in it. So all of them take their
moments from one grid. Its phase is random: processes that are started together ask the servers at
different moments.

0.5, 1 and 2 s fall together; other intervals have grids of their own.
"""

from __future__ import annotations

import math
import os
import random

_LEAST = 0.25
"""Of an interval. A beat that is nearer than that is left out."""

_phase = random.random()


def at(now: float, every_s: float) -> float:
    """The next moment of the grid of `every_s`, `every_s` / 4 after `now` at least and 1.25 times
    `every_s` at most. now: of the clock of asyncio's loops, which is time.monotonic()."""
    beats = math.floor((now - _phase) / every_s) + 1
    if (when := _phase + beats * every_s) - now < _LEAST * every_s:
        when = _phase + (beats + 1) * every_s
    return when


def left(now: float, every_s: float) -> float:
    """Seconds until then."""
    return at(now, every_s) - now


def before(until: float, every_s: float) -> float:
    """The last moment of the grid that is not after `until`."""
    return _phase + math.floor((until - _phase) / every_s) * every_s


def _of_this_process() -> None:
    global _phase
    _phase = random.random()


os.register_at_fork(after_in_child=_of_this_process)
