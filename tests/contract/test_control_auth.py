"""The control channel with a cluster key: who gets in, and what somebody on the path can do."""

from __future__ import annotations

import asyncio
import logging
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest

from pullfill.decode_worker.ledger import JobState
from pullfill.errors import AuthFailed, PeerUnavailable
from pullfill.net import frames
from pullfill.net.channel import Channel, accept, introduce
from pullfill.net.handshake import Seal
from pullfill.net.security import ClusterKey
from pullfill.runtime import metrics
from pullfill.runtime.lifecycle import stop_listening
from pullfill.wire import AuthChallenge, AuthHello, AuthProof, DrainAck, GiveUp, Goodbye, Trial
from tests.support import framing
from tests.support.control_rig import Decode, Prefill, Raw, hello, until

KEY = ClusterKey(b"k" * 32)
OTHER = ClusterKey(b"o" * 32)


def refused() -> float:
    return metrics.AUTH_REFUSED.labels("control")._value.get()


@pytest.fixture
async def locked() -> AsyncIterator[Decode]:
    """A decode worker that wants KEY."""
    server = Decode(key=KEY)
    await server.server.start("127.0.0.1")
    yield server
    await server.server.stop()


async def raw(server: Decode) -> Raw:
    host, port = frames.split_address(server.server.address)
    return Raw(*await asyncio.open_connection(host, port))


async def test_with_the_key_a_job_is_claimed_and_committed(locked: Decode) -> None:
    prefill = Prefill(locked, key=KEY)
    try:
        await prefill.link.wait_up(10)
        locked.open()
        grant = await prefill.claim()
        assert (await prefill.commit(grant)).ok
    finally:
        await prefill.link.close()


