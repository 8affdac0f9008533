"""The ledger keeps its promises under any order of events."""

from __future__ import annotations

import pytest

from tests.support.fuzz import MANY
from tests.support.ledger_machine import explore

COMMON = {
    "claim granted", "claim held", "claim in_progress", "claim committed", "claim closed",
    "claim stale_incarnation",
    "attempt 2", "attempt 3", "write fenced", "quarantined",
    "commit accepted", "commit stale",
    "ready accepted", "ready stale", "read stale",
    "ended committed", "ended cancelled", "ended timeout", "ended claim_timeout",
    "ended publish_failed", "ended prefill_lost", "ended prefill_failed",
    "ended quarantined",
}  # fmt: skip
"""An exploration that does not come by these says little."""


@pytest.mark.essential
def test_any_order_of_events() -> None:  # `make chaos` runs many more
    """What hypothesis draws depends on the modules loaded: go on until all of it was there."""
    seen = explore(examples=MANY or 30, steps=60)
    for _ in range(30):
        if seen >= COMMON:
            break
        seen |= explore(examples=30, steps=60, repeat=False)
    assert seen >= COMMON
