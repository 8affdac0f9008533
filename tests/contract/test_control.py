"""The control channel: the real server and the real link over loopback TCP, one process."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pullfill.decode_worker.ledger import Entry, JobState, Settle
from pullfill.errors import Outcome, PeerUnavailable
from pullfill.net import peer_link
from pullfill.net.channel import FIRST_FRAME, HELLO_FRAME
from pullfill.net.peer_link import ConnectionLost, NotInTime
from pullfill.net.security import ClusterKey
from pullfill.runtime import metrics
from pullfill.wire import (
    WIRE_VERSION,
    Claim,
    GiveUp,
    Goodbye,
    Grant,
    Heartbeat,
    RefuseReason,
    Revoke,
    Welcome,
    encode,
)
from tests.support.control_rig import Decode, Raw, hello
from tests.support.framing import frame
from tests.support.handoff_rig import Make, copying, faults_of, prompt, settled, stuck
from tests.support.transfer_rigs import DENSE, shm_rig
from tests.support.waiting import soon


async def test_the_inputs_of_one_job_are_sent_at_a_time(decode: Decode, raw: Raw) -> None:
    """Grants of over 64 MiB together made the decode worker end the connection."""
    inputs, jobs = bytes(10 << 20), {f"j{number}": number for number in range(8)}

    def claim(job_id: str) -> None:
        raw.say(Claim(rid=jobs[job_id], job_id=job_id, incarnation="i0"))

    await raw.hello()
    for job_id in jobs:
        decode.open(job_id)
        decode.ledger.set_digest(job_id, b"digest", inputs)
        claim(job_id)
    (peer,) = decode.server.peers.values()
    while jobs:
        answer = await raw.hear()
        assert peer.channel.backlog < 2 * len(inputs)
        if isinstance(answer, Grant):
            assert answer.features == inputs
            del jobs[answer.job_id]
        else:
            assert answer.reason is RefuseReason.HELD
            (job_id,) = [name for name, rid in jobs.items() if rid == answer.rid]
            await asyncio.sleep(answer.retry_after_s)
            claim(job_id)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"v": WIRE_VERSION + 1}, f"wire version {WIRE_VERSION + 1}, but"),
        ({"compat": "other"}, "other"),
    ],
)
async def test_who_does_not_fit_is_told_goodbye(
    decode: Decode, raw: Raw, connect: Any, wrong: dict[str, Any], told: str
) -> None:
    raw.say(replace(hello(), **wrong))
    goodbye = await raw.hear()
    assert isinstance(goodbye, Goodbye)
    assert told in goodbye.reason
    assert await raw.ended()
    prefill = await connect(says=replace(hello(), **wrong), up=False)
    with pytest.raises(PeerUnavailable):
        await prefill.link.wait_up(0.1)
    assert prefill.lost == len(decode.server.peers) == 0, "it was never up"


@pytest.mark.parametrize(
    ("greeted", "said"),
    [
        (False, b"\xc1\xc1"),
        (True, b"\xc1\xc1"),
        (True, encode(hello())),
        (False, encode(Claim(rid=1, job_id="j", incarnation="i0"))),
    ],
    ids=["noise", "noise later", "a second hello", "a claim before hello"],
)
async def test_nonsense_closes_the_connection_and_is_counted(
    decode: Decode, connect: Any, raw: Raw, greeted: bool, said: bytes
) -> None:
    counter = metrics.STALE_REFUSED.labels("message")
    before = counter._value.get()
    other = await connect()
    decode.open()
    if greeted:
        await raw.hello()
    raw.writer.write(frame(said))
    assert await raw.ended()
    assert counter._value.get() == before + 1
    await soon(lambda: len(decode.server.peers.pulling) == 1)
    assert decode.fences.in_use == 0
    assert (await other.commit(await other.claim())).ok, "the others go on"


async def test_an_ack_subject_that_is_not_the_queues_harms_nobody(
    decode: Decode, connect: Any, raw: Raw
) -> None:
    other = await connect()
    await raw.hello()
    decode.open()
    raw.say(Claim(rid=1, job_id="j", incarnation="i0", ack_subject="evil.>"))
    assert isinstance(await raw.hear(), Grant)
    raw.writer.close()
    await soon(lambda: len(decode.server.peers.pulling) == 1)
    assert (await other.claim()).attempt == 2
    assert decode.nakked == []


# ------------------------------------------------------------------ the ledger's timer


@pytest.mark.parametrize("decode", [{"silent_s": 3600.0}], indirect=True)
async def test_proof_is_asked_for_when_another_message_took_the_revoke(decode: Decode) -> None:
    """The engine thread cancels and lets go of the processor while it is woken; meanwhile the
    asyncio thread sends the revoke, after the message of somebody else."""
    writer, other = await decode.raw(), await decode.raw()
    for raw in (writer, other):
        await raw.hello()
    decode.open()
    writer.say(Claim(rid=1, job_id="j", incarnation="i0"))
    let_go = decode.fences.hold((await writer.hear()).fence)  # it writes, and the timer is asleep
    cancelled, sent = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def woken() -> None:
        loop.call_soon_threadsafe(cancelled.set)
        if threading.current_thread() is not threading.main_thread():
            assert sent.wait(10)

    decode.ledger.on_event = woken
    cancel = asyncio.create_task(asyncio.to_thread(decode.ledger.give_up, "j", Outcome.CANCELLED))
    await cancelled.wait()
    other.say(Heartbeat())
    assert isinstance(await other.hear(), Heartbeat)
    assert isinstance(await writer.hear(), Revoke)
    sent.set()
    await cancel
    assert decode.ledger.quarantined_blocks
    let_go()  # killed: the kernel frees the lock, and nobody says anything
    await soon(lambda: decode.ledger.open_jobs == 0)


# --------------------------------------------------------------------------
# The control channel when a connection, a waiting claim or the server itself ends.


@pytest.mark.parametrize("how", ["not in time", "cancelled", "cancelled in that moment"])
async def test_a_late_grant_is_handed_back(decode: Decode, connect: Any, how: str) -> None:
    """Nobody waits for it any more. The job must not be held until its deadline."""
    prefill = await connect()
    (peer,) = decode.server.peers.values()
    write, other = peer.channel.write, await connect("prefill-2")
    decode.open()

    def with_another(message: Any, **more: Any) -> None:
        """The link reads both together."""
        write(message, **more)
        write(Revoke(job_id="j", attempt=1, reason="x"))

    within_s = 0.0 if how == "not in time" else 10.0
    asking = asyncio.ensure_future(prefill.link.claim("j", "i0", "ack.j", within_s=within_s))
    await asyncio.sleep(0)
    if how == "cancelled":
        asking.cancel()
    elif how == "cancelled in that moment":
        peer.channel.write = with_another
        prefill.link.on_message = lambda _: asking.cancel()
    with pytest.raises((asyncio.CancelledError, NotInTime)):
        await asking
    await soon(lambda: decode.ledger.find("j").attempt == 1)
    await soon(lambda: decode.fences.in_use == 0)
    assert (await other.claim()).attempt == 2


@pytest.mark.parametrize("decode", [{"silent_s": 3600.0}], indirect=True)
async def test_a_worker_that_connects_anew_has_left_its_old_connection(
    decode: Decode, connect: Any, raw: Raw
) -> None:
    """The old connection may look alive for seconds. Its jobs are claimed over the new one."""
    other = await connect("prefill-2")
    decode.open()
    raw.say(hello("prefill-1"))
    assert isinstance(await raw.hear(), Welcome)
    raw.say(Claim(rid=1, job_id="j", incarnation="i0", ack_subject="ack.j"))
    assert isinstance(await raw.hear(), Grant)
    again = await connect("prefill-1")
    assert await raw.ended()
    await soon(lambda: decode.nakked == ["ack.j"])
    assert decode.server.peers.instances == ["prefill-1", "prefill-2"]
    assert (await again.claim()).attempt == 2
    assert other.lost == again.lost == 0


# --------------------------------------------------------------------------
# Who is there and pulls, and what becomes of jobs when nobody does: over loopback TCP.


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


async def test_a_silent_decode_worker_is_let_go_and_dialled_again(
    connect: Any, decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it meanwhile."""
    monkeypatch.setattr(peer_link, "ALIVE_INTERVAL_S", 0.05)
    monkeypatch.setattr(peer_link, "SILENT_S", 0.25)
    prefill, waits = await connect(), list[Any]()
    await asyncio.sleep(0.12)
    time.sleep(0.4)  # noqa: ASYNC251
    await asyncio.sleep(0.2)
    assert prefill.lost == 0, "this process stood still, so what the other said was not read"
    (peer,) = decode.server.peers.values()
    monkeypatch.setattr(peer.channel, "write", lambda *_, **__: None)
    link = prefill.link
    link.on_lost = lambda: waits.append(asyncio.create_task(link.wait_up(3600)))
    async with asyncio.timeout(10):
        with pytest.raises(ConnectionLost):
            await prefill.claim()
        with pytest.raises(PeerUnavailable, match="said nothing"):
            await waits[0]
    del link.on_lost
    await soon(lambda: link.connected)


