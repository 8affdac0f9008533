"""`PeerLink` against a peer that says what the test lets it: answers, pings, the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pullfill.errors import PeerUnavailable
from pullfill.net import peer_link
from pullfill.net.peer_link import ConnectionLost, NotInTime, PeerLink
from pullfill.wire import (
    Claim,
    Heartbeat,
    Refused,
    RefuseReason,
    Revoke,
    ToDecode,
    ToPrefill,
    Welcome,
)
from tests.support import framing
from tests.support.control_rig import hello
from tests.support.listening import listening
from tests.support.waiting import soon


class Link(PeerLink):
    """Notes what it is told."""

    heard = ToPrefill

    def __init__(self, address: str, **more: Any) -> None:
        self.unwanted: list[Any] = []
        self.messages: list[Any] = []
        self.ends: list[str] = []
        self.dials, self.pings = True, True
        super().__init__("decode-1", address, hello(), None, **more)

    def on_unwanted(self, answer: Any) -> None:
        self.unwanted.append(answer)

    def on_message(self, message: Any) -> None:
        if not isinstance(message, Heartbeat):
            self.messages.append(message)

    def on_silent(self) -> None:
        self.ends.append("silent")

    def on_lost(self) -> None:
        self.ends.append("lost")

    def on_over(self) -> None:
        self.ends.append("over")

    def again(self) -> bool:
        return self.dials

    def ping(self) -> Heartbeat | None:
        return Heartbeat() if self.pings else None

    async def claim(self, job_id: str, within_s: float = 10.0) -> Any:
        return await self.ask(lambda rid: Claim(rid=rid, job_id=job_id, incarnation="i"), within_s)


class Peer:
    """Welcomes a link, and keeps its questions."""

    def __init__(self) -> None:
        self.asked: dict[str, int] = {}
        self.beats, self.answers = 0, True
        self.writer: asyncio.StreamWriter

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        try:
            while True:
                message: Any = await framing.read(reader, ToDecode)
                if isinstance(message, Claim):
                    self.asked[message.job_id] = message.rid
                elif isinstance(message, Heartbeat):
                    self.beats += 1
                    if self.answers:
                        self.say(message)
                else:
                    self.say(Welcome(decode_instance="decode-1"))
        except (EOFError, ConnectionError):
            writer.close()

    def say(self, message: Any) -> None:
        framing.write(self.writer, message)

    def answer(self, job_id: str) -> Refused:
        answer = Refused(rid=self.asked[job_id], reason=RefuseReason.CLOSED)
        self.say(answer)
        return answer


@asynccontextmanager
async def connected(**more: Any) -> AsyncIterator[tuple[Link, Peer]]:
    peer = Peer()
    async with listening(peer.serve) as (host, port):
        link = Link(f"tcp://{host}:{port}", **more)
        try:
            await link.wait_up(10)
            yield link, peer
        finally:
            await link.close()


async def test_each_question_gets_its_own_answer_and_the_rest_is_told() -> None:
    async with connected() as (link, peer):
        both = [asyncio.create_task(link.claim(name)) for name in ("a", "b")]
        await soon(lambda: len(peer.asked) == 2)
        second, first, again = peer.answer("b"), peer.answer("a"), peer.answer("a")
        assert await asyncio.gather(*both) == [first, second]
        revoke = Revoke(job_id="j", attempt=1, reason="x")
        peer.say(revoke)
        await soon(lambda: link.messages == [revoke])
        assert link.unwanted == [again], "nobody waits for a second answer"


async def test_what_comes_late_or_with_a_cancellation_is_not_lost() -> None:
    async with connected() as (link, peer):
        with pytest.raises(NotInTime):
            await link.claim("late", 0.01)
        await soon(lambda: peer.asked)
        late = peer.answer("late")
        await soon(lambda: link.unwanted == [late])
        asked = asyncio.create_task(link.claim("cancelled"))
        await soon(lambda: "cancelled" in peer.asked)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        answer = peer.answer("cancelled")
        await soon(lambda: link.unwanted == [late, answer])


async def test_what_comes_in_the_moment_of_a_cancellation_is_not_lost() -> None:
    """It may be a grant. Nobody else would know of it and hand it back."""
    async with connected() as (link, peer):
        asked = asyncio.create_task(link.claim("a"))
        await soon(lambda: peer.asked)
        link.on_message = lambda _: asked.cancel()
        answer = peer.answer("a")
        peer.say(Revoke(job_id="j", attempt=1, reason="x"))  # read together with the answer
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert link.unwanted == [answer]


async def test_a_lost_connection_ends_all_questions_and_is_made_again() -> None:
    async with connected() as (link, peer):
        asked = asyncio.create_task(link.claim("a"))
        await soon(lambda: peer.asked)
        peer.writer.close()
        with pytest.raises(ConnectionLost):
            await asked
        await link.wait_up(10)
        assert link.ends == ["lost"]
    assert link.ends == ["lost", "over", "lost"]
    with pytest.raises(PeerUnavailable, match="not connected"):
        await link.claim("b")


async def test_who_is_not_dialled_again_is_not_waited_for() -> None:
    async with connected() as (link, peer):
        link.dials = False
        peer.writer.close()
        await soon(lambda: link.ends == ["lost", "over"])
        with pytest.raises(PeerUnavailable, match="does not answer"):
            await link.wait_up(3600)


async def test_a_link_that_nothing_needs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_link, "ALIVE_INTERVAL_S", 0.01)
    async with connected(idle_s=0.05) as (link, _):
        link.pings = False
        await soon(lambda: link.ends == ["over", "lost"])


async def test_a_silent_peer_is_let_go_and_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process keeps its connection. Nobody waits for one that is silent."""
    monkeypatch.setattr(peer_link, "ALIVE_INTERVAL_S", 0.05)
    async with connected(silent_s=0.25) as (link, peer):
        await soon(lambda: peer.beats > 10)
        # This process stands still, so what the peer says is not read.
        asyncio.get_running_loop().call_soon(time.sleep, 0.4)
        await soon(lambda: peer.beats > 15)
        assert link.ends == [], "it answers"
        peer.answers = False
        await soon(lambda: link.ends == ["silent", "lost"])
        with pytest.raises(PeerUnavailable, match="said nothing"):
            await link.wait_up(3600)
        peer.answers = True
        await soon(lambda: link.connected)
