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
RARE = {
    "read fenced", "died in a batch", "prefix read", "2 batches at once", "3 batches at once",
    "commit wrong_block_count", "commit writer_not_quiet",
    "ready wrong_block_count", "ready writer_not_quiet",
    "read accepted", "read read_failed", "ended rejected",
}  # fmt: skip
"""Nor does a long one that does not come by these."""


@pytest.mark.essential
@pytest.mark.timeout(1200)
def test_any_order_of_events() -> None:
    """What hypothesis draws depends on the modules loaded: go on until all of it was there."""
    wanted = COMMON | RARE if MANY else COMMON
    # `make chaos` runs many more, others at each run.
    seen = explore(4 * MANY or 30, 100 if MANY else 60, repeat=not MANY)
    for _ in range(30):
        if seen >= wanted:
            break
        seen |= explore(examples=30, steps=60, repeat=False)
    assert seen >= wanted