async def test_a_worker_that_pulls_nothing_for_now_is_not_counted(
    decode: Decode, connect: Any
) -> None:
    """Its engine is stuck: what nobody has claimed is served here; it may come back. The job of a
    self-check waits for nobody that pulls."""
    prefill = await connect()
    decode.open()
    decode.ledger.open(Entry("t", "r-t", (7, 8), first_target=0, timeout_s=30.0, to="p"))
    prefill.links.pause("its engine takes no steps")
    await soon(lambda: len(decode.server.peers.pulling) == 0)
    await soon(lambda: decode.ledger.find("j") is None)
    assert decode.ledger.take_events() == [Settle("r-j", Outcome.PREFILL_LOST)]
    assert decode.ledger.find("t").state is JobState.QUEUED
    said = "prefill-1 pulls no jobs: its engine takes no steps"
    assert decode.server.peers.not_pulling == [said]
    prefill.links.pause("")
    await soon(lambda: len(decode.server.peers.pulling) == 1)
    assert prefill.lost == 0


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
    assert decode.ledger.take_events() == [], "what was granted may end"
    prefill.link.send(GiveUp(job_id="j", attempt=1, incarnation="i0", cause="x", retry=True))
    await soon(lambda: decode.ledger.has_events)
    *held, settled = decode.ledger.take_events()
    assert (settled.loaded, settled.outcome) == (False, Outcome.PREFILL_LOST)
    assert len(held) == decode.ledger.open_jobs == writing
    let_go()
    await soon(lambda: decode.ledger.open_jobs == 0)


