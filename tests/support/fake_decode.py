"""A decode worker without an engine: speaks engine/front_wire.py, answers with predictable
tokens.

`FakeDecode` runs in a thread and can be told to hold, drain, give up, hang or die. It decodes and
makes vLLM's frames with mirror structs (positions as in the pinned vLLM), so a test that uses it
does not import vLLM; `PlainCodec` is the frontend's end of the same, for tests without vLLM.

The tokens of a request are `token_at(prompt, i)`, so that a test can tell whose they are.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from pullfill import wire
from pullfill.engine import check, front_wire
from pullfill.ids import new_incarnation
from pullfill.net.this_host import host_id
from pullfill.wire import ExplainRecord, Timings, WorkerRecord, WorkerState, u32
from tests.support.fake_vllm import (
    LENGTH,
    Output,
    Outputs,
    PrefillStats,
    Request,
    Utility,
    next_token,
)


@dataclass
class _Active:
    identity: bytes
    request: Request
    length: int
    total: int
    sent: int = 0


@dataclass
class FakeDecode:
    """One fake worker. `start`, then `record` is what the registry would hold.

    hold: take requests and utility calls, but answer nothing.
    step_s: pause between tokens.
    refuse: text of a NOPE to every HELO.
    migrate: answer ADD with BACK.
    stop_after: no more tokens after so many of an answer. 0: never.
    ahead_s: how far its clock is ahead of ours, as on another host.
    fatal_token: it dies of a prompt with this token.
    fatal_length: it dies once prompt and answer are so long. 0: when the prompt comes.
    killed_by: the prompt that it died of.
    load: what its welcome says of its load.
    prefix_block_size: as its welcome says. It never tells a block.
    adapter: digest of the files of all LoRA adapters.
    """

    instance_id: str = "decode-fake"
    model: str = "m"
    hold: bool = False
    step_s: float = 0.0
    refuse: str = ""
    migrate: bool = False
    stop_after: int = 0
    ahead_s: float = 0.0
    fatal_token: int = 0
    fatal_length: int = 0
    load: front_wire.LoadReport | None = None
    prefix_block_size: int = 0
    adapter: str = "0" * 32
    max_model_len: int = 4096
    cached_tokens: int = 0
    added: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    utilities: list[tuple[str, list[Any]]] = field(default_factory=list)
    byes: int = 0
    killed_by: list[int] = field(default_factory=list)
    record: WorkerRecord = field(init=False)

    def __post_init__(self) -> None:
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._active: dict[str, _Active] = {}
        self._peers: set[bytes] = set()
        self._context = zmq.Context()
        self._socket: Any = self._context.socket(zmq.ROUTER)
        front_wire.set_options(self._socket)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.record = WorkerRecord(
            instance_id=self.instance_id,
            incarnation=new_incarnation(),
            role="decode",
            state=WorkerState.READY,
            model=self.model,
            host="127.0.0.1",
            host_id="elsewhere" if self.ahead_s else host_id(),
            pid=1,
            started_at=0.0,
            data=f"tcp://127.0.0.1:{port}",
        )
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> FakeDecode:
        self._thread.start()
        return self

    @property
    def active(self) -> list[_Active]:
        """Requests that are being answered now."""
        return list(self._active.values())

    def die(self) -> None:
        """As SIGKILL looks from outside: the connection breaks, nothing is said."""
        self._stopping = True
        if self._thread.is_alive():
            self._thread.join(5)
        self._socket.close(0)
        self._context.term()

    def drain(self) -> None:
        """Send DRAIN to all frontends."""
        self.send_raw(front_wire.DRAIN)

    def leave(self) -> None:
        """As a drain that ran out of time: DRAIN, then every request is given up."""
        self.drain()

        def order() -> None:
            for active in list(self._active.values()):
                self._send(
                    active.identity,
                    front_wire.BACK,
                    front_wire.encode_ids([active.request.request_id]),
                )
            self._active.clear()

        self._orders.put(order)

    def send_raw(self, *frames: bytes) -> None:
        """Send anything to all frontends."""

        def order() -> None:
            for peer in self._peers:
                self._send(peer, *frames)

        self._orders.put(order)

    # ---------------------------------------------------------------- thread

    def _run(self) -> None:
        next_step = 0.0
        while not self._stopping:
            wait = 1 if self._active and not self.hold else 5
            if self._socket.poll(wait):
                identity, kind, *payload = self._socket.recv_multipart()
                self._dispatch(identity, kind, payload)
            while not self._orders.empty():
                self._orders.get()()
            if not self.hold and time.monotonic() >= next_step and not self._stopping:
                next_step = time.monotonic() + self.step_s
                self._step()
        if self.killed_by:
            self._socket.close(0)

    def _fatal(self, active: _Active) -> bool:
        prompt = active.request.prompt_token_ids or []
        if not self.fatal_token or self.fatal_token not in prompt:
            return False
        if active.length < self.fatal_length:
            return False
        self.killed_by = prompt
        self._stopping = True
        return True

    def _dispatch(self, identity: bytes, kind: bytes, payload: list[bytes]) -> None:
        if kind == front_wire.HELO:
            self._greet(identity)
        elif kind == front_wire.ADD:
            found = msgspec.msgpack.decode(payload[3], type=Request)
            found.prompt_token_ids = u32.unpack(payload[1]) or found.prompt_token_ids
            self.added.append(found)
            if self.migrate:
                self._send(identity, front_wire.BACK, front_wire.encode_ids([found.request_id]))
            else:
                prompt = found.prompt_token_ids or []
                active = _Active(identity, found, len(prompt), sum(prompt))
                self._active[found.request_id] = active
                self._fatal(active)
        elif kind == front_wire.ABRT:
            for request_id in front_wire.decode_ids(payload[0]):
                self.aborted.append(request_id)
                if (gone := self._active.pop(request_id, None)) is not None:
                    told = front_wire.encode_explain([self._record(gone)])
                    self._send(gone.identity, front_wire.EXPL, told)
        elif kind == front_wire.PING:
            self._send(identity, front_wire.PONG)
        elif kind == front_wire.UTIL:
            call_id, method, args = msgspec.msgpack.decode(payload[0])
            self.utilities.append((method, args))
            if self.hold:
                return
            failure = "no such thing" if method == "fail" else None
            result = None if failure else (None, self.adapter if method == "add_lora" else True)
            answer = Outputs(timestamp=1.0, utility_output=Utility(call_id, failure, result))
            self._send(identity, front_wire.OUT, msgspec.msgpack.encode(answer))
        elif kind == front_wire.BYE:
            self.byes += 1
            self._peers.discard(identity)

    def _greet(self, identity: bytes) -> None:
        if self.refuse:
            self._send(identity, front_wire.NOPE, self.refuse.encode())
            return
        self._peers.add(identity)
        welcome = front_wire.DecodeWelcome(
            decode_instance=self.instance_id,
            vllm_version=check.require_version(),
            max_model_len=self.max_model_len,
            num_gpu_blocks=100,
            block_size=16,
            supported_tasks=["generate"],
            load=self.load,
            prefix_block_size=self.prefix_block_size,
        )
        self._send(identity, front_wire.HELO, wire.encode(welcome))

    def _step(self) -> None:
        """One token for each active request, as one message per frontend."""
        steps: dict[bytes, list[Output]] = {}
        for active in self.active:
            if self.stop_after and active.sent == self.stop_after:
                continue
            if self._fatal(active):
                return
            params = active.request.sampling_params or {}
            token = next_token(active.total, active.length)
            active.total, active.length, active.sent = (
                active.total + token, active.length + 1, active.sent + 1,
            )  # fmt: skip
            done = active.sent >= params.get("max_tokens", 16)
            out = Output(active.request.request_id, [token])
            if active.sent == 1:
                out.prefill_stats = PrefillStats(
                    num_prompt_tokens=len(active.request.prompt_token_ids or []),
                    num_cached_tokens=self.cached_tokens,
                    num_local_cached_tokens=self.cached_tokens,
                )
            if done:
                self._finish(active, [token], LENGTH, out)
            else:
                steps.setdefault(active.identity, []).append(out)
        for identity, outs in steps.items():
            self._out(identity, outs)

    def _record(self, active: _Active) -> ExplainRecord:
        return ExplainRecord(
            request_id=active.request.request_id,
            path="local",
            reason="short",
            prompt_tokens=len(active.request.prompt_token_ids or []),
            prefix_hit_tokens=0,
            remote_tokens=0,
            decode_instance=self.instance_id,
            timings_ms=Timings(queue=1.5),
        )

    def _finish(
        self, active: _Active, tokens: list[int], reason: int, out: Output | None = None
    ) -> None:
        request_id = active.request.request_id
        self._active.pop(request_id, None)
        out = out or Output(request_id, tokens)
        out.finish_reason = reason
        out.kv_transfer_params = {"secret": 1}
        told = front_wire.encode_explain([self._record(active)])
        self._out(active.identity, [out], front_wire.LAST, told)

    def _out(self, identity: bytes, outs: list[Output], *kind: bytes) -> None:
        message = Outputs(outputs=outs, timestamp=time.monotonic() + self.ahead_s)
        self._send(identity, *(kind or (front_wire.OUT,)), msgspec.msgpack.encode(message))

    def _send(self, identity: bytes, *frames: bytes) -> None:
        self._socket.send_multipart([identity, *frames])


class FakeDirectory:
    """The registry's view, set by hand."""

    def __init__(self, *records: WorkerRecord) -> None:
        self.records = {record.instance_id: record for record in records}
        self._callbacks: list[Callable[[Any, Any], None]] = []

    def workers(self, role: str) -> dict[str, WorkerRecord]:
        return {k: r for k, r in self.records.items() if r.role == role}

    def subscribe(self, callback: Callable[[Any, Any], None]) -> None:
        self._callbacks.append(callback)

    def put(self, record: WorkerRecord) -> None:
        self.records[record.instance_id] = record
        self._notify(record)

    def remove(self, instance_id: str) -> None:
        self._notify(self.records.pop(instance_id))

    def _notify(self, record: WorkerRecord) -> None:
        for callback in self._callbacks:
            callback(None, record)
