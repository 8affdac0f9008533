"""What a decode worker that drains waits for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from pullfill.decode_worker import leave
from tests.support.handoff_model import HandoffModel


async def test_a_drain_waits_for_requests_and_not_for_quarantine() -> None:
    """The blocks of a request that is over are held for a stopped writer, maybe for ever."""
    model = HandoffModel()
    job = model.open(2)
    assert job is not None
    assert model.claim(job, "a").grant is not None
    assert model.begin_batch(model.grants[-1])
    engine: Any = SimpleNamespace(dead=asyncio.Event())
    request_server: Any = SimpleNamespace(active_requests=1)
    drained = asyncio.create_task(leave.idle(engine, request_server, model.ledger))
    await asyncio.sleep(0.2)
    assert not drained.done(), "a request is answered"
    request_server.active_requests = 0
    await asyncio.sleep(0.2)
    assert not drained.done(), "a request waits for its job"
    model.abort(job)
    assert model.ledger.quarantined_blocks > 0
    await asyncio.wait_for(drained, 10)
    model.drain()
