"""When a prefill worker sends `Heartbeat` on a control connection, and how long silence may last.

A worker that stalls for SILENT_S - ALIVE_INTERVAL_S seconds at most is not taken for gone.

Each pair of a decode and a prefill worker has a connection, and most pairs rarely use theirs. A
connection is unused after UNUSED_S without a claim, commit or ready. There `Heartbeat` is sent half
as often, and after RESTING_S a quarter as often. Each end measures this time by itself, and it
begins with the welcome.

A claim, commit or ready also proves that its sender is alive. So the next `Heartbeat` is due one
interval after it.
"""

from __future__ import annotations

from pullfill.runtime import timer_grid
from pullfill.wire import ALIVE_INTERVAL_S, SILENT_S

__all__ = ["ALIVE_INTERVAL_S", "RESTING_S", "UNUSED_S", "due", "patience", "pause"]

UNUSED_S, RESTING_S = 3.0, 10.0


def pause(unasked_s: float) -> float:
    """Seconds from one Heartbeat to the next.

    unasked_s: seconds since the last claim, commit or ready."""
    if unasked_s < UNUSED_S:
        return ALIVE_INTERVAL_S
    return ALIVE_INTERVAL_S * (2 if unasked_s < RESTING_S else 4)


def due(said: float, asked: float, pause_s: float) -> float:
    """When to send the next Heartbeat.

    Send times are rounded down to a grid, so heartbeats of many connections share one wake-up. The
    grid of unused connections has one point per pause, that of the others four.

    said: when the last Heartbeat was sent.
    asked: when the last claim, commit or ready was sent.
    pause_s: as of `pause`."""
    grid = pause_s if pause_s > ALIVE_INTERVAL_S else pause_s / 4
    return timer_grid.before(max(said, asked) + pause_s, grid)


def patience(unasked_s: float, silent_s: float = SILENT_S) -> float:
    """Seconds of silence after which the other end counts as gone.

    unasked_s: as for `pause`. silent_s: the result for a connection in use."""
    return silent_s + pause(unasked_s) - ALIVE_INTERVAL_S
