"""The ledger keeps its promises under any order of events, and the model would notice if not:
break the ledger in one place, and the model finds an order of events that shows it."""

from __future__ import annotations

import pytest

from tests.support.fuzz import MANY
from tests.support.ledger_machine import explore
from tests.support.ledger_mutants import BROKEN

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
SOON = (
    "skips the fence proof", "settles twice", "forgets to release", "forgets the message",
    "grants to a second writer", "steals from a holder", "reads beside the writer",
    "grants what is being read", "never expires", "never looks again",
    "waits for a stopped writer", "waits without a worker", "leaks fence slots",
)  # fmt: skip
"""Found within a second. `tests/chaos/test_ledger_at_length.py` looks for the others as well."""


@pytest.mark.essential
def test_any_order_of_events() -> None:  # `make chaos` runs many more
    """What hypothesis draws depends on the modules loaded: go on until all of it was there."""
    seen = explore(examples=MANY or 30, steps=60)
    for _ in range(30):
        if seen >= COMMON:
            break
        seen |= explore(examples=30, steps=60, repeat=False)
    assert seen >= COMMON


@pytest.mark.parametrize("broken", SOON)
def test_the_model_finds_a_ledger_that(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN[broken](monkeypatch)
    with pytest.raises(AssertionError):
        explore(3000, 60, find_only=True)
