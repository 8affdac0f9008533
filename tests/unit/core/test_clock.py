"""The clock that processes use."""

from __future__ import annotations

from pullfill import clock


def test_the_clock_goes_on() -> None:
    first = clock.SYSTEM_CLOCK.monotonic()
    assert clock.SYSTEM_CLOCK.monotonic() >= first