async def test_large_messages_are_sealed_in_order_and_not_on_the_loop(
    locked: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 MiB take 10 ms at each end."""
    on_loop, real = list[bool](), Seal.of_next

    def of_next(self: Seal, body: bytes) -> bytes:
        if len(body) > 1 << 20:
            on_loop.append(threading.current_thread() is threading.main_thread())
        return real(self, body)

    monkeypatch.setattr(Seal, "of_next", of_next)
    prefill = Prefill(locked, key=KEY)
    try:
        await prefill.link.wait_up(10)
        for job_id, inputs in (("j", bytes(8 << 20)), ("k", b"")):
            locked.open(job_id)
            locked.ledger.set_digest(job_id, b"digest", inputs)
        grants = await asyncio.gather(prefill.claim("j"), prefill.claim("k"))
        assert [len(grant.features) for grant in grants] == [8 << 20, 0]
        for grant in grants:
            assert (await prefill.commit(grant)).ok
        assert on_loop == [False, False]
        (peer,) = locked.server.peers.values()
        peer.channel.write(Trial(job=bytes(2 << 20)))
        peer.channel.write(Trial(job=b"last"))
        peer.channel.close()
        told = [await asyncio.wait_for(prefill.links.trials.get(), 10) for _ in range(2)]
        assert told[1] == Trial(job=b"last"), "what is queued is sent before the end"
    finally:
        await prefill.link.close()


@pytest.mark.parametrize("theirs", [None, OTHER], ids=["none", "other"])
async def test_without_the_right_key_nobody_gets_in_and_both_sides_say_which_to_check(
    locked: Decode, caplog: pytest.LogCaptureFixture, theirs: ClusterKey | None
) -> None:
    before = refused()
    prefill = Prefill(locked, key=theirs)
    try:
        with pytest.raises(PeerUnavailable):
            await prefill.link.wait_up(0.5)
        await until(lambda: refused() > before + 4)  # more than one attempt, seen by both ends
        assert len(locked.server.peers.pulling) == 0
        said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        for room in ("refused a control connection", "control connection to decode-1"):
            (line, *more) = [text for text in said if text.startswith(room)]
            assert "[cluster] key_file" in line
            assert KEY.fingerprint in line or (theirs and theirs.fingerprint in line)
        assert not more, "a link that is refused again and again says so once"
    finally:
        await prefill.link.close()


async def test_who_is_refused_again_and_again_is_logged_once(
    locked: Decode, caplog: pytest.LogCaptureFixture
) -> None:
    before = refused()
    for _ in range(5):
        peer = await raw(locked)
        peer.say(hello())
        assert isinstance(await peer.hear(), Goodbye)
        assert await peer.ended()
    assert refused() == before + 5
    (line,) = [r.getMessage() for r in caplog.records if "refused a control" in r.getMessage()]
    assert "127.0.0.1" in line


async def test_a_worker_with_a_key_does_not_talk_to_one_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    open_server = Decode()
    await open_server.server.start("127.0.0.1")
    prefill = Prefill(open_server, key=KEY)
    try:
        with pytest.raises(PeerUnavailable):
            await prefill.link.wait_up(10)
        assert "the decode worker has no cluster key" in caplog.text
    finally:
        await prefill.link.close()
        await open_server.server.stop()


async def test_a_proof_made_without_the_key_is_refused_with_a_reason(locked: Decode) -> None:
    peer = await raw(locked)
    peer.say(AuthHello(nonce=b"n" * 32))
    challenge = await asyncio.wait_for(framing.read(peer.reader, AuthChallenge), 10)
    peer.say(AuthProof(proof=challenge.proof))  # reflecting theirs proves nothing
    answer = await peer.hear()
    assert isinstance(answer, Goodbye)
    assert "another cluster key" in answer.reason
    assert await peer.ended()


async def test_another_decode_worker_at_the_address_is_not_believed(
    locked: Decode, caplog: pytest.LogCaptureFixture
) -> None:
    """Both hold the key: one cannot be taken for the other by changing the road."""
    elsewhere = Decode(key=KEY)
    elsewhere.server._instance_id = "decode-2"
    await elsewhere.server.start("127.0.0.1")
    prefill = Prefill(locked, key=KEY, address=elsewhere.server.address)
    try:
        with pytest.raises(PeerUnavailable):
            await prefill.link.wait_up(10)
        assert "now used by decode-2" in caplog.text
    finally:
        await prefill.link.close()
        await elsewhere.server.stop()


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
        there = await raw(self.target)

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
    locked: Decode, attack: Callable[[bytes], list[bytes]]
) -> None:
    path = _OnThePath(locked)
    prefill = Prefill(locked, key=KEY, address=await path.start())
    try:
        await prefill.link.wait_up(10)
        locked.open()
        grant = await prefill.claim()
        before = refused()
        path.change = attack
        # Of a commit said twice the first copy counts, and may be answered before the end.
        await asyncio.gather(prefill.commit(grant), return_exceptions=True)
        await until(lambda: refused() > before and prefill.lost == 1)
        if attack in (flip, forge):
            entry = locked.ledger.find("j")
            assert entry is None or entry.state is not JobState.COMMITTED
            assert not locked.ledger.was_committed("j")
    finally:
        await prefill.link.close()
        await path.stop()


async def test_what_was_recorded_cannot_be_played_to_a_new_connection(locked: Decode) -> None:
    recorded: list[bytes] = []
    path = _OnThePath(locked)
    path.change = lambda body: (recorded.append(body), [body])[1]  # type: ignore[func-returns-value]
    prefill = Prefill(locked, key=KEY, address=await path.start())
    await prefill.link.wait_up(10)
    await prefill.link.close()
    await path.stop()
    peer = await raw(locked)
    for body in recorded:
        framing.write_body(peer.writer, body)
    await asyncio.wait_for(framing.read(peer.reader, AuthChallenge), 10)
    assert isinstance(await peer.hear(), Goodbye)
    assert await peer.ended()


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"\xff" * 4,
        struct.pack("<I", 1 << 20) + b"x" * 100,
        struct.pack("<I", 65 << 10) + b"x" * (65 << 10),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
async def test_noise_before_the_proof_ends_that_connection_only(
    locked: Decode, noise: bytes
) -> None:
    peer = await raw(locked)
    peer.writer.write(noise)
    if not noise:
        peer.writer.write_eof()
    assert await peer.ended()
    good = Prefill(locked, key=KEY)
    await good.link.wait_up(10)
    await good.link.close()


async def test_a_peer_that_says_nothing_or_half_a_frame_is_ended() -> None:
    """A handshake has five seconds in all; here it is made short."""
    channel, _ = framing.channel_of()
    channel.data_received(b"\x10\0\0\0half")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await accept(channel, KEY)


async def test_what_a_seal_costs_is_microseconds() -> None:
    """A bound against accidents, not a benchmark: thousands of frames in a second."""
    left: list[Channel] = []

    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Channel(left.append), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    _, right = await loop.create_connection(Channel, "127.0.0.1", port)
    await until(lambda: left)
    accepting = asyncio.create_task(accept(left[0], KEY))
    await introduce(right, KEY, hello())
    await accepting
    message = GiveUp(job_id="j" * 32, attempt=1, incarnation="i" * 32, cause="c", retry=True)
    began = time.process_time()
    for _ in range(1000):
        right.write(message)
        assert await left[0].read(GiveUp) == message
    assert (time.process_time() - began) / 1000 < 5e-3
    right._out._number += 1  # type: ignore[union-attr]
    right.write(message)
    with pytest.raises(AuthFailed):
        await left[0].read(GiveUp)
    left[0].close()
    right.close()
    await stop_listening(server)
