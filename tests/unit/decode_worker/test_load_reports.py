"""When frontends are told a decode worker's load."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pullfill import wire
from pullfill.decode_worker.load_reports import LoadReports
from pullfill.engine import front_wire
from pullfill.engine.front_wire import LOAD_S, LoadReport

IDLE = LoadReport(
    running=0, waiting=0, uncached_tokens_queued=0, active_blocks=0, free_blocks=100
)  # fmt: skip


class _Load:
    """now: what is read. reads: how often."""

    def __init__(self) -> None:
        self.now = IDLE
        self.reads = 0

    def set(self, **changes: int) -> None:
        self.now = msgspec.structs.replace(self.now, **changes)

    def mark(self) -> tuple[int, ...]:
        return (self.now.running, self.now.waiting, self.now.free_blocks)

    def read(self, draining: bool) -> LoadReport:
        self.reads += 1
        return msgspec.structs.replace(self.now, draining=draining)


class _Server:
    def __init__(self) -> None:
        self.draining = False
        self.sent: list[LoadReport] = []

    def tell(self, kind: bytes, payload: bytes) -> None:
        assert kind == front_wire.LOAD
        self.sent.append(wire.decode(payload, LoadReport))


class Rig:
    def __init__(self) -> None:
        self.load: Any = _Load()
        self.server: Any = _Server()
        self.wakes: list[float] = []
        self.reports = LoadReports(self.load, self.server, self.wakes.append)
        self.now = 1000.0
        self.look()
        self.server.sent.clear()

    def look(self, after: float = LOAD_S) -> None:
        self.now += after
        self.reports.look(self.now)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_the_first_look_tells_the_load() -> None:
    rig = Rig()
    assert rig.reports.current() == IDLE


def test_nothing_is_sent_or_read_while_nothing_changes(rig: Rig) -> None:
    reads = rig.load.reads
    for _ in range(100):
        rig.look()
    assert (rig.server.sent, rig.wakes, rig.load.reads) == ([], [], reads)


def test_a_change_is_sent_at_once_after_a_pause(rig: Rig) -> None:
    rig.load.set(running=1)
    rig.look()
    assert [r.running for r in rig.server.sent] == [1]


def test_at_most_one_in_each_interval_and_the_last_state_is_sent(rig: Rig) -> None:
    for number in range(1, 200):
        rig.load.set(running=number, free_blocks=100 - number % 7)
        rig.look(LOAD_S / 20)
    assert 9 <= len(rig.server.sent) <= 11
    rig.load.set(running=0, free_blocks=100)
    rig.look(LOAD_S / 100)
    assert rig.server.sent[-1].running != 0
    assert rig.wakes, "the engine's loop would sleep before it tells that it is idle"
    rig.look(rig.wakes[-1])
    assert rig.server.sent[-1] == IDLE


def test_the_loop_is_woken_once_for_all_changes_of_an_interval(rig: Rig) -> None:
    rig.load.set(running=1)
    rig.look()
    for number in range(2, 9):
        rig.load.set(running=number)
        rig.look(LOAD_S / 10)
    assert rig.wakes == [pytest.approx(0.9 * LOAD_S)]


def test_tokens_that_are_computed_are_told_while_requests_run(rig: Rig) -> None:
    rig.load.set(running=1, uncached_tokens_queued=5000)
    rig.look()
    rig.load.set(uncached_tokens_queued=3000)
    rig.look()
    rig.look()
    assert [r.uncached_tokens_queued for r in rig.server.sent] == [5000, 3000]


def test_a_drain_is_told(rig: Rig) -> None:
    rig.server.draining = True
    rig.look()
    assert rig.server.sent[-1].draining
