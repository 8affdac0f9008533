"""Who is there and pulls, and what becomes of jobs when nobody does: over loopback TCP."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from pullfill.decode_worker.ledger import Entry, JobState, Settle
from pullfill.errors import Outcome
from pullfill.wire import Claim, Draining, GiveUp, Grant, Heartbeat
from tests.support.control_rig import Decode, Raw
from tests.support.waiting import soon


async def is_served_here(decode: Decode) -> None:
    await soon(lambda: decode.ledger.open_jobs == 0)
    assert decode.settled() == [Settle("r-j", Outcome.PREFILL_LOST)]


@pytest.mark.parametrize("decode", [{"silent_s": 0.5}], indirect=True)
async def test_a_silent_worker_is_gone_and_one_that_pings_stays(
    decode: Decode, connect: Any, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process keeps its connection; only its silence tells."""
    monkeypatch.setattr("pullfill.net.peer_link.ALIVE_INTERVAL_S", 0.05)
    prefill = await connect()
    await raw.hello()
    await soon(lambda: len(decode.server.peers.pulling) == 2)
    decode.open()
    raw.say(Claim(rid=1, job_id="j", incarnation="i0"))
    assert isinstance(await raw.hear(), Grant)
    await soon(lambda: decode.server.peers.instances == ["prefill-1"])
    assert (await prefill.claim()).attempt == 2
    assert prefill.lost == 0


async def test_a_worker_that_pulls_nothing_for_now_is_not_counted(
    decode: Decode, connect: Any
) -> None:
    """Its engine is stuck: what nobody has claimed is served here; it may come back."""
    prefill = await connect()
    decode.open()
    prefill.links.pause("its engine takes no steps")
    await soon(lambda: len(decode.server.peers.pulling) == 0)
    await is_served_here(decode)
    said = "prefill-1 pulls no jobs: its engine takes no steps"
    assert decode.server.peers.not_pulling == [said]
    prefill.links.pause("")
    await soon(lambda: len(decode.server.peers.pulling) == 1)
    assert prefill.lost == 0


@pytest.fixture
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the breaker. A test lists this before `decode`."""
    monkeypatch.setattr("pullfill.decode_worker.ledger.BREAKER_PAUSES_S", (3600.0, 3600.0))


@pytest.mark.parametrize("how", ["computes", "completes"])
async def test_claims_that_time_out_beside_a_busy_prefill_worker(
    long_pauses: None, decode: Decode, connect: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prefill workers are busy for others. So this decode worker queues nothing more for now,
    and one more job as soon as one of them says that it is not busy any more."""
    monkeypatch.setattr("pullfill.net.peer_link.ALIVE_INTERVAL_S", 0.03)
    completed = count()
    prefills = [await connect(), await connect("prefill-2")]
    for prefill in prefills:
        prefill.links.activity = lambda: (next(completed), int(how == "computes"))
    await soon(lambda: all(peer.busy for peer in decode.server.peers.values()))
    for number in range(3):
        decode.open(f"j{number}", timeout_s=0.15)
        await soon(lambda: decode.ledger.open_jobs == 0)
    assert decode.ledger.claims.stalled
    prefills[0].links.activity = lambda: (0, 0)
    await soon(lambda: not decode.ledger.claims.stalled)


@pytest.mark.parametrize("writing", [False, True])
async def test_a_job_the_last_worker_hands_back_while_it_leaves_is_served_here(
    decode: Decode, connect: Any, writing: bool
) -> None:
    prefill = await connect()
    decode.open()
    fence = (await prefill.claim()).fence
    let_go = decode.fences.hold(fence) if writing else lambda: None
    prefill.links.leave()
    await soon(lambda: len(decode.server.peers.pulling) == 0)
    assert decode.settled() == [], "what was granted may end"
    prefill.link.send(GiveUp(job_id="j", attempt=1, incarnation="i0", cause="x", retry=True))
    await soon(lambda: decode.ledger.has_events)
    *held, settled = decode.settled()
    assert (settled.loaded, settled.outcome) == (False, Outcome.PREFILL_LOST)
    assert len(held) == decode.ledger.open_jobs == writing
    let_go()
    await soon(lambda: decode.ledger.open_jobs == 0)


async def test_jobs_do_not_wait_for_a_worker_that_pulls_none(decode: Decode, raw: Raw) -> None:
    """Its self-check has not passed. The job of a self-check waits for nobody that pulls."""
    unchecked, checked = raw, await decode.raw()
    await unchecked.hello()
    await checked.hello()
    unchecked.say(Heartbeat(pulls=False, why="self_check_pending"))
    await soon(lambda: len(decode.server.peers.pulling) == 1)
    decode.open()
    job = Entry("t", "r-t", (7, 8), first_target=0, timeout_s=30.0, to="p")
    decode.ledger.open(job)
    checked.say(Draining())
    await soon(lambda: decode.ledger.find("j") is None)
    assert decode.settled() == [Settle("r-j", Outcome.PREFILL_LOST)]
    trial = decode.ledger.find("t")
    assert trial is not None
    assert trial.state is JobState.QUEUED
