"""The decode worker's end of the frontend wire, over a real ROUTER; the engine is a recorder."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from pullfill import wire
from pullfill.decode_worker import shim as shims
from pullfill.decode_worker.shim import FrontendShim
from pullfill.decode_worker.story import Stories
from pullfill.engine import rpc
from pullfill.errors import BadMessage
from tests.support.fakes import FakeClock

LIMIT = 100


class _Codec:
    """Requests travel as `id`, prompt; outputs as they are."""

    def request(self, frames: list[Any]) -> Any:
        request_id = frames[0].bytes.decode()
        if request_id.startswith("nonsense"):
            raise BadMessage("nonsense")
        request = SimpleNamespace(
            request_id=request_id,
            prompt_token_ids=None,
            mm_features=request_id.startswith("picture"),
            resumable=request_id.startswith("stream"),
            client_index=0,
            sampling_params=None,
            _all_token_ids=[],
            block_hashes=[],
        )
        return request, memoryview(frames[1].bytes)

    def utility(self, frames: list[Any]) -> Any:
        if not (method := frames[0].bytes.decode()):
            raise BadMessage("nonsense")
        return 1, method, []

    def encode(self, obj: Any) -> list[bytes]:
        return [str(obj).encode()]


class _Core:
    def __init__(self) -> None:
        self.prepared: list[str] = []
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.request_block_hasher = None

    def preprocess_add_request(self, request: Any) -> tuple[Any, int]:
        self.prepared.append(request.request_id)
        return request, 0

    def add_request(self, request: Any) -> None:
        self.added.append(request.request_id)

    def reset_prefix_cache(self) -> bool:
        self.added.append("(reset)")
        return True

    def abort_requests(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


class Rig:
    """A shim and one frontend connected to it. Its engine loop turns in `tell` and `settle`."""

    def __init__(self, receive_limit: int = 0) -> None:
        self.core = _Core()
        self.clock = FakeClock()
        self.todo: queue.SimpleQueue[Callable[[Any], None]] = queue.SimpleQueue()
        host: Any = SimpleNamespace(
            core=self.core, register=lambda *_: None, submit=self.todo.put, stepping=False
        )
        welcome = rpc.DecodeWelcome(
            decode_instance="decode-1", incarnation="i0", vllm_version="0.32.0",
            max_model_len=LIMIT, num_gpu_blocks=1, block_size=1, max_num_seqs=1,
            max_num_batched_tokens=1, supported_tasks=[],
        )  # fmt: skip
        self.shim = FrontendShim(
            host, Stories("decode-1"), welcome=lambda: welcome, models=["m"], clock=self.clock
        )
        self.shim.bind("127.0.0.1")
        self.peer = zmq.Context.instance().socket(zmq.DEALER)
        self.peer.setsockopt(zmq.LINGER, 0)
        self.peer.setsockopt(zmq.RCVHWM, receive_limit)
        self.peer.connect(self.shim.address)
        self.hello()

    def hello(self) -> None:
        message = rpc.FrontendHello(frontend_instance="f", vllm_version="0.32.0", model="m")
        assert self.ask(rpc.HELO, wire.encode(message))[0] == rpc.HELO

    def tell(self, *frames: bytes, settle: bool = True) -> None:
        self.peer.send_multipart(frames)
        assert self.shim._socket.poll(5000)
        self.shim.receive()
        if settle:
            self.settle()

    def settle(self) -> None:
        """Until everything that was put into the intake so far is with the engine."""
        last: list[bool] = []

        def barrier() -> Generator[None, None, Callable[[], None]]:
            yield
            return lambda: last.append(True)

        self.shim.intake.put(barrier(), 0)
        while not last:
            self.todo.get(timeout=5)(self.core)

    def hold_intake(self) -> threading.Event:
        """The intake thread does nothing until the event is set."""
        held, go = threading.Event(), threading.Event()

        def hold() -> Generator[None, None, None]:
            held.set()
            go.wait(5)
            yield

        self.shim.intake.put(hold(), 0)
        assert held.wait(5)
        return go

    def add(self, request_id: str, prompt: int = 10, *, settle: bool = True) -> None:
        self.tell(rpc.ADD, request_id.encode(), bytes(4 * prompt), b"", settle=settle)

    def ask(self, *frames: bytes) -> list[bytes]:
        self.tell(*frames, settle=frames[0] == rpc.ADD)
        assert self.peer.poll(5000), "no answer"
        answer: list[bytes] = self.peer.recv_multipart()
        return answer

    def close(self) -> None:
        self.peer.close(0)
        self.shim.close()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(rpc, "WorkerCodec", _Codec)
    monkeypatch.setattr(
        shims.vllm_outputs, "error_outputs", lambda name, why, fault: f"error {name} {fault}"
    )
    monkeypatch.setattr(shims.vllm_outputs, "utility_outputs", lambda *told: told)
    rig = Rig()
    yield rig
    rig.close()


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
