"""What a decode worker that drains waits for, and which requests migrate for lack of room."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

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


@pytest.mark.parametrize(
    ("waited_s", "quarantined", "leased", "returned"),
    [
        (5.0, 7, 0, {"a", "b"}),
        (5.0, 0, 3, {"a", "b"}),
        (4.0, 7, 0, set()),  # a writer that runs is quiet within milliseconds
        (5.0, 0, 0, set()),  # vLLM's own business: what runs will end
    ],
)
def test_requests_without_room_migrate_because_of_held_blocks_alone(
    waited_s: float, quarantined: int, leased: int, returned: set[str]
) -> None:
    migrated = set[str]()
    server: Any = SimpleNamespace(
        host=SimpleNamespace(
            waiting_for_blocks=lambda longer: {"a", "b"} if waited_s >= longer else set()
        ),
        migrate=migrated.update,
    )
    ledger: Any = SimpleNamespace(quarantined_blocks=quarantined)
    leave.make_way(server, ledger, leased)
    assert migrated == returned
