"""A decode worker's request server over a real ROUTER, one frontend of it, and an engine that
records."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import zmq

from pullfill import wire
from pullfill.decode_worker.request_server import RequestServer
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.engine import front_wire
from pullfill.engine.adapters import Adapters
from pullfill.errors import BadMessage
from pullfill.worker.engine_loop import EngineLoop
from tests.support.fakes import FakeClock
from tests.support.said import blank

LIMIT = 100


class Codec:
    """Requests travel as `id`, prompt; outputs as they are.

    params, arrival_time, lora_request: of all requests."""

    params: Any = None
    arrival_time = 0.0
    lora_request: Any = None

    def request(self, frames: list[Any]) -> Any:
        request_id = frames[0].bytes.decode()
        if request_id.startswith("nonsense"):
            raise BadMessage("nonsense")
        request = SimpleNamespace(
            request_id=request_id,
            prompt_token_ids=None,
            mm_features=request_id.startswith("picture"),
            num_tokens=len(frames[1].bytes) // 4,
            resumable=request_id.startswith("stream"),
            client_index=0,
            arrival_time=self.arrival_time,
            sampling_params=self.params,
            _all_token_ids=[],
            block_hashes=[],
            lora_request=self.lora_request,
        )
        return request, memoryview(frames[1].bytes)

    def utility(self, frames: list[Any]) -> Any:
        if not (method := frames[0].bytes.decode()):
            raise BadMessage("nonsense")
        return 1, method, []

    def encode(self, obj: Any) -> list[bytes]:
        return [str(obj).encode()]


class FakeCore:
    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(speculative_config=None)
        self.prepared: list[str] = []
        self.added: list[str] = []
        self.arrivals: list[float] = []
        self.aborted: list[str] = []
        self.request_block_hasher = None

    def preprocess_add_request(self, request: Any) -> tuple[Any, int]:
        self.prepared.append(request.request_id)
        return request, 0

    def add_request(self, request: Any, wave: int) -> None:
        self.added.append(request.request_id)
        self.arrivals.append(request.arrival_time)

    def reset_prefix_cache(self, *_: Any) -> bool:
        self.added.append("(reset)")
        return True

    def abort_requests(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


def engine_loop(
    core: Any, submit: Callable[..., object], register: Any = lambda *_: None
) -> EngineLoop:
    """An engine loop around a core that records. submit: of its engine thread."""
    host: Any = SimpleNamespace(submit=submit, enter=submit, register=register, core=core)
    host.wake, host.use, host.waiting_for_blocks = lambda: None, None, None
    life: Any = None  # it never ends
    return EngineLoop(host, life, Adapters())


class Rig:
    """A request server and one frontend connected to it. Its engine loop turns in `tell` and
    `settle`."""

    def __init__(self, receive_limit: int = 0) -> None:
        self.core = FakeCore()
        self.clock = FakeClock()
        self.follow: Callable[..., object] = lambda *told: None
        self.todo: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.loop = engine_loop(self.core, lambda work, wake=True: self.todo.put(work))
        welcome = blank(front_wire.DecodeWelcome, vllm_version="0.32.0", max_model_len=LIMIT)
        self.request_server = RequestServer(
            self.loop, RequestTraces("decode-1"), welcome=lambda _: welcome,
            models=["m"], clock=self.clock, follow=lambda *told: self.follow(*told),
        )  # fmt: skip
        self.request_server.bind("127.0.0.1")
        self.peer = zmq.Context.instance().socket(zmq.DEALER)
        self.peer.setsockopt(zmq.LINGER, 0)
        self.peer.setsockopt(zmq.RCVHWM, receive_limit)
        self.peer.connect(self.request_server.address)
        self.hello()

    def hello(self) -> None:
        message = front_wire.FrontendHello(frontend_instance="f", vllm_version="0.32.0", model="m")
        assert self.ask(front_wire.HELO, wire.encode(message))[0] == front_wire.HELO

    def tell(self, *frames: bytes, settle: bool = True) -> None:
        self.peer.send_multipart(frames)
        assert self.request_server._socket.poll(5000)
        self.request_server.receive()
        if settle:
            self.settle()

    def settle(self) -> None:
        """Until everything that was put into the intake so far is with the engine."""
        last: list[bool] = []

        def barrier() -> Callable[[], None]:
            return lambda: last.append(True)

        intake = self.request_server.intake
        intake.put(barrier, 0)
        while not last:
            self.todo.get(timeout=5)()
        # Its thread notes a moment later that it is idle.
        intake.thread.wait()

    def hold_intake(self) -> threading.Event:
        """The intake thread does nothing until the event is set."""
        held, go = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            go.wait(5)

        self.request_server.intake.put(hold, 0)
        assert held.wait(5)
        return go

    def add(self, request_id: str, prompt: int = 10, *, settle: bool = True) -> None:
        self.tell(front_wire.ADD, request_id.encode(), bytes(4 * prompt), b"", settle=settle)

    def ask(self, *frames: bytes) -> list[bytes]:
        self.tell(*frames, settle=frames[0] == front_wire.ADD)
        assert self.peer.poll(5000), "no answer"
        answer: list[bytes] = self.peer.recv_multipart()
        return answer

    def close(self) -> None:
        self.peer.close(0)
        self.request_server.close()
