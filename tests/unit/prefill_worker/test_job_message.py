"""Which delivery gets heartbeats and is settled, if a job is delivered more than once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pullfill.prefill_worker.job_message import JobMessage, patience


class Delivered:
    job_id = "j"

    def __init__(self) -> None:
        self.verbs: list[str] = []

    async def ack(self) -> None:
        self.verbs.append("ack")

    async def nak(self, delay_s: float) -> None:
        self.verbs.append("nak")

    async def in_progress(self) -> None:
        self.verbs.append("in_progress")


async def test_the_newest_delivery_is_settled_and_kept_alive() -> None:
    first: Any = Delivered()
    second: Any = Delivered()
    message = JobMessage(first)
    assert message.to_settle is first
    message.latest = second
    assert message.to_settle is second
    await message.heartbeat()
    await message.settle("ack")
    assert (first.verbs, second.verbs) == ([], ["in_progress", "ack"])
    assert message.to_settle is None
    assert message.left_over is None


async def test_a_delivery_that_its_run_did_not_settle_runs_again() -> None:
    """A newer delivery that came while its run ended without settling it, or after a nak."""
    first: Any = Delivered()
    second: Any = Delivered()
    third: Any = Delivered()
    message = JobMessage(first)
    assert message.left_over is None, "left to somebody else"
    message.latest = second
    assert message.left_over is second
    message = JobMessage(second)
    await message.settle("nak")
    message.latest = third
    assert message.to_settle is third
    assert message.left_over is third
    assert third.verbs == []


# ------------------------------------------------------------------ a decode worker out of reach


@given(st.floats(0.01, 3600), st.integers(2, 12))
def test_deliveries_last_until_the_decode_worker_gives_up(
    timeout_s: float, max_deliver: int
) -> None:
    waits = []
    for delivery in range(1, max_deliver + 1):
        wait = patience(timeout_s, delivery, max_deliver)
        if wait is None:
            break
        assert delivery < max_deliver, "the last delivery gets no nak: it would be a dead letter"
        waits.append(wait)
    assert wait is None
    assert sum(waits) >= timeout_s, "nobody waits for it any more"
    if waits and timeout_s > 60 and max_deliver == 5:
        assert waits[0] <= 0.05, "another worker may reach it, and be idle"
        assert waits[1] <= timeout_s / 15


def test_without_deliveries_left_it_is_settled() -> None:
    assert patience(10.0, 5, 5) is None
