"""The ledger's timer is told what is due earlier, whoever carries the ledger's actions out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.decode_worker.ledger import Entry, JobState, Settle
from pullfill.errors import Outcome
from pullfill.net import frames
from pullfill.wire import Claim, Draining, GiveUp, Grant, Heartbeat, Revoke
from tests.support.control_rig import Decode, Raw, until


class Rig(Decode):
    """A decode worker, and prefill workers that say what the test lets them."""

    def __init__(self) -> None:
        super().__init__(silent_s=60.0)  # nobody is lost but whom the test ends
        self._workers: list[Raw] = []

    async def worker(self) -> Raw:
        raw = Raw(*await asyncio.open_connection(*frames.split_address(self.server.address)))
        self._workers.append(raw)
        await raw.hello()
        return raw

    async def stop(self) -> None:
        await self.server.stop()
        for raw in self._workers:
            raw.writer.close()


@pytest.fixture
async def decode() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.server.start("127.0.0.1")
    yield rig
    await rig.stop()


async def writing(decode: Rig, raw: Raw) -> Any:
    """`raw` holds the job and writes. Returns its grant's slot; the timer is asleep for 30 s."""
    decode.open()
    raw.say(Claim(rid=1, job_id="j", incarnation="i0"))
    grant = await raw.hear()
    assert isinstance(grant, Grant)
    slot = decode.fences.valid(grant.fence)
    slot.holders += 1
    return slot


async def test_proof_is_asked_for_when_another_message_took_the_revoke(decode: Rig) -> None:
    """The engine thread cancels and lets go of the processor while it is woken; meanwhile the
    asyncio thread sends the revoke, after the message of somebody else."""
    writer, other = await decode.worker(), await decode.worker()
    slot = await writing(decode, writer)
    cancelled, sent = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def woken() -> None:
        loop.call_soon_threadsafe(cancelled.set)
        if threading.current_thread() is not threading.main_thread():
            assert sent.wait(10)

    decode.ledger._on_event = woken
    cancel = asyncio.create_task(asyncio.to_thread(decode.ledger.cancel, "r-j"))
    await cancelled.wait()
    other.say(Heartbeat())
    assert isinstance(await other.hear(), Heartbeat)
    assert isinstance(await writer.hear(), Revoke)
    sent.set()
    await cancel
    assert decode.ledger.quarantined_blocks
    slot.holders = 0  # killed: the kernel frees the lock, and nobody says anything
    await until(lambda: decode.ledger.open_jobs == 0)


async def test_proof_is_asked_for_when_the_writer_is_lost(decode: Rig) -> None:
    writer, _ = await decode.worker(), await decode.worker()
    slot = await writing(decode, writer)
    decode.ledger._on_action = lambda: None
    decode.ledger.cancel("r-j")
    assert decode.ledger.take_actions(), "taken by the test: the timer was told nothing"
    assert decode.ledger.quarantined_blocks
    slot.holders = 0
    writer.writer.close()
    await until(lambda: decode.ledger.open_jobs == 0)


async def test_what_is_proved_quiet_while_nobody_pulls_is_not_held_first(decode: Rig) -> None:
    """Handed back by the last worker, which still wrote then, and has ended when the timer looks:
    served here at once, and its blocks are free."""
    last = await decode.worker()
    slot = await writing(decode, last)
    real, asked = decode.fences.try_revoke, []

    def try_revoke(token: Any) -> bool:
        asked.append(real(token))
        slot.holders = 0
        return bool(asked[-1])

    fences: Any = SimpleNamespace(try_revoke=try_revoke)
    decode.ledger._fences = fences
    last.say(Draining())
    last.say(GiveUp(job_id="j", attempt=1, incarnation="i0", cause="x", retry=True))
    await until(lambda: decode.ledger.open_jobs == 0)
    assert asked == [False, True]
    assert decode.settled() == [Settle("r-j", Outcome.PREFILL_LOST)]


async def test_jobs_do_not_wait_for_a_worker_that_pulls_none(decode: Rig) -> None:
    """Its self-check has not passed. The job of a self-check waits for nobody that pulls."""
    unchecked, checked = await decode.worker(), await decode.worker()
    unchecked.say(Heartbeat(pulls=False, why="self_check_pending"))
    await until(lambda: len(decode.server.peers.pulling) == 1)
    decode.open()
    job = Entry("t", "r-t", (7, 8), first_target=0, timeout_s=30.0, to="p")
    decode.ledger.open(job)
    checked.say(Draining())
    await until(lambda: decode.ledger.find("j") is None)
    assert decode.settled() == [Settle("r-j", Outcome.PREFILL_LOST)]
    trial = decode.ledger.find("t")
    assert trial is not None
    assert trial.state is JobState.QUEUED
