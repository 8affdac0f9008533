"""The control channel when a connection, a waiting claim or the server itself ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.decode_worker.kv_reader import KvReader
from pullfill.net.channel import split_address
from pullfill.runtime.serial_executor import SerialExecutor
from pullfill.wire import Claim, Grant, Welcome
from tests.support.control_rig import Decode, Raw, hello
from tests.support.waiting import soon


async def test_a_worker_is_forgotten_though_no_thread_can_close_its_session(
    decode: Decode, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--kv-mode pull` the session is closed on a thread."""
    prefill = await connect()
    (peer,) = decode.server.peers.values()
    closed: list[bool] = []
    reader = peer.reader = KvReader(
        "prefill-1", lambda: pytest.fail("nothing is read"), decode.server._readers
    )
    reader._session = SimpleNamespace(close=lambda: closed.append(True))  # type: ignore[assignment]
    decode.open()
    await prefill.claim()

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(SerialExecutor, "put", refuse)
    peer.channel.close()
    await soon(lambda: decode.ledger.open_jobs == 0)
    assert decode.server.peers.get(peer.name) is None
    assert closed == [True]
    assert not decode.server._readers


async def test_a_late_grant_is_handed_back(decode: Decode, connect: Any) -> None:
    """The caller of `claim` was cancelled. The job must not be held until its deadline."""
    prefill = await connect()
    other = await connect("prefill-2")
    decode.open()
    asking = asyncio.ensure_future(prefill.claim())
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await soon(lambda: decode.ledger.find("j").attempt == 1)  # type: ignore[union-attr]
    await soon(lambda: decode.fences.in_use == 0)
    assert (await other.claim()).attempt == 2


async def test_stop_does_not_miss_its_own_cancellation(decode: Decode) -> None:
    """Once a wake-up in the same moment swallowed it, and the process never ended."""
    await asyncio.sleep(0.01)
    decode.handoff.wake.set()
    await asyncio.wait_for(decode.server.stop(), 10)


async def test_stop_settles_what_hangs_on_the_connections(decode: Decode, connect: Any) -> None:
    """The fences are closed after `stop`, so nothing may ask them for a proof any more."""
    prefill = await connect()
    decode.open()
    decode.ledger.published("j", "receipt")
    await prefill.claim()
    await decode.server.stop()
    assert decode.ledger.open_jobs == 0
    assert decode.cancelled == ["receipt"]
    assert len(decode.server.peers.pulling) == 0


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


@pytest.mark.parametrize("turns", range(3))
async def test_a_server_that_stops_closes_what_just_connected(decode: Decode, turns: int) -> None:
    """turns: of the loop, from the connect to the stop."""
    with socket.create_connection(split_address(decode.server.address)) as peer:
        for _ in range(turns):
            await asyncio.sleep(0)
        await decode.server.stop()
        peer.settimeout(5.0)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.to_thread(peer.recv, 1) == b""