# --------------------------------------------- prefill workers and decode workers that come and go


KEY = ClusterKey(b"k" * 32)


@pytest.mark.parametrize("decode", [{"key": KEY}], indirect=True)
async def test_a_greeting_may_name_many_ranks(tmp_path: Path, connect: Any) -> None:
    region = shm_rig(tmp_path).region(DENSE)
    region.owner.close()
    of_rank = replace(region.descriptor, world_size=512, endpoints={"shm": "x" * 500})
    regions = tuple(replace(of_rank, rank=rank) for rank in range(512))
    long = replace(hello("prefill-1"), regions=regions)
    assert 2 * FIRST_FRAME < len(encode(long)) < HELLO_FRAME
    await connect(says=long, key=KEY)


async def test_a_worker_that_is_both_does_not_connect_to_itself(
    decode: Decode, connect: Any
) -> None:
    prefill = await connect()
    prefill.directory.put(replace(decode.record(), instance_id="prefill-1"))
    assert list(prefill.links.links) == ["decode-1"]
    assert not prefill.links.knows("prefill-1")


async def test_a_link_that_breaks_without_a_record_ends_and_the_next_record_makes_one(
    decode: Decode, connect: Any
) -> None:
    prefill = await connect()
    links, directory, record = prefill.links, prefill.directory, decode.record()
    directory.remove("decode-1")
    for peer in decode.server.peers.values():
        peer.channel.close()
    await soon(lambda: not decode.server.peers and not links.links)
    directory.put(replace(record, incarnation="i1"))
    await soon(lambda: links.connected == ["decode-1"])
    before = links.links["decode-1"]
    directory.put(replace(record, incarnation="i2"))
    await soon(lambda: links.connected == ["decode-1"])
    assert links.links["decode-1"] is not before, "it would write into what is no more"


