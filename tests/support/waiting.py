"""Waiting for what another thread does, without naming a time."""

from __future__ import annotations

import time
from collections.abc import Callable

_FAR_S = 20.0


def eventually(holds: Callable[[], bool], otherwise: str) -> None:
    """Wait until `holds()`. Fails with `otherwise` after 20 s."""
    give_up = time.monotonic() + _FAR_S
    while not holds():
        assert time.monotonic() < give_up, otherwise
        time.sleep(0.002)
