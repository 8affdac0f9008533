"""The ledger's checks can fail: break it in one place, and the model finds an order of events that
shows it. `tests/chaos/test_ledger_at_length.py` does it with all of them."""

from __future__ import annotations

import pytest

from tests.support.ledger_machine import explore
from tests.support.ledger_mutants import BROKEN

SOON = (
    "skips the fence proof",
    "settles twice",
    "forgets to release",
    "forgets the message",
    "grants to a second writer",
    "steals from a holder",
    "reads beside the writer",
    "grants what is being read",
    "never expires",
    "never looks again",
    "waits for a stopped writer",
    "waits without a worker",
    "leaks fence slots",
    "miscounts",
)
"""Found within a second; the others take a longer exploration."""


@pytest.mark.parametrize("broken", SOON)
def test_the_model_finds_a_ledger_that(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN[broken](monkeypatch)
    with pytest.raises(AssertionError):
        explore(3000, 60, find_only=True)
