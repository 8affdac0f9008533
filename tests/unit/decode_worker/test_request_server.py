"""The decode worker's end of the frontend wire, over a real ROUTER; the engine is a recorder."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest

from pullfill import wire
from pullfill.decode_worker.request_server import RequestServer
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.decode_worker.rules import Decision, Situation
from pullfill.engine import front_wire, requests
from pullfill.errors import NotNow
from tests.support.fake_vllm import STOP, Output, Outputs
from tests.support.request_server_rig import Codec, Rig


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Its messages are written and read without vLLM."""
    monkeypatch.setattr(front_wire, "WorkerCodec", Codec)
    monkeypatch.setattr(requests, "error_outputs", lambda name, why, fault: f"error {name} {fault}")
    monkeypatch.setattr(requests, "utility_outputs", lambda *told: told)
    rig = Rig()
    yield rig
    rig.close()


def test_the_port_asked_for(rig: Rig) -> None:
    host, _, port = rig.request_server.address.rpartition(":")
    assert host == "tcp://127.0.0.1"
    other = RequestServer(
        rig.loop, RequestTraces("d"), welcome=lambda _: None, models=[]  # type: ignore[arg-type,return-value]
    )  # fmt: skip
    with pytest.raises(NotNow, match="cannot listen for frontends on"):
        other.bind("127.0.0.1", int(port))
    other.close()
    rig.request_server.close()
    rig.request_server.bind("127.0.0.1", int(port))
    assert rig.request_server.address == f"tcp://127.0.0.1:{port}"


