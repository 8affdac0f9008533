"""What a decode worker that drains waits for, what it hands back, and the load it tells."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pullfill import wire
from pullfill.decode_worker.frontends import Frontends
from pullfill.engine import front_wire
from pullfill.engine.front_wire import LOAD_S, LoadReport
from tests.support.handoff_model import HandoffModel
from tests.support.said import blank


def frontends(server: Any, ledger: Any, waiting: Any = None, leased: int = 0) -> Frontends:
    loop: Any = SimpleNamespace(waiting_for_blocks=waiting)
    leases: Any = SimpleNamespace(unproved_blocks=leased)
    unused: Any = None
    return Frontends(loop, server, unused, unused, unused, ledger, leases)


async def test_a_drain_waits_for_requests_and_not_for_quarantine() -> None:
    """The blocks of a request that is over are held for a stopped writer, maybe for ever."""
    model = HandoffModel()
    job = model.open(2)
    assert model.claim(job, "a").fence
    assert model.begin_batch(model.grants[-1])
    request_server: Any = SimpleNamespace(active_requests=1)
    drained = asyncio.create_task(frontends(request_server, model.ledger).idle(asyncio.Event()))
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
    ledger = SimpleNamespace(quarantined_blocks=quarantined)
    frontends(
        SimpleNamespace(migrate=migrated.update),
        ledger,
        lambda longer: {"a", "b"} if waited_s >= longer else set(),
        leased,
    ).make_way()
    assert migrated == returned


def test_a_worker_that_ends_hands_them_back_after_it_takes_no_more() -> None:
    said: list[Any] = []
    server = SimpleNamespace(
        start_drain=lambda: said.append("drain"),
        receive=lambda: said.append("receive"),
        migrate=lambda ids: said.append(ids),
        coming=lambda: {"not yet in the engine"},
    )
    frontends(server, None).on_failed_step({"a"})
    assert said == ["drain", "receive", {"a", "not yet in the engine"}]


IDLE = blank(LoadReport, free_blocks=100)


class Rig:
    """The engine's load, and the server that sends it. loaded: the load now."""

    def __init__(self) -> None:
        self.loaded = IDLE
        self.draining = False
        self.sent: list[LoadReport] = []
        self.wakes: list[float] = []
        me: Any = self
        unused: Any = None
        self.frontends = Frontends(unused, me, self.load, self.wakes.append, unused, unused, unused)
        self.now = 1000.0
        self.look()
        self.sent.clear()

    def load(self, draining: bool) -> LoadReport:
        return msgspec.structs.replace(self.loaded, draining=draining)

    def tell(self, kind: bytes, payload: bytes) -> None:
        assert kind == front_wire.LOAD
        self.sent.append(wire.decode(payload, LoadReport))

    def look(self, after: float = LOAD_S, **changes: int) -> None:
        self.loaded = msgspec.structs.replace(self.loaded, **changes)
        self.now += after
        self.frontends.tell_load(self.now)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_change_is_sent_at_once_after_a_pause(rig: Rig) -> None:
    for _ in range(100):
        rig.look()
    assert (rig.sent, rig.wakes) == ([], []), "an idle engine sleeps"
    rig.look(running=1)
    assert [r.running for r in rig.sent] == [1]
    rig.draining = True
    rig.look()
    assert rig.sent[-1].draining


def test_at_most_one_in_each_interval_and_the_last_state_is_sent(rig: Rig) -> None:
    for number in range(1, 200):
        rig.look(LOAD_S / 20, running=number, free_blocks=100 - number % 7)
    assert 9 <= len(rig.sent) <= 11
    rig.look(LOAD_S / 100, running=0, free_blocks=100)
    assert rig.sent[-1].running != 0
    assert rig.wakes, "the engine's loop would sleep before it tells that it is idle"
    rig.look(rig.wakes[-1])
    assert rig.sent[-1] == IDLE
