"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_FAR_S = 20.0


def eventually(holds: Callable[[], bool], otherwise: str) -> None:
    """Wait until `holds()`. Fails with `otherwise` after 20 s."""
    give_up = time.monotonic() + _FAR_S
    while not holds():
        assert time.monotonic() < give_up, otherwise
        time.sleep(0.002)


def until(check: Callable[[], Any], within_s: float, what: str) -> Any:
    """Return the first true value of `check`. Raises AssertionError naming `what`."""
    deadline = time.monotonic() + within_s
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.05)
