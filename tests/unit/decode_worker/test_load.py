"""The load that a decode worker tells frontends and the live page."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pullfill import wire
from pullfill.decode_worker.demand import DemandMeter
from pullfill.decode_worker.frontends import Frontends
from pullfill.decode_worker.meter import DecodeMeter
from pullfill.decode_worker.peers import Peers
from pullfill.decode_worker.side import DecodeSide, jobs_of
from pullfill.engine import front_wire
from pullfill.engine.front_wire import LOAD_S, LoadReport
from pullfill.worker.step_cost import StepCost
from tests.support import said
from tests.support.handoff_model import HandoffModel
from tests.support.said import blank

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


def test_a_report_tells_what_streams_and_prompts_take(rig: Rig) -> None:
    cost = StepCost(0.006, 0.0003, 1e-7, 7e-5, 0.0)
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8))
    meter: Any = SimpleNamespace(
        model=SimpleNamespace(cost=cost, requests=5, streams=4, kv_tokens=900),
        prompts=SimpleNamespace(share=lambda: 0.2567),
        _view=SimpleNamespace(load=rig.load, config=config),
    )
    assert DecodeMeter.report(meter, draining=True) == msgspec.structs.replace(
        IDLE, draining=True, seats=8, requests=5, streams=4, stream_tokens=900,
        prompt_share=0.26,
        step_s=(0.006, 0.0003, 1e-7),
    )  # fmt: skip


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


def test_open_jobs_have_their_state_and_their_times() -> None:
    model = HandoffModel()
    first, second = model.open(4), model.open(2)
    assert first is not None
    assert second is not None
    model.clock.advance(1.5)
    model.claim(first, "a")
    ledger = model.ledger
    said.progress(ledger, first.job.job_id, 1, ledger.incarnation, "a", blocks=1)
    model.clock.advance(0.25)
    granted, queued = jobs_of(ledger)
    assert (granted.job_id, granted.state, granted.attempt) == (first.job.job_id, "granted", 1)
    assert granted.open_s == pytest.approx(1.75)
    assert granted.stage_s == pytest.approx(0.25)
    assert granted.queue_s == pytest.approx(1.5)
    assert granted.written == 0.25
    assert (queued.state, queued.stage_s, queued.queue_s) == ("queued", queued.open_s, None)
    assert [job.job_id for job in jobs_of(ledger, limit=1)] == [first.job.job_id]
    model.drain()
    assert jobs_of(ledger) == []


def test_what_waits_leaves_out_the_jobs_that_others_have_claimed(rig: Rig) -> None:
    """They count them. Two jobs, and a prompt of 500 tokens that stays here."""
    model = HandoffModel()
    assert model.open(2) is not None
    unclaimed = model.ledger.sums().uncomputed
    claimed = model.open(4)
    assert claimed is not None
    jobs = model.ledger.sums().uncomputed
    assert jobs > unclaimed > 0
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8))
    blocks = {"free_blocks": 100, "usable_blocks": 100}
    side: Any = SimpleNamespace(
        engine=SimpleNamespace(
            view=SimpleNamespace(config=config, counts=lambda: (0, 3), **blocks)
        ),
        context=SimpleNamespace(ledger=model.ledger),
        control=SimpleNamespace(peers=Peers()),
        meter=SimpleNamespace(demand=DemandMeter(), own_rate=100.0),
        frontends=rig.frontends,
    )
    rig.look(uncached_tokens_queued=500)  # which has no tokens of jobs

    def queued_s() -> float:
        return DecodeSide._demand(side).queued_s

    assert queued_s() == pytest.approx((500 + jobs) / 100)
    model.claim(claimed, "a")
    assert queued_s() == pytest.approx((500 + unclaimed) / 100)
    model.drain()
