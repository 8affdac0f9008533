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

    While a machine sleeps, Linux stops CLOCK_MONOTONIC, but not CLOCK_BOOTTIME. A system without
    CLOCK_BOOTTIME gets CLOCK_MONOTONIC."""
    return time.clock_gettime(_BOOT)


_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
# The machine's CLOCK_MONOTONIC.
SYSTEM_CLOCK: Clock = time
