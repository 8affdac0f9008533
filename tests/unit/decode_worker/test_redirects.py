"""Which requests a decode worker does not take, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill import wire
from pullfill.decode_worker.frontends import Request
from pullfill.decode_worker.redirects import FULL_TOKENS, GONE_TOKENS, Redirects
from pullfill.engine import front_wire
from pullfill.engine.front_wire import Picture, Redirect, RedirectReason
from tests.support.request_server_rig import QuietLoad, Rig, rigged

PROMPT = 2000


class Desk:
    """Requests of PROMPT tokens that come with a picture."""

    def __init__(self, *, tiered: bool = False, **load: int) -> None:
        self.load = QuietLoad()
        for name, value in load.items():
            setattr(self.load, name, value)
        engine_load: Any = self.load
        self.redirects = Redirects(engine_load, tiered=tiered)

    def look(
        self, matched: int = 0, queued: int = 0, *, draining: bool = False, must: bool = False
    ) -> Redirect | None:
        frontend: Any = None
        picture = Picture(matched_tokens=matched, queued_tokens=queued)
        taken = Request("r", frontend, None if must else picture)
        request = SimpleNamespace(request_id="r", num_tokens=PROMPT)
        answer = self.redirects.look(taken, request, draining)
        if answer is None:
            return None
        assert answer[0] == front_wire.RDIR
        return wire.decode(answer[1], Redirect)


def test_what_is_as_expected_is_taken_and_counted() -> None:
    desk = Desk(cached=960, queued=500)
    assert desk.look(matched=960, queued=500) is None
    assert desk.look(matched=0, queued=9999) is None
    assert desk.load.came_tokens == [PROMPT - 960] * 2


def test_a_prefix_that_is_gone() -> None:
    desk = Desk(cached=320, queued=7)
    told = desk.look(matched=320 + GONE_TOKENS + 1)
    assert told is not None
    assert (told.request_id, told.reason, told.held_tokens) == ("r", "prefix_gone", 320)
    assert told.load.uncached_tokens_queued == 7
    assert desk.load.came_tokens == []
    assert desk.look(matched=320 + GONE_TOKENS) is None


def test_a_prefix_that_another_request_brings_is_not_gone() -> None:
    desk = Desk(cached=32, comes=1600)
    assert desk.look(matched=1600) is None
    assert desk.load.came_tokens == [PROMPT - 1600], "it is computed once"
    told = desk.look(matched=1600 + GONE_TOKENS + 1)
    assert told is not None
    assert told.held_tokens == 1600


def test_what_the_prefix_cache_lacks_may_be_offloaded() -> None:
    assert Desk(tiered=True).look(matched=1600) is None


@pytest.mark.parametrize(
    ("believed", "queued", "full"),
    [
        (0, FULL_TOKENS, False),
        (0, FULL_TOKENS + 1, True),
        (10 * FULL_TOKENS, 15 * FULL_TOKENS, False),
        (10 * FULL_TOKENS, 15 * FULL_TOKENS + 1, True),
        (10 * FULL_TOKENS, 0, False),
    ],
)
def test_a_queue_that_is_longer_than_expected(believed: int, queued: int, full: bool) -> None:
    told = Desk(queued=queued, cached=64, comes=96).look(queued=believed)
    assert (told is not None) == full
    if told is not None:
        assert (told.reason, told.held_tokens) == ("queue_full", 96)
        assert told.load.uncached_tokens_queued == queued


def test_what_was_computed_since_the_last_report_does_not_count() -> None:
    desk = Desk(queued=9999)
    desk.load.read = lambda draining: desk.load.report  # type: ignore[method-assign]
    assert desk.look() is None


def test_a_request_that_must_be_taken_is() -> None:
    desk = Desk(queued=9999)
    assert desk.look(matched=1600, must=True) is None
    assert desk.look(must=True, draining=True) is None
    assert desk.load.came_tokens == [PROMPT] * 2


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with rigged(monkeypatch) as rig:
        yield rig


def tried(name: str, matched: int = 0, prompt: int = 10) -> tuple[bytes, ...]:
    picture = Picture(matched_tokens=matched, queued_tokens=0)
    return front_wire.TRY, wire.encode(picture), name.encode(), bytes(4 * prompt), b""


def told_of(frames: list[bytes]) -> Redirect:
    kind, payload = frames
    assert kind == front_wire.RDIR
    return wire.decode(payload, Redirect)


def test_the_engine_never_has_a_request_that_is_redirected(rig: Rig) -> None:
    rig.tell(*tried("a"))
    assert rig.core.added == ["a"]
    rig.load.queued = FULL_TOKENS + 1
    rig.peer.send_multipart(tried("b"))
    assert rig.request_server._socket.poll(5000)
    rig.request_server.receive()
    rig.settle()
    told = told_of(rig.peer.recv_multipart())
    assert (told.request_id, told.reason) == ("b", "queue_full")
    assert rig.core.added == ["a"]
    assert rig.request_server.active_requests == 1
    rig.tell(front_wire.ABRT, front_wire.encode_ids(["b"]))
    assert rig.core.aborted == []
    rig.add("b~1")
    assert rig.core.added == ["a", "b~1"]


def test_a_worker_that_drains_redirects_what_comes_and_what_is_prepared(rig: Rig) -> None:
    go = rig.hold_intake()
    rig.tell(*tried("a"), settle=False)
    rig.request_server.start_drain()
    assert rig.peer.recv_multipart() == [front_wire.DRAIN]
    rig.tell(*tried("b"), settle=False)
    assert told_of(rig.peer.recv_multipart()).request_id == "b"
    go.set()
    rig.settle()
    told = told_of(rig.peer.recv_multipart())
    assert (told.request_id, told.reason) == ("a", RedirectReason.DRAINING)
    assert told.load.draining
    assert rig.core.added == []
    assert rig.request_server.active_requests == 0


def test_a_full_intake_redirects(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pullfill.decode_worker.intake.MAX_BYTES", 100)
    go = rig.hold_intake()
    rig.tell(*tried("a", prompt=20), settle=False)
    rig.tell(*tried("b", prompt=20), settle=False)
    told = told_of(rig.peer.recv_multipart())
    assert (told.request_id, told.reason) == ("b", RedirectReason.INTAKE_FULL)
    go.set()
    rig.settle()
    assert rig.core.added == ["a"]


@pytest.mark.parametrize("rest", [(), (b"x",), (b"x", b"a", b"", b"")])
def test_an_unreadable_try_ends_its_connection(rig: Rig, rest: tuple[bytes, ...]) -> None:
    picture = wire.encode(Picture(matched_tokens=0, queued_tokens=0))
    rig.tell(front_wire.TRY, *(rest or (picture,)))
    assert rig.peer.poll(5000)
    assert rig.peer.recv_multipart() == [front_wire.GONE]
