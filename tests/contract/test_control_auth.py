"""The control channel with a cluster key: who gets in, and what somebody on the path can do."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from typing import Any

import pytest

from pullfill.decode_worker.ledger import JobState
from pullfill.errors import PeerUnavailable
from pullfill.net.security import ClusterKey
from pullfill.runtime import metrics
from pullfill.runtime.lifecycle import stop_listening
from pullfill.wire import AuthChallenge, AuthHello, AuthProof, DrainAck, Goodbye
from tests.support import framing
from tests.support.control_rig import Decode, Prefill, Raw, until

KEY = ClusterKey(b"k" * 32)
OTHER = ClusterKey(b"o" * 32)
DECODE = {"key": KEY}


def refused() -> float:
    return metrics.AUTH_REFUSED.labels("control")._value.get()


async def test_with_the_key_a_job_is_claimed_and_committed(decode: Decode, connect: Any) -> None:
    prefill = await connect(key=KEY)
    decode.open()
    assert (await prefill.commit(await prefill.claim())).ok


@pytest.mark.parametrize("theirs", [None, OTHER], ids=["none", "other"])
async def test_without_the_right_key_nobody_gets_in_and_both_sides_say_which_to_check(
    decode: Decode, connect: Any, caplog: pytest.LogCaptureFixture, theirs: ClusterKey | None
) -> None:
    before = refused()
    prefill = await connect(key=theirs, up=False)
    with pytest.raises(PeerUnavailable):
        await prefill.link.wait_up(0.5)
    await until(lambda: refused() > before + 4)  # more than one attempt, seen by both ends
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
    challenge = await asyncio.wait_for(framing.read(raw.reader, AuthChallenge), 10)
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


class _OnThePath:
    """Between a prefill worker and its decode worker; `change` gets each frame to the latter."""

    def __init__(self, target: Decode) -> None:
        self.target = target
        self.change: Callable[[bytes], list[bytes]] = lambda body: [body]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await self.target.raw()

        async def up() -> None:
            while True:
                body = await framing.read_body(reader)  # `change` may be set while this waits
                for changed in self.change(body):
                    framing.write_body(there.writer, changed)

        async def down() -> None:
            while True:
                framing.write_body(writer, await framing.read_body(there.reader))

        self._tasks += [asyncio.create_task(up()), asyncio.create_task(down())]
        await asyncio.wait(self._tasks[-2:], return_when=asyncio.FIRST_COMPLETED)
        writer.close()
        there.writer.close()

    async def stop(self) -> None:
        await stop_listening(self.server)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def flip(body: bytes) -> list[bytes]:
    return [body[:-1] + bytes([body[-1] ^ 1])]


def forge(body: bytes) -> list[bytes]:
    from pullfill.wire import encode

    return [b"\0" * 16 + encode(DrainAck()), body]


@pytest.mark.parametrize(
    "attack", [flip, lambda body: [body, body], forge], ids=["changed", "repeated", "inserted"]
)
@pytest.mark.essential
async def test_nobody_on_the_path_can_speak_for_a_worker(
    decode: Decode, connect: Any, attack: Callable[[bytes], list[bytes]]
) -> None:
    path = _OnThePath(decode)
    prefill = await connect(key=KEY, address=await path.start())
    decode.open()
    grant = await prefill.claim()
    before = refused()
    path.change = attack
    # Of a commit said twice the first copy counts, and may be answered before the end.
    await asyncio.gather(prefill.commit(grant), return_exceptions=True)
    await until(lambda: refused() > before and prefill.lost == 1)
    if attack in (flip, forge):
        entry = decode.ledger.find("j")
        assert entry is None or entry.state is not JobState.COMMITTED
        assert not decode.ledger.was_committed("j")
    await prefill.link.close()
    await path.stop()


async def test_what_was_recorded_cannot_be_played_to_a_new_connection(
    decode: Decode, connect: Any, raw: Raw
) -> None:
    recorded: list[bytes] = []
    path = _OnThePath(decode)
    path.change = lambda body: (recorded.append(body), [body])[1]  # type: ignore[func-returns-value]
    prefill = await connect(key=KEY, address=await path.start())
    await prefill.link.close()
    await path.stop()
    for body in recorded:
        framing.write_body(raw.writer, body)
    await asyncio.wait_for(framing.read(raw.reader, AuthChallenge), 10)
    assert isinstance(await raw.hear(), Goodbye)
    assert await raw.ended()


@pytest.mark.parametrize("noise", [b"", struct.pack("<I", 65 << 10), b"GET / HTTP/1.1\r\n\r\n"])
async def test_noise_before_the_proof_ends_that_connection_only(
    connect: Any, raw: Raw, noise: bytes
) -> None:
    raw.writer.write(noise)
    if not noise:
        raw.writer.write_eof()
    assert await raw.ended()
    await connect(key=KEY)
