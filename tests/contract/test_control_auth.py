"""The control channel with a cluster key: who gets in, and what somebody on the path can do."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pullfill.decode_worker.ledger import JobState
from pullfill.errors import PeerUnavailable
from pullfill.net.security import ClusterKey
from pullfill.runtime import metrics
from pullfill.wire import AuthChallenge, AuthHello, AuthProof, DrainAck, Goodbye, encode
from tests.support.control_rig import Decode, Prefill, Raw
from tests.support.framing import frame
from tests.support.listening import listening
from tests.support.waiting import soon

KEY = ClusterKey(b"k" * 32)
OTHER = ClusterKey(b"o" * 32)
DECODE = {"key": KEY}


def refused() -> float:
    return metrics.AUTH_REFUSED.labels("control")._value.get()


@pytest.mark.parametrize("theirs", [None, OTHER], ids=["none", "other"])
async def test_without_the_right_key_nobody_gets_in_and_both_sides_say_which_to_check(
    decode: Decode, connect: Any, caplog: pytest.LogCaptureFixture, theirs: ClusterKey | None
) -> None:
    before = refused()
    prefill = await connect(key=theirs, up=False)
    with pytest.raises(PeerUnavailable):
        await prefill.link.wait_up(0.5)
    await soon(lambda: refused() > before + 4)  # more than one attempt, seen by both ends
    assert len(decode.server.peers.pulling) == 0
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    for room in ("refused a control connection", "control connection to decode-1"):
        (line,) = [text for text in said if text.startswith(room)]  # once, not at each attempt
        assert "[cluster] key_file" in line
        assert KEY.fingerprint in line or (theirs and theirs.fingerprint in line)


@pytest.mark.parametrize("decode", [{}], indirect=True)
async def test_a_worker_with_a_key_does_not_talk_to_one_without(
    connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = await connect(key=KEY, up=False)
    with pytest.raises(PeerUnavailable):
        await prefill.link.wait_up(10)
    assert "the decode worker has no cluster key" in caplog.text


async def test_a_proof_made_without_the_key_is_refused_with_a_reason(raw: Raw) -> None:
    raw.say(AuthHello(nonce=b"n" * 32))
    challenge = await raw.hear(AuthChallenge)
    raw.say(AuthProof(proof=challenge.proof))  # reflecting theirs proves nothing
    answer = await raw.hear()
    assert isinstance(answer, Goodbye)
    assert "another cluster key" in answer.reason
    assert await raw.ended()


@pytest.mark.parametrize("decode", [{"key": KEY, "name": "decode-2"}], indirect=True)
async def test_another_decode_worker_at_the_address_is_not_believed(
    decode: Decode, caplog: pytest.LogCaptureFixture
) -> None:
    """Both hold the key: one cannot be taken for the other by changing the road."""
    prefill = Prefill(Decode(), key=KEY, address=decode.server.address)
    try:
        with pytest.raises(PeerUnavailable):
            await prefill.link.wait_up(10)
        assert "now used by decode-2" in caplog.text
    finally:
        await prefill.link.close()


async def body_of(reader: asyncio.StreamReader) -> bytes:
    """The next frame."""
    (length,) = struct.unpack("<I", await reader.readexactly(4))
    return await reader.readexactly(length)


@asynccontextmanager
async def on_the_path(target: Decode, change: Callable[[bytes], list[bytes]]) -> AsyncIterator[str]:
    """The address of somebody between a prefill worker and its decode worker.

    change: gets each frame to the latter."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await target.raw()

        async def up() -> None:
            while True:
                for changed in change(await body_of(reader)):
                    there.writer.write(frame(changed))

        async def down() -> None:
            while True:
                writer.write(frame(await body_of(there.reader)))

        tasks = [asyncio.create_task(up()), asyncio.create_task(down())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer.close()
        there.writer.close()

    async with listening(serve) as (host, port):
        yield f"tcp://{host}:{port}"


def flip(body: bytes) -> list[bytes]:
    return [body[:-1] + bytes([body[-1] ^ 1])]


def forge(body: bytes) -> list[bytes]:
    return [b"\0" * 16 + encode(DrainAck()), body]


@pytest.mark.parametrize(
    "attack", [flip, lambda body: [body, body], forge], ids=["changed", "repeated", "inserted"]
)
@pytest.mark.essential
async def test_nobody_on_the_path_can_speak_for_a_worker(
    decode: Decode, connect: Any, attack: Callable[[bytes], list[bytes]]
) -> None:
    attacked = False
    async with on_the_path(decode, lambda body: attack(body) if attacked else [body]) as address:
        prefill = await connect(key=KEY, address=address)
        decode.open()
        grant = await prefill.claim()
        entry = decode.ledger.find("j")
        assert entry is not None
        before = refused()
        attacked = True
        # Of a commit said twice the first copy counts, and may be answered before the end.
        await asyncio.gather(prefill.commit(grant), return_exceptions=True)
        await soon(lambda: refused() > before and prefill.lost == 1)
        if attack in (flip, forge):
            assert entry.state is not JobState.COMMITTED
        await prefill.link.close()
