"""Jobs with a LoRA adapter that this machine lacks."""

from __future__ import annotations

import msgspec
import pytest

from pullfill.ids import job_digest
from pullfill.prefill_worker.engine import NoAdapter
from pullfill.wire import (
    Adapter,
    encode,
)
from tests.unit.prefill_worker.test_job import JOB, Delivered, Worker, back, some_transfer_worker


@pytest.mark.parametrize(("number", "verb", "retry"), [(1, "nak", True), (2, "ack", False)])
async def test_a_job_whose_adapter_is_not_here_is_left_to_others_once(
    number: int, verb: str, retry: bool
) -> None:
    async def absent(adapter: Adapter) -> None:
        raise NoAdapter(f"LoRA adapter {adapter.name} is not at {adapter.path} here")

    worker, delivery = Worker(some_transfer_worker), Delivered(number=number)
    adapter = Adapter(name="red", path="/red", content="c")
    delivery.body = encode(msgspec.structs.replace(JOB, adapter=adapter))
    worker.grant = msgspec.structs.replace(worker.grant, job_digest=job_digest(delivery.body))
    worker.runner.engine.check_adapter = absent  # type: ignore[method-assign]
    worker.runner.start(delivery)  # type: ignore[arg-type]
    await worker.over()
    assert delivery.verbs == [verb]
    said = back(worker)
    assert said.retry is retry
    assert "red is not at" in said.cause
    assert worker.tasks == [], "nothing was computed"
