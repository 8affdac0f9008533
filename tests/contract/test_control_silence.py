"""Who is there and pulls, and what becomes of jobs when nobody does: over loopback TCP."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill import frames
from pullfill.errors import Outcome
from pullfill.wire import Alive, Claim, Grant, HandBack
from tests.support import framing
from tests.support.control_rig import Decode, Prefill, Raw, until


async def test_a_silent_worker_is_gone_and_its_job_served_here() -> None:
    """A stopped process keeps its connection; only its silence tells."""
    decode = Decode(silent_s=0.5)
    await decode.server.start("127.0.0.1")
    host, port = frames.split_address(decode.server.address)
    reader, writer = await asyncio.open_connection(host, port)
    stopped = Raw(reader, writer)
    try:
        await stopped.hello()
        await until(lambda: decode.server.prefill_workers == 1)
        decode.open()
        framing.write(writer, Claim(rid=1, job_id="j", incarnation="i0", delivery=1))
        assert isinstance(await stopped.hear(), Grant)
        await until(lambda: decode.server.prefill_workers == 0)
        await until(lambda: decode.ledger.open_jobs == 0)
        (settled,) = decode.settled()
        assert (settled.loaded, settled.outcome) == (False, Outcome.PREFILL_LOST)
    finally:
        writer.close()
        await decode.server.stop()


async def test_a_worker_that_says_alive_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pullfill.prefill_worker.link.ALIVE_INTERVAL_S", 0.1)
    decode = Decode(silent_s=0.5)
    await decode.server.start("127.0.0.1")
    prefill = Prefill(decode)
    try:
        await prefill.link.wait_up(5.0)
        await asyncio.sleep(1.2)
        assert decode.server.prefill_workers == 1
        assert prefill.lost == 0
    finally:
        await prefill.link.close()
        await decode.server.stop()


async def test_a_link_that_nobody_uses_says_less_often_that_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pullfill.prefill_worker.link.ALIVE_INTERVAL_S", 0.02)
    decode = Decode()
    real, heard = decode.server._dispatch, [0]

    def count(peer: Any, message: object) -> None:
        heard[0] += isinstance(message, Alive)
        real(peer, message)

    monkeypatch.setattr(decode.server, "_dispatch", count)
    await decode.server.start("127.0.0.1")
    prefill = Prefill(decode)
    try:
        await prefill.link.wait_up(5.0)
        told = []
        for asked_at in (-1e9, 1e9):
            prefill.link._asked_at = asked_at
            await asyncio.sleep(0.05)
            heard[0] = 0
            await asyncio.sleep(0.4)
            told.append(heard[0])
        unused, used = told
        assert 0 < 1.4 * unused < used
        assert prefill.lost == 0
    finally:
        await prefill.link.close()
        await decode.server.stop()


async def test_a_silent_decode_worker_is_let_go_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stopped decode worker keeps its connection too: what waits for it would wait for ever."""
    monkeypatch.setattr("pullfill.prefill_worker.link.ALIVE_INTERVAL_S", 0.05)
    decode = Decode()
    real = decode.server._dispatch
    monkeypatch.setattr(decode.server, "_dispatch", lambda peer, message: None)
    await decode.server.start("127.0.0.1")
    prefill = Prefill(decode, silent_s=0.25)
    closed: list[int] = []
    mover: Any = SimpleNamespace(close=lambda: closed.append(1))
    prefill.link._shared._mover = mover
    try:
        await prefill.link.wait_up(5.0)
        await until(lambda: prefill.lost == 1)
        assert closed == [1], "its credits are written off"
        monkeypatch.setattr(decode.server, "_dispatch", real)
        await prefill.link.wait_up(5.0)
        for _ in range(10):  # the connection it had then may end once more
            lost = prefill.lost
            await asyncio.sleep(0.4)
            if prefill.lost == lost:
                break
        assert prefill.lost == lost, "it answers again"
        assert prefill.link.connected
    finally:
        await prefill.link.close()
        await decode.server.stop()


async def test_a_worker_that_pulls_nothing_for_now_is_not_counted() -> None:
    """Its engine is stuck: what nobody has claimed is served here; it may come back."""
    decode = Decode()
    await decode.server.start("127.0.0.1")
    prefill = Prefill(decode)
    try:
        await prefill.link.wait_up(5.0)
        decode.open()
        prefill.link.pause(True)
        await until(lambda: decode.server.prefill_workers == 0)
        await until(lambda: decode.ledger.open_jobs == 0)
        (settled,) = decode.settled()
        assert (settled.loaded, settled.outcome) == (False, Outcome.PREFILL_LOST)
        prefill.link.pause(False)
        await until(lambda: decode.server.prefill_workers == 1)
        assert prefill.lost == 0
    finally:
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
        prefill.link.leave()
        await until(lambda: decode.server.prefill_workers == 0)
        assert decode.settled() == [], "what was granted may end"
        prefill.link.send(HandBack(job_id="j", attempt=1, incarnation="i0", cause="x", retry=True))
        await until(lambda: decode.ledger.has_events)
        *held, settled = decode.settled()
        assert (settled.loaded, settled.outcome) == (False, Outcome.PREFILL_LOST)
        assert len(held) == decode.ledger.open_jobs == writing
        slot.holders = 0
        await until(lambda: decode.ledger.open_jobs == 0)
    finally:
        await prefill.link.close()
        await decode.server.stop()
