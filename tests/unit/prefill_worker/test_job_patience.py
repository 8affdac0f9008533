"""How long the queue keeps a job whose decode worker cannot be reached from here."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pullfill.errors import PeerUnavailable
from pullfill.prefill_worker.ending import Calls, Opening, Revoked, patience


@given(st.floats(0.01, 3600), st.integers(2, 12))
def test_deliveries_last_until_the_decode_worker_gives_up(
    timeout_s: float, max_deliver: int
) -> None:
    waits = []
    for delivery in range(1, max_deliver + 1):
        wait = patience(timeout_s, delivery, max_deliver)
        if wait is None:
            break
        assert delivery < max_deliver, "the last delivery is never handed back: a dead letter"
        waits.append(wait)
    assert wait is None
    assert sum(waits) >= timeout_s, "nobody waits for it any more"
    if waits and timeout_s > 60 and max_deliver == 5:
        assert waits[0] <= timeout_s / 60, "another worker may reach it: not long at first"


def test_without_deliveries_left_it_is_settled() -> None:
    assert patience(10.0, 5, 5) is None


def test_an_opening_ends_by_the_revoke_of_its_own_attempt_only() -> None:
    opening = Opening("decode-1", revoked={1})
    opening.check(2)
    with pytest.raises(Revoked):
        opening.check(1)
    opening.lost = True
    with pytest.raises(PeerUnavailable, match="decode-1"):
        opening.check(2)


async def test_calls_from_other_threads_share_a_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, wakes, done = asyncio.get_running_loop(), list[int](), list[int]()
    real = loop.call_soon_threadsafe

    def wake(*args: Any, **more: Any) -> Any:
        wakes.append(1)
        return real(*args, **more)

    monkeypatch.setattr(loop, "call_soon_threadsafe", wake)
    calls = Calls()
    for number in range(5):
        calls.soon(lambda number=number: done.append(number))  # type: ignore[misc]
    assert (done, len(wakes)) == ([], 1)
    await asyncio.sleep(0.01)
    assert done == [0, 1, 2, 3, 4]
    calls.soon(lambda: calls.soon(lambda: done.append(6)))
    await asyncio.sleep(0.01)
    assert done[-1] == 6, "what comes while they run is not forgotten"