def test_a_request_arrives_by_this_hosts_clock(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's scheduler compares arrivals of requests that come from several frontends."""
    monkeypatch.setattr(rig.request_server._codec, "arrival_time", time.time() - 90)
    before = time.time()
    rig.add("a")
    assert before <= rig.core.arrivals[0] <= time.time()


@pytest.mark.parametrize(("name", "prompt"), [(b"long", 100), (b"stream", 5)])
def test_what_does_not_fit_ends_with_an_error_and_never_reaches_the_engine(
    rig: Rig, name: bytes, prompt: int
) -> None:
    kind, payload = rig.ask(front_wire.ADD, name, bytes(4 * prompt), b"")
    assert (kind, payload) == (front_wire.OUT, b"error " + name + b" request")
    assert rig.core.added == []
    assert rig.request_server.active_requests == 0


@pytest.mark.essential
def test_the_same_id_twice_is_answered_and_added_once(rig: Rig) -> None:
    rig.add("a", 10)
    assert rig.ask(front_wire.ADD, b"a", b"", b"") == [front_wire.OUT, b"error a ours"]
    assert rig.core.added == ["a"]


def test_a_frontend_dropped_as_silent_is_told_when_it_speaks_again(rig: Rig) -> None:
    rig.add("a", 10)
    rig.clock.advance(front_wire.SILENCE_S + 1)
    rig.request_server.check_silent()
    assert rig.core.aborted == ["a"]
    assert rig.ask(front_wire.PING) == [front_wire.GONE]
    assert rig.ask(front_wire.ADD, b"b", b"", b"") == [front_wire.GONE]
    assert rig.core.added == ["a"]
    rig.hello()
    rig.add("c", 10)
    assert rig.core.added == ["a", "c"]


@pytest.mark.parametrize(
    "frames",
    [
        (front_wire.HELO,),
        (front_wire.HELO, b"x"),
        (front_wire.ABRT,),
        (front_wire.ADD, b"nonsense", b"", b""),
        (front_wire.UTIL, b""),
        (front_wire.FOLW, b"nonsense"),
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
    assert rig.peer.recv_multipart() == [front_wire.GONE]
    assert rig.core.aborted == ["before"]
    assert rig.request_server.active_requests == 0
    assert rig.ask(front_wire.ADD, b"late", b"", b"") == [front_wire.GONE]
    rig.hello()
    rig.add("after")
    assert rig.core.added == ["before", "after"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (None, ["unreadable"]),
        ({"vllm_version": "0.31.0"}, ["vllm_version", "0.31.0", "0.32.0"]),
        ({"model": "x"}, ["model differs"]),
        ({"vllm_version": "0.32.0+cpu"}, []),
    ],
)
def test_a_greeting_that_does_not_fit_is_refused_with_the_reason(
    rig: Rig, changes: dict[str, str] | None, words: list[str]
) -> None:
    rig.tell(front_wire.BYE)
    base = front_wire.FrontendHello(frontend_instance="f", vllm_version="0.32.0", model="m")
    hello = b"x" if changes is None else wire.encode(msgspec.structs.replace(base, **changes))
    kind, reason = rig.ask(front_wire.HELO, hello)
    assert kind == (front_wire.NOPE if words else front_wire.HELO)
    assert all(word in front_wire.text_of(reason) for word in words)
    assert front_wire.text_of(b"no\x1b[31m \xff" + b"x" * 9999).isprintable()


def test_a_full_intake_hands_a_request_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pullfill.decode_worker.request_server.MAX_BYTES", 100)
    go = rig.hold_intake()
    for name in (b"a", b"b"):
        rig.tell(front_wire.ADD, name, bytes(80), b"", settle=False)
    kind, ids = rig.peer.recv_multipart()
    assert (kind, front_wire.decode_ids(ids)) == (front_wire.BACK, ["b"])
    go.set()
    rig.settle()
    assert rig.core.added == ["a"]


def test_draining_hands_new_requests_back_and_a_forced_drain_all(rig: Rig) -> None:
    rig.add("a", 10)
    rig.add("b", 10)
    rig.request_server.start_drain()
    assert rig.peer.poll(5000)
    assert rig.peer.recv_multipart() == [front_wire.DRAIN]
    kind, ids = rig.ask(front_wire.ADD, b"late", b"", b"")
    assert (kind, front_wire.decode_ids(ids)) == (front_wire.BACK, ["late"])
    rig.request_server.migrate()
    kind, ids = rig.peer.recv_multipart()
    assert (kind, sorted(front_wire.decode_ids(ids))) == (front_wire.BACK, ["a", "b"])
    assert sorted(rig.core.aborted) == ["a", "b"]
    assert rig.request_server.active_requests == 0


def test_a_frontend_that_reads_nothing_is_dropped_and_has_no_gap(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the beginning of what was sent, then that it was dropped; the engine never waits."""
    monkeypatch.setattr(front_wire, "QUEUE_LIMIT", 8)
    narrow = Rig(receive_limit=1)
    try:
        narrow.add("r1", 5)
        (frontend,) = narrow.request_server._frontends.values()
        sent = 0
        while not frontend.clogged and sent < 2000:
            narrow.request_server._send(frontend, front_wire.OUT, b"%d" % sent, bytes(1 << 20))
            sent += 1
        assert 4 < sent < 2000
        narrow.request_server._send(frontend, front_wire.OUT, b"later", b"")
        narrow.request_server.check_silent()
        assert narrow.core.aborted == ["r1"]
        numbers = []
        while len(numbers) < sent - 1:
            assert narrow.peer.poll(5000)
            numbers.append(int(narrow.peer.recv_multipart()[1]))
        assert numbers == list(range(sent - 1))
        assert narrow.ask(front_wire.PING) == [front_wire.GONE]
    finally:
        narrow.close()


# ------------------------------------------------------------------ the intake thread


def test_messages_keep_their_order_on_the_way_through_the_intake(rig: Rig) -> None:
    go = rig.hold_intake()
    for name in ("a", "b"):
        rig.add(name, settle=False)
    rig.tell(front_wire.UTIL, b"reset_prefix_cache", settle=False)
    rig.add("c", settle=False)
    assert rig.ask(front_wire.PING) == [front_wire.PONG], "the intake delays no heartbeat"
    assert (rig.core.added, rig.request_server.active_requests) == ([], 3)
    go.set()
    rig.settle()
    assert rig.core.added == ["a", "b", "(reset)", "c"]


def test_a_request_that_is_aborted_in_the_intake_never_reaches_the_engine(rig: Rig) -> None:
    go = rig.hold_intake()
    for name in ("a", "b", "c"):
        rig.add(name, settle=False)
    rig.tell(front_wire.ABRT, front_wire.encode_list(["a", "b"]), settle=False)
    rig.add("a", settle=False)
    go.set()
    rig.settle()
    assert rig.core.prepared == ["c", "a"]
    assert (rig.core.added, rig.core.aborted) == (["c", "a"], [])


def test_the_end_of_a_request_brings_its_trace_in_the_same_message(rig: Rig) -> None:
    situation = Situation(10, 0)
    rig.request_server.traces.decided("r", situation, Decision(False, "short"))
    end = Output("r", [7], finish_reason=STOP)
    rig.request_server.send_outputs({requests.FRONTENDS: Outputs(outputs=[end])})
    assert rig.peer.poll(5000)
    kind, trace, _ = rig.peer.recv_multipart()
    assert kind == front_wire.LAST
    [record] = front_wire.decode_explain(trace)
    assert (record.request_id, record.reason) == ("r", "short")
    assert not rig.peer.poll(50)


def test_statistics_of_a_step_without_outputs_reach_a_frontend(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gives them to client 0, which may be gone."""
    monkeypatch.setattr(rig.request_server._codec, "encode", lambda batch: [b"counts"])
    rig.tell(front_wire.BYE)
    rig.hello()
    rig.request_server.send_outputs({0: Outputs(scheduler_stats="counts")})
    assert rig.peer.recv_multipart() == [front_wire.OUT, b"counts"]
