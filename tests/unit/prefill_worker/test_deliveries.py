"""Which delivery gets heartbeats and is settled, if a job is delivered more than once."""

from __future__ import annotations

from typing import Any

from pullfill.prefill_worker.deliveries import Deliveries


class Delivered:
    job_id = "j"

    def __init__(self) -> None:
        self.verbs: list[str] = []

    async def ack(self) -> None:
        self.verbs.append("ack")

    async def nak(self, delay_s: float) -> None:
        self.verbs.append("nak")


async def test_the_newest_delivery_is_settled_and_kept_alive() -> None:
    deliveries = Deliveries(lambda: 60.0)
    first: Any = Delivered()
    second: Any = Delivered()
    assert deliveries.take(first)
    assert not deliveries.take(second), "it runs here already"
    assert list(deliveries.running()) == [second]
    await deliveries.settle(first, "ack")
    assert (first.verbs, second.verbs) == ([], ["ack"])
    assert list(deliveries.running()) == []
    assert deliveries.end(first) is None


async def test_a_delivery_that_its_run_did_not_settle_runs_again() -> None:
    """A newer delivery that came while its run ended without settling it, or after a nak."""
    deliveries = Deliveries(lambda: 60.0)
    first: Any = Delivered()
    second: Any = Delivered()
    third: Any = Delivered()
    deliveries.take(first)
    assert deliveries.end(first) is None, "left to somebody else"
    deliveries.take(first)
    deliveries.take(second)
    assert deliveries.end(first) is second
    deliveries.take(second)
    await deliveries.settle(second, "nak")
    deliveries.take(third)
    assert list(deliveries.running()) == [third]
    assert deliveries.end(second) is third
    assert third.verbs == []
