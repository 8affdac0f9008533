"""What a prefill worker's engine is told of a job."""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pullfill.prefill_worker.engine import PrefillEngine
from tests.support.fakes import prefill_task


@pytest.mark.parametrize(
    ("due_s", "left_s", "target_ms", "waited_s"),
    [
        (0.9, 0.4, 900, 0.5),
        (0.9, -2.0, 900, 2.9),
        (0.9, None, 900, 0.0),  # an older decode worker does not tell it
        (-1.0, -1.5, 1, 0.5),
        (0.0, None, None, 0.0),
    ],
)
def test_its_target_counts_from_when_the_request_was_decided(
    due_s: float, left_s: float | None, target_ms: float | None, waited_s: float
) -> None:
    """Clocks of machines differ. So the grant tells how many seconds are left until its target."""
    asked: list[Any] = []

    def add(request: Any) -> Future[Any]:
        asked.append(request)
        return Future()

    requests: Any = SimpleNamespace(add=add)
    parts: Any = SimpleNamespace(adapters=None, groups=SimpleNamespace(layers=()))
    engine = PrefillEngine(requests, {}, parts, block_size=4, compat_hash="", limit=lambda _: 0)
    task = prefill_task(None)
    task.job = msgspec.structs.replace(task.job, due_s=due_s)
    task.grant = msgspec.structs.replace(task.grant, due_s=left_s)
    began = time.time()
    engine.submit(task)
    (request,) = asked
    assert began - request.arrival_time == pytest.approx(waited_s, abs=0.2)
    assert (request.sampling_params.extra_args or {}).get("ttft_ms") == target_ms
