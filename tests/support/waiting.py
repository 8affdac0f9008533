"""Waiting for what another thread or process does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

_FAR_S = 20.0


def patience(seconds: float) -> float:
    """How long to wait for what takes at most `seconds` on an idle machine.

    With three processes for each core that want to run, all takes three times as long."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def eventually(holds: Callable[[], bool], otherwise: str) -> None:
    """Wait until `holds()`. Fails with `otherwise` after 20 s of `patience`."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() < began + patience(_FAR_S), otherwise
        time.sleep(0.002)


def until(check: Callable[[], Any], within_s: float, what: str) -> Any:
    """Return the first true value of `check`. Raises AssertionError naming `what`.

    within_s: on an idle machine (`patience`)."""
    began = time.monotonic()
    while True:
        value = check()
        if value:
            return value
        # Asked each time: the load average of a run that has just begun is low.
        assert time.monotonic() < began + patience(within_s), f"not within {within_s} s: {what}"
        time.sleep(0.05)
