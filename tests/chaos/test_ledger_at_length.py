"""The order of events in the handoff ledger, explored for minutes instead of seconds."""

from __future__ import annotations

import pytest

from tests.support.ledger_machine import explore

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

REACHED = {
    "claim granted", "claim held", "claim in_progress", "claim committed", "claim closed",
    "claim stale_incarnation",
    "attempt 2", "attempt 3", "write fenced", "read fenced", "quarantined", "died in a batch",
    "prefix read",
    "2 batches at once", "3 batches at once",
    "commit accepted", "commit stale", "commit wrong_block_count", "commit writer_not_quiet",
    "ready accepted", "ready stale", "ready wrong_block_count", "ready writer_not_quiet",
    "read accepted", "read read_failed", "read stale",
    "ended committed", "ended cancelled", "ended timeout", "ended claim_timeout",
    "ended publish_failed", "ended prefill_lost", "ended prefill_failed", "ended rejected",
    "ended quarantined",
}  # fmt: skip


def test_any_order_of_events_at_length() -> None:
    """Other orders at each run; hypothesis prints the one that fails."""
    assert explore(4000, 100, repeat=False) >= REACHED
