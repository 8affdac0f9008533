"""The decode worker's end of the frontend wire, over a real ROUTER; the engine is a recorder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pullfill.engine import rpc
from tests.support.shim_rig import Rig, rigged


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with rigged(monkeypatch) as rig:
        yield rig


def test_the_port_asked_for(rig: Rig) -> None:
    host, _, port = rig.shim.address.rpartition(":")
    assert host == "tcp://127.0.0.1"
    rig.shim.close()
    rig.shim.bind("127.0.0.1", int(port))
    assert rig.shim.address == f"tcp://127.0.0.1:{port}"


def test_requests_reach_the_engine_and_abort_does(rig: Rig) -> None:
    rig.add("a", 10)
    assert rig.core.added == ["a"]
    assert rig.shim.active_requests == 1
    rig.tell(rpc.ABRT, rpc.encode_ids(["a", "not-mine"]))
    assert rig.core.aborted == ["a"]
    assert rig.shim.active_requests == 0


@pytest.mark.parametrize(("name", "prompt"), [(b"long", 100), (b"stream", 5)])
def test_what_does_not_fit_ends_with_an_error_and_never_reaches_the_engine(
    rig: Rig, name: bytes, prompt: int
) -> None:
    kind, payload = rig.ask(rpc.ADD, name, bytes(4 * prompt), b"")
    assert (kind, payload) == (rpc.OUT, b"error " + name + b" request")
    assert rig.core.added == []
    assert rig.shim.active_requests == 0


def test_the_same_id_twice_is_answered_and_added_once(rig: Rig) -> None:
    rig.add("a", 10)
    assert rig.ask(rpc.ADD, b"a", b"", b"") == [rpc.OUT, b"error a ours"]
    assert rig.core.added == ["a"]


@pytest.mark.parametrize("where", ["preprocess_add_request", "add_request"])
def test_a_bug_while_a_request_is_taken_in_is_ours(
    rig: Rig, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(request: Any) -> Any:
        raise ValueError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(rig.core, where, bug)
        assert rig.ask(rpc.ADD, b"a", b"", b"") == [rpc.OUT, b"error a ours"]
    assert "Traceback" in caplog.text
    rig.add("b")
    assert rig.core.added == ["b"]


def test_a_frontend_dropped_as_silent_is_told_when_it_speaks_again(rig: Rig) -> None:
    rig.add("a", 10)
    rig.clock.advance(rpc.SILENCE_S + 1)
    rig.shim.check_silent()
    assert rig.core.aborted == ["a"]
    assert rig.ask(rpc.PING) == [rpc.GONE]
    assert rig.ask(rpc.ADD, b"b", b"", b"") == [rpc.GONE]
    assert rig.core.added == ["a"]
    rig.hello()
    rig.add("c", 10)
    assert rig.core.added == ["a", "c"]


def test_a_frontend_without_requests_may_miss_as_many_pings(rig: Rig) -> None:
    """It says every other one: in the same stall as before it is dropped no sooner."""
    rig.clock.advance(rpc.SILENCE_S + 0.9 * rpc.PING_INTERVAL_S)
    rig.shim.check_silent()
    assert rig.ask(rpc.PING) == [rpc.PONG]
    rig.clock.advance(rpc.SILENCE_S + 1.1 * rpc.PING_INTERVAL_S)
    rig.shim.check_silent()
    assert rig.ask(rpc.PING) == [rpc.GONE]


@pytest.mark.parametrize(
    "frames",
    [
        (rpc.HELO,),
        (rpc.HELO, b"x"),
        (rpc.ABRT,),
        (rpc.ADD, b"nonsense", b"", b""),
        (rpc.UTIL, b""),
        (b"",),
        (b"WHAT",),
    ],
)
def test_an_unreadable_message_ends_its_connection_alone(
    rig: Rig, frames: tuple[bytes, ...]
) -> None:
    """The frontend is told, so that its requests go on elsewhere; the engine thread goes on."""
    rig.add("before")
    rig.tell(*frames)
    assert rig.peer.poll(5000)
    assert rig.peer.recv_multipart() == [rpc.GONE]
    assert rig.core.aborted == ["before"]
    assert rig.shim.active_requests == 0
    assert rig.ask(rpc.ADD, b"late", b"", b"") == [rpc.GONE]
    rig.hello()
    rig.add("after")
    assert rig.core.added == ["before", "after"]


def test_an_unreadable_greeting_is_refused_with_the_reason(rig: Rig) -> None:
    rig.tell(rpc.BYE)
    kind, reason = rig.ask(rpc.HELO, b"x")
    assert kind == rpc.NOPE
    assert b"unreadable" in reason


def test_draining_hands_requests_back(rig: Rig) -> None:
    rig.shim.start_drain()
    assert rig.peer.poll(5000)
    assert rig.peer.recv_multipart() == [rpc.DRAIN]
    kind, ids = rig.ask(rpc.ADD, b"late", b"", b"")
    assert (kind, rpc.decode_ids(ids)) == (rpc.BACK, ["late"])


def test_a_forced_drain_gives_up_every_request_and_says_so(rig: Rig) -> None:
    rig.add("a", 10)
    rig.add("b", 10)
    rig.shim.start_drain()
    rig.shim.hand_back()
    assert rig.peer.recv_multipart() == [rpc.DRAIN]
    kind, ids = rig.peer.recv_multipart()
    assert (kind, sorted(rpc.decode_ids(ids))) == (rpc.BACK, ["a", "b"])
    assert sorted(rig.core.aborted) == ["a", "b"]
    assert rig.shim.active_requests == 0


def test_a_frontend_that_reads_nothing_is_dropped_and_has_no_gap(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the beginning of what was sent, then that it was dropped; the engine never waits."""
    monkeypatch.setattr(rpc, "QUEUE_LIMIT", 8)
    narrow = Rig(receive_limit=1)
    try:
        narrow.add("r1", 5)
        (frontend,) = narrow.shim._frontends.values()
        sent = 0
        while not frontend.clogged and sent < 2000:
            narrow.shim._send(frontend, rpc.OUT, b"%d" % sent, bytes(1 << 20))
            sent += 1
        assert 4 < sent < 2000
        narrow.shim._send(frontend, rpc.OUT, b"later", b"")
        narrow.clock.advance(1.1)
        narrow.shim.check_silent()
        assert narrow.core.aborted == ["r1"]
        numbers = []
        while len(numbers) < sent - 1:
            assert narrow.peer.poll(5000)
            numbers.append(int(narrow.peer.recv_multipart()[1]))
        assert numbers == list(range(sent - 1))
        assert narrow.ask(rpc.PING) == [rpc.GONE]
    finally:
        narrow.close()


