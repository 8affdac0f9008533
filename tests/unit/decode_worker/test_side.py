"""The decode side as worker/process.py sees it."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.decode_worker.demand import DemandMeter
from pullfill.decode_worker.ledger import JobState
from pullfill.decode_worker.outlook import Outlook
from pullfill.decode_worker.peers import Peers
from pullfill.decode_worker.side import DecodeRole, DecodeSide, jobs_of
from pullfill.errors import ClaimRefused, Outcome
from pullfill.options import WorkerOptions
from pullfill.wire import (
    GiveUp,
    Load,
    PrefillJob,
    Progress,
    RefuseReason,
    RouterConfig,
    RouterPolicy,
    encode,
)
from tests.support.handoff_model import HandoffModel


async def test_a_stuck_engine_that_goes_on_does_not_end_a_drain() -> None:
    ledger = SimpleNamespace(give_up_all=lambda *_, **__: None)
    part: Any = SimpleNamespace(start_drain=bool, submit=bool, ledger=ledger)
    part.loop = part.server = part
    part.draining = threading.Event()
    unused: Any = None
    side = DecodeSide(
        part, part, part, part, part, part, part, None, unused, WorkerOptions(model="m"), unused,
        "ns",
    )  # fmt: skip
    said = []
    for stuck in (True, False):
        side.engine_stuck(stuck)
        said.append(part.draining.is_set())
    await side.stop_taking()
    for stuck in (True, False):
        side.engine_stuck(stuck)
        said.append(part.draining.is_set())
    assert said == [True, False, True, True]


def test_open_jobs_have_their_state_and_their_times() -> None:
    model = HandoffModel()
    first, _ = model.open(4), model.open(2)
    model.clock.advance(1.5)
    model.claim(first, "a")
    ledger = model.ledger
    ledger.progress(Progress(blocks=1, **model.grants[-1].about), "a")
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


def test_what_waits_leaves_out_the_jobs_that_others_have_claimed() -> None:
    """They count them. Two jobs, and a prompt of 500 tokens that stays here."""
    model = HandoffModel()
    model.open(2)
    unclaimed = model.ledger.sums().uncomputed
    claimed = model.open(4)
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
        frontends=SimpleNamespace(uncached_tokens=500),
    )

    def queued_s() -> float:
        return DecodeSide._demand(side).queued_s

    assert queued_s() == pytest.approx((500 + jobs) / 100)
    model.claim(claimed, "a")
    assert queued_s() == pytest.approx((500 + unclaimed) / 100)
    model.drain()


def body(job_id: str, decode_instance: str = "me") -> bytes:
    return encode(
        PrefillJob(
            job_id=job_id, incarnation="i0", decode_instance=decode_instance, request_id="r",
            compat="c", token_ids=b"", hit_tokens=0, block_ids=b"", timeout_s=60.0,
        )
    )  # fmt: skip


def test_a_job_of_or_with_another_worker_is_not_taken_back() -> None:
    """It is granted, and then it waits for the proof that its writer is quiet."""
    model = HandoffModel()
    role: Any = SimpleNamespace(
        _options=SimpleNamespace(instance_id="me"),
        _side=SimpleNamespace(context=SimpleNamespace(ledger=model.ledger)),
    )
    take_back = partial(DecodeRole.take_back, role)
    assert not take_back(body("j", "other"))
    assert not take_back(b"junk")
    job = model.open(2)
    model.publish(job)
    name = job.job.job_id
    grant = model.claim(job, "a")
    with pytest.raises(ClaimRefused) as granted:
        take_back(body(name))
    assert granted.value.reason == RefuseReason.IN_PROGRESS
    let_go = model.fences.hold(grant.fence)
    told = GiveUp(job_id=name, attempt=grant.attempt, incarnation="i0", cause="failed", retry=True)
    model.ledger.gave_up(told, "a")
    assert job.job.state is JobState.QUARANTINED
    with pytest.raises(ClaimRefused) as waits:
        take_back(body(name))
    assert waits.value.reason == RefuseReason.HELD
    let_go()
    model.ledger.tick()
    assert job.job.state is JobState.QUEUED
    assert take_back(body(name))
    model.ledger.take_events()
    assert [outcome for _, outcome in model.ledger.outcomes] == [Outcome.OWN_JOB]
    assert take_back(body(name)), "nobody waits for it"


def test_streams_leave_time_for_jobs_of_others_and_for_own_ones_that_are_late() -> None:
    """It has put its own jobs into the queue because others compute them at less cost."""
    model, depth = HandoffModel(), SimpleNamespace(depth_jobs=0)
    peers = SimpleNamespace(pulling=[SimpleNamespace(load=Load(harm=0.1))])
    outlook: Any = SimpleNamespace(
        context=SimpleNamespace(ledger=model.ledger),
        producer=SimpleNamespace(depth=lambda: depth),
        peers=peers,
    )
    wanted = partial(Outlook.wanted, outlook, 1.0)
    assert wanted()
    job = model.open(2)
    model.publish(job)
    depth.depth_jobs = 1
    assert not wanted()
    depth.depth_jobs = 2
    assert wanted()
    depth.depth_jobs = 1
    model.clock.advance(1.1)
    assert wanted()
    peers.pulling.append(SimpleNamespace(load=Load()))
    assert not wanted(), "a worker without streams pulls"


@pytest.mark.parametrize(
    ("step_s", "streams", "policy", "undone", "wanted", "told"),
    [
        (1.0, 1, "cost", False, True, (True, 1)),
        (1.0, 1, "cost", False, False, (True, 0)),
        (1.0, 1, "cost", True, True, (True, 0)),  # a prompt of its own waits
        (1.0, 1, "conditional", False, True, (False, 1)),  # no step spares the streams
        (1.0, 0, "conditional", True, True, (False, 0)),
        (1.0, 0, "conditional", False, False, (True, None)),  # its prompts are away
        (1.0, 0, "cost", False, False, (True, None)),
        (0.01, 9, "conditional", True, False, (True, None)),
        (None, 9, "conditional", True, False, (True, None)),
    ],
)
def test_when_streams_leave_time_for_jobs(
    step_s: float | None, streams: int, policy: str, undone: bool, wanted: bool, told: Any
) -> None:
    """Whether jobs are pulled, and how many at a time."""
    router = SimpleNamespace(current=RouterConfig(policy=RouterPolicy(policy), itl_ms=50))
    meter = SimpleNamespace(model=SimpleNamespace(undone=undone, streams=streams))
    outlook = SimpleNamespace(wanted=lambda late_s: wanted and late_s == 1.0)
    side = SimpleNamespace(meter=meter, outlook=outlook)
    role: Any = SimpleNamespace(_side=side, _router=router)
    role._delays = partial(DecodeRole._delays, role)
    assert (not DecodeRole.busy(role, step_s), DecodeRole.most(role, step_s)) == told
