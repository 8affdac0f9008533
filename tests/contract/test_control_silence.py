"""Who is there and pulls, and what becomes of jobs when nobody does: over loopback TCP."""

from __future__ import annotations

import asyncio
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.errors import ClaimRefused, Outcome, PeerUnavailable
from pullfill.net import frames, peer_link
from pullfill.wire import Claim, GiveUp, Grant
from tests.support import framing
from tests.support.control_rig import Decode, Prefill, Raw, hello, raw_decode, until


async def test_a_silent_worker_is_gone_and_its_job_served_here() -> None:
    """A stopped process keeps its connection; only its silence tells."""
    decode = Decode(silent_s=0.5)
    await decode.server.start("127.0.0.1")
    host, port = frames.split_address(decode.server.address)
    reader, writer = await asyncio.open_connection(host, port)
    stopped = Raw(reader, writer)
    try:
        await stopped.hello()
        await until(lambda: len(decode.server.peers.pulling) == 1)
        decode.open()
        framing.write(writer, Claim(rid=1, job_id="j", incarnation="i0"))
        assert isinstance(await stopped.hear(), Grant)
        await until(lambda: len(decode.server.peers.pulling) == 0)
        await until(lambda: decode.ledger.open_jobs == 0)
        (settled,) = decode.settled()
        assert (settled.loaded, settled.outcome) == (False, Outcome.PREFILL_LOST)
    finally:
        writer.close()
        await decode.server.stop()


async def test_a_worker_that_says_alive_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pullfill.net.peer_link.ALIVE_INTERVAL_S", 0.06)
    decode = Decode(silent_s=0.3)
    await decode.server.start("127.0.0.1")
    prefill = Prefill(decode)
    try:
        await prefill.link.wait_up(5.0)
        await asyncio.sleep(0.9)
        assert len(decode.server.peers.pulling) == 1
        assert prefill.lost == 0
    finally:
        await prefill.link.close()
        await decode.server.stop()


async def test_a_link_that_is_used_all_the_time_need_not_say_that_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Questions and answers say it; when they end, it is said again."""
    monkeypatch.setattr("pullfill.net.peer_link.ALIVE_INTERVAL_S", 0.1)
    async with raw_decode() as decode:
        prefill = Prefill(Decode(), address=decode.address)
        await prefill.link.wait_up(5.0)
        await asyncio.sleep(0.02)
        before = decode.beats[0]
        await ask_for_a_while(prefill)
        assert decode.beats[0] - before <= 3, "only where a question was late"
        told = decode.beats[0]
        await until(lambda: decode.beats[0] > told + 4)
        assert prefill.lost == 0
        await prefill.link.close()


async def test_who_asks_all_the_time_is_not_taken_for_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pullfill.net.peer_link.ALIVE_INTERVAL_S", 0.06)
    decode = Decode(silent_s=0.3)
    await decode.server.start("127.0.0.1")
    prefill = Prefill(decode)
    try:
        await prefill.link.wait_up(5.0)
        await ask_for_a_while(prefill)
        assert (len(decode.server.peers.pulling), prefill.lost) == (1, 0)
    finally:
        await prefill.link.close()
        await decode.server.stop()


async def ask_for_a_while(prefill: Prefill) -> None:
    for _ in range(60):
        with pytest.raises(ClaimRefused):
            await prefill.link.claim("nobody's", "i0", "")
        await asyncio.sleep(0.02)


async def test_a_worker_that_asks_for_nothing_may_miss_as_many_beats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both fall silent at once; the one that says it lives every other time only is let go of
    later, and is let go of."""
    monkeypatch.setattr("pullfill.net.peer_link.ALIVE_INTERVAL_S", 0.4)
    decode = Decode(silent_s=0.3)
    await decode.server.start("127.0.0.1")
    raws = [
        Raw(*await asyncio.open_connection(*frames.split_address(decode.server.address)))
        for _ in range(2)
    ]
    try:
        for raw, name in zip(raws, ("asks", "asks nothing"), strict=True):
            raw.say(hello(name))
        await until(lambda: len(decode.server.peers.pulling) == 2)
        for peer in decode.server.peers.values():
            peer.asked_at = -1e9
        raws[0].say(Claim(rid=1, job_id="j", incarnation="i0"))
        await until(lambda: len(decode.server.peers.pulling) == 1)
        assert decode.server.peers.instances == ["asks nothing"]
        await until(lambda: len(decode.server.peers.pulling) == 0)
    finally:
        for raw in raws:
            raw.writer.close()
        await decode.server.stop()


@pytest.mark.parametrize(
    ("unasked_s", "pause", "patience"), [(2.9, 1, 5), (3.0, 2, 6), (9.9, 2, 6), (10.0, 4, 8)]
)
def test_a_stall_of_four_seconds_is_forgiven(
    unasked_s: float, pause: float, patience: float
) -> None:
    assert peer_link.ping_pause(unasked_s) == pause
    assert peer_link.ping_patience(unasked_s) == patience


async def test_a_fresh_link_is_used() -> None:
    """It says every second that it lives, for a while; both ends count from the welcome, also of
    a connection that was made anew."""
    decode = Decode()
    await decode.server.start("127.0.0.1")
    prefill = Prefill(decode)
    try:
        for losses in range(2):
            await prefill.link.wait_up(5.0)
            await until(lambda: len(decode.server.peers.pulling) == 1)
            now = asyncio.get_running_loop().time()
            (peer,) = decode.server.peers.values()
            assert peer_link.ping_pause(now - prefill.link._asked_at) == peer_link.ping_pause(0.0)
            assert peer.patience(now, 5.0) == 5.0
            prefill.link._asked_at = -1e9
            peer.channel.abort()
            await until(lambda: prefill.lost == losses + 1)  # noqa: B023
    finally:
        await prefill.link.close()
        await decode.server.stop()


