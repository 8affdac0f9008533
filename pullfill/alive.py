"""How often a prefill worker says on a control connection that it lives, and how long either end
may say nothing: in both cases a stall of SILENT_S - ALIVE_INTERVAL_S is forgiven.

There is a connection for each pair of workers, and most pairs have nothing to do with each other.
Over one on which nothing was asked for a minute it is said half as often. Each end counts that
minute by itself: from the welcome, and from each claim, commit or ready.
"""

from __future__ import annotations

from pullfill.wire import ALIVE_INTERVAL_S, SILENT_S

__all__ = ["ALIVE_INTERVAL_S", "UNUSED_S", "patience", "pause"]

UNUSED_S = 60.0


def pause(unasked_s: float) -> float:
    """Seconds to the next Alive, `unasked_s` after the last question."""
    return ALIVE_INTERVAL_S if unasked_s < UNUSED_S else 2 * ALIVE_INTERVAL_S


def patience(unasked_s: float, silent_s: float = SILENT_S) -> float:
    """Seconds without a word after which the other end is gone; `silent_s`: while it is used."""
    return silent_s + pause(unasked_s) - ALIVE_INTERVAL_S
