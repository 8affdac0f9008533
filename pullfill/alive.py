"""How often a prefill worker says on a control connection that it lives, and how long either end
may say nothing: in both cases a stall of SILENT_S - ALIVE_INTERVAL_S is forgiven.

There is a connection for each pair of workers, and most pairs have nothing to do with each other.
Over one on which nothing was asked for UNUSED_S it is said half as often. Each end counts that
time by itself: from the welcome, and from each claim, commit or ready. A claim, a commit or a
ready says as well that its sender lives, so an `Alive` follows them only if there was no other for
as long.
"""

from __future__ import annotations

from pullfill import beat
from pullfill.wire import ALIVE_INTERVAL_S, SILENT_S

__all__ = ["ALIVE_INTERVAL_S", "UNUSED_S", "due", "patience", "pause"]

UNUSED_S = 3.0


def pause(unasked_s: float) -> float:
    """Seconds to the next Alive, `unasked_s` after the last question."""
    return ALIVE_INTERVAL_S if unasked_s < UNUSED_S else 2 * ALIVE_INTERVAL_S


def due(said: float, asked: float, pause_s: float) -> float:
    """When to say it next: `said` it was last, `asked` was the last question. A little sooner than
    it need be, so that a worker says it over many connections in one go: over those that are
    unused all at once, over the others four times in a pause."""
    grid = pause_s if pause_s > ALIVE_INTERVAL_S else pause_s / 4
    return beat.before(max(said, asked) + pause_s, grid)


def patience(unasked_s: float, silent_s: float = SILENT_S) -> float:
    """Seconds without a word after which the other end is gone; `silent_s`: while it is used."""
    return silent_s + pause(unasked_s) - ALIVE_INTERVAL_S
