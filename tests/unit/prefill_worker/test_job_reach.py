"""How a job is settled whose decode worker, or the KV memory of it, cannot be reached."""

from __future__ import annotations

from typing import Any

import pytest

from pullfill.net.peer_link import ConnectionLost
from tests.unit.prefill_worker.test_job import (
    Delivered,
    Worker,
    back,
    out_of_reach,
    some_transfer_worker,
)


async def test_memory_out_of_reach_is_left_to_another_worker_for_a_while() -> None:
    worker, delivery, told = Worker(out_of_reach()), Delivered(), list[str]()
    worker.runner.on_unreachable = lambda _again_s: told.append("leave jobs to others")
    worker.runner.start(delivery)  # type: ignore[arg-type]
    await worker.over()
    assert delivery.verbs == ["nak"]
    assert delivery.delay_s > 0.1, "or it would be back here at once, until it is a dead letter"
    assert told, "another worker may be idle"
    assert back(worker).retry


async def test_memory_still_out_of_reach_is_computed_by_the_decode_worker() -> None:
    worker, delivery = Worker(out_of_reach()), Delivered(number=2)
    worker.runner.start(delivery)  # type: ignore[arg-type]
    await worker.over()
    assert delivery.verbs == ["ack"]
    assert not back(worker).retry


@pytest.mark.parametrize(("number", "verb"), [(1, "nak"), (2, "ack")])
async def test_the_job_of_a_decode_worker_unknown_here_is_first_left_to_others(
    number: int, verb: str
) -> None:
    worker, delivery = Worker(some_transfer_worker), Delivered(number=number)
    worker.known = False
    worker.runner.start(delivery)  # type: ignore[arg-type]
    await worker.over()
    assert delivery.verbs == [verb]
    assert verb == "ack" or delivery.delay_s > 0.1


async def test_a_job_whose_connection_broke_under_its_claim_is_kept_for_others() -> None:
    """The decode worker may have left the directory because it drains. Others are connected."""
    worker, delivery = Worker(some_transfer_worker), Delivered(number=2)

    async def breaks(*_: Any) -> Any:
        worker.known = False
        worker.runner.connection_lost(worker.link)
        raise ConnectionLost("it broke")

    worker.link.claim = breaks
    worker.runner.start(delivery)  # type: ignore[arg-type]
    await worker.over()
    assert delivery.verbs == ["nak"]