# ------------------------------------------------------------------ the intake thread


def test_messages_keep_their_order_on_the_way_through_the_intake(rig: Rig) -> None:
    go = rig.hold_intake()
    for name in ("a", "b"):
        rig.add(name, settle=False)
    rig.tell(rpc.UTIL, b"reset_prefix_cache", settle=False)
    rig.add("c", settle=False)
    assert rig.ask(rpc.PING) == [rpc.PONG], "the intake delays no heartbeat"
    assert (rig.core.added, rig.shim.active_requests) == ([], 3)
    go.set()
    rig.settle()
    assert rig.core.added == ["a", "b", "(reset)", "c"]


def test_a_request_that_is_aborted_in_the_intake_never_reaches_the_engine(rig: Rig) -> None:
    go = rig.hold_intake()
    for name in ("a", "picture", "c"):
        rig.add(name, settle=False)
    rig.tell(rpc.ABRT, rpc.encode_ids(["a", "picture"]), settle=False)
    rig.add("a", settle=False)
    go.set()
    rig.settle()
    assert rig.core.prepared == ["picture", "c", "a"], "vLLM's cache of inputs sees each input"
    assert (rig.core.added, rig.core.aborted) == (["c", "a"], [])


def test_requests_in_the_intake_are_handed_back_and_leave_with_their_frontend(rig: Rig) -> None:
    go = rig.hold_intake()
    rig.add("a", settle=False)
    rig.shim.start_drain()
    rig.shim.hand_back()
    assert rig.peer.recv_multipart() == [rpc.DRAIN]
    assert rig.peer.recv_multipart() == [rpc.BACK, rpc.encode_ids(["a"])]
    rig.shim.draining = False
    rig.add("b", settle=False)
    rig.tell(rpc.BYE, settle=False)
    go.set()
    rig.settle()
    assert (rig.core.added, rig.core.aborted, rig.shim.active_requests) == ([], [], 0)


def test_what_waits_in_the_intake_has_a_bound(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pullfill.decode_worker.intake.MAX_BYTES", 100)
    go = rig.hold_intake()
    rig.add("a", 20, settle=False)
    rig.add("b", 20, settle=False)
    assert rig.peer.poll(5000)
    assert rig.peer.recv_multipart() == [rpc.BACK, rpc.encode_ids(["b"])]
    go.set()
    rig.settle()
    rig.add("c", 20)
    assert rig.core.added == ["a", "c"]
