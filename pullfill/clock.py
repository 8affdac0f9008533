"""Time as an argument. Code that decides on time takes a `Clock`; tests pass a fake one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic time source."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        ...


def boot_s() -> float:
    """Return the seconds since the machine was started. The time that it slept counts.

    While a machine sleeps, Linux's CLOCK_MONOTONIC stands still and its CLOCK_BOOTTIME goes on.
    Where there is no CLOCK_BOOTTIME, this is CLOCK_MONOTONIC."""
    return time.clock_gettime(_BOOT)


_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
# The machine's CLOCK_MONOTONIC.
SYSTEM_CLOCK: Clock = time