async def test_a_decode_worker_that_comes_back_to_the_directory_stays(
    decode: Decode, connect: Any
) -> None:
    """As it was, after its key was lost for a while. Its connection may break later. A prefill
    worker that drains says so over the next one, too."""
    prefill = await connect()
    prefill.directory.remove("decode-1")
    prefill.directory.put(decode.record())
    prefill.links.leave()
    (peer,) = decode.server.peers.values()
    peer.channel.close()
    await soon(lambda: peer.name not in decode.server.peers)
    await soon(lambda: prefill.links.connected == ["decode-1"])
    await soon(lambda: [p.leaving for p in decode.server.peers.values()] == [True])


async def test_a_decode_worker_that_left_or_refuses_is_not_waited_for(
    decode: Decode, connect: Any
) -> None:
    """In doubt, when etcd does not answer, it may still be there; back again, it is found."""
    prefill = await connect(address="tcp://127.0.0.1:1", up=False, appear_s=3600.0)
    links, directory = prefill.links, prefill.directory
    async with asyncio.timeout(10):
        with pytest.raises(PeerUnavailable, match="does not answer"):
            await links.find("decode-1")
        assert not links.is_up("decode-1")
        directory.remove("decode-1")
        await soon(lambda: not links.links)
        with pytest.raises(PeerUnavailable, match="not listed"):
            await links.find("decode-1")
        assert not links.knows("decode-1")
        directory.reachable = False
        assert links.knows("decode-1")
        directory.reachable = True
        directory.put(decode.record())
        assert (await links.find("decode-1")).connected
        directory.put(replace(decode.record(), compat=None))
        assert not links.knows("decode-1"), "it does not fit any more"


# ------------------------------------------------------------------ a decode worker that leaves


async def test_a_link_to_a_decode_worker_that_left_stays_while_its_jobs_run(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy may take longer than IDLE_S, also a copy whose job has ended."""
    monkeypatch.setattr(peer_link, "ALIVE_INTERVAL_S", 0.02)
    monkeypatch.setattr(peer_link, "IDLE_S", 0.05)
    async with make() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        faults = faults_of(decode).hold()
        prefill.engine.gate.clear()
        served = decode.send(prompt(30))
        await soon(lambda: any(job.task for job in prefill.puller._jobs.values()))
        cluster.directory.remove(decode.name)
        await asyncio.sleep(0.3)
        assert prefill.links.is_up(decode.name), "its job is computed"
        prefill.engine.gate.set()
        await stuck(decode)
        decode.abort(served)
        await soon(lambda: not prefill.puller.in_flight)
        await asyncio.sleep(0.3)
        assert prefill.links.is_up(decode.name), "its copy is not proved quiet"
        faults.resume()
        await soon(lambda: not prefill.links.links)


async def test_a_decode_worker_that_falls_silent_keeps_no_credit(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy may hang for ever, and the jobs of others wait for the credit."""
    monkeypatch.setattr(peer_link, "ALIVE_INTERVAL_S", 0.02)
    monkeypatch.setattr(peer_link, "SILENT_S", 1.0)
    async with make(credit_blocks=4) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        served, faults = await copying(decode, decode)
        await soon(lambda: prefill.credits.gone)
        (peer,) = decode.control.peers.values()
        monkeypatch.setattr(peer.channel, "write", lambda *_, **__: None)
        await soon(lambda: not prefill.credits.gone)
        faults.resume()
        await settled(served)
