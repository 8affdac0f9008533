"""Pauses between tries."""

from __future__ import annotations

from pullfill.backoff import Backoff


def test_pauses_double_up_to_the_longest_until_a_try_succeeds() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert [backoff.next(), backoff.pause_s] == [0.5, 1.0]