async def test_a_silent_decode_worker_is_let_go_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stopped decode worker keeps its connection too: what waits for it would wait for ever."""
    monkeypatch.setattr("pullfill.net.peer_link.ALIVE_INTERVAL_S", 0.05)
    closed: list[int] = []

    async def opened(_: object) -> Any:
        return SimpleNamespace(
            busy=False, close=lambda: closed.append(1), transport="fake", why_not_better=()
        )

    async with raw_decode(answers=False) as decode:
        prefill = Prefill(
            Decode(), address=decode.address, silent_s=0.25, open_transfer_worker=opened
        )
        await prefill.link.wait_up(5.0)
        await prefill.link.transfer.get()
        await until(lambda: prefill.lost == 1)
        assert closed == [1], "its credits are written off"
        with pytest.raises(PeerUnavailable):
            await prefill.link.wait_up(3600.0)  # nobody waits for one that is silent
        decode.answers = True
        await until(lambda: prefill.link.connected)
        for _ in range(10):  # the connection it had then may end once more
            lost = prefill.lost
            await asyncio.sleep(0.4)
            if prefill.lost == lost:
                break
        assert prefill.lost == lost, "it answers again"
        assert prefill.link.connected
        await prefill.link.close()


async def test_a_worker_that_pulls_nothing_for_now_is_not_counted() -> None:
    """Its engine is stuck: what nobody has claimed is served here; it may come back."""
    decode = Decode()
    await decode.server.start("127.0.0.1")
    prefill = Prefill(decode)
    try:
        await prefill.link.wait_up(5.0)
        decode.open()
        prefill.links.pause("its engine takes no steps")
        await until(lambda: len(decode.server.peers.pulling) == 0)
        await until(lambda: decode.ledger.open_jobs == 0)
        (settled,) = decode.settled()
        assert (settled.loaded, settled.outcome) == (False, Outcome.PREFILL_LOST)
        said = "prefill-1 pulls no jobs: its engine takes no steps"
        assert decode.server.peers.not_pulling == [said]
        prefill.links.pause("")
        await until(lambda: len(decode.server.peers.pulling) == 1)
        assert prefill.lost == 0
    finally:
        await prefill.link.close()
        await decode.server.stop()


@pytest.mark.parametrize("how", ["computes", "completes"])
async def test_claims_that_time_out_beside_a_busy_prefill_worker(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prefill workers are busy for others. So this decode worker queues nothing more for now,
    and one more job as soon as one of them says that it is not busy any more."""
    monkeypatch.setattr("pullfill.net.peer_link.ALIVE_INTERVAL_S", 0.03)
    decode = Decode(claim_pauses_s=(3600.0, 3600.0))
    await decode.server.start("127.0.0.1")
    prefills = [Prefill(decode), Prefill(decode, "prefill-2")]
    completed = count()
    try:
        for prefill in prefills:
            await prefill.link.wait_up(5.0)
            prefill.links.activity = lambda: (next(completed), int(how == "computes"))
        await until(lambda: all(peer.busy for peer in decode.server.peers.values()))
        for number in range(3):
            decode.open(f"j{number}", timeout_s=0.15)
            await until(lambda: decode.ledger.open_jobs == 0)
        assert decode.ledger.claims.stalled
        prefills[0].links.activity = lambda: (0, 0)
        await until(lambda: not decode.ledger.claims.stalled)
    finally:
        for prefill in prefills:
            await prefill.link.close()
        await decode.server.stop()


async def test_a_job_opened_while_the_last_worker_left_is_served_here() -> None:
    """The engine thread decided a moment before: no claim timeout is waited for."""
    decode = Decode()
    await decode.server.start("127.0.0.1")
    try:
        decode.open()
        await until(lambda: decode.ledger.open_jobs == 0)
        (settled,) = decode.settled()
        assert (settled.loaded, settled.outcome) == (False, Outcome.PREFILL_LOST)
    finally:
        await decode.server.stop()


@pytest.mark.parametrize("writing", [False, True])
async def test_a_job_the_last_worker_hands_back_while_it_leaves_is_served_here(
    writing: bool,
) -> None:
    decode = Decode()
    await decode.server.start("127.0.0.1")
    prefill = Prefill(decode)
    try:
        await prefill.link.wait_up(5.0)
        decode.open()
        slot = decode.fences.valid((await prefill.claim()).fence)
        slot.holders += writing
        prefill.links.leave()
        await until(lambda: len(decode.server.peers.pulling) == 0)
        assert decode.settled() == [], "what was granted may end"
        prefill.link.send(GiveUp(job_id="j", attempt=1, incarnation="i0", cause="x", retry=True))
        await until(lambda: decode.ledger.has_events)
        *held, settled = decode.settled()
        assert (settled.loaded, settled.outcome) == (False, Outcome.PREFILL_LOST)
        assert len(held) == decode.ledger.open_jobs == writing
        slot.holders = 0
        await until(lambda: decode.ledger.open_jobs == 0)
    finally:
        await prefill.link.close()
        await decode.server.stop()
