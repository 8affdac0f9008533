"""A frontend in one process, over fake decode workers or scripted stock servers. No vLLM.

    rig(FakeDecode(), …)   pool and dispatcher over real ZMQ. `Sink` gets what vLLM would get.
    forwarding("staged")   a forwarder over `FakeStock` servers, asked as an ASGI app

`FakeDecode` and `FakeStock` also stand behind real frontend processes (`frontend_http`).
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
from aiohttp import web

from pullfill import wire
from pullfill.engine import check, front_wire
from pullfill.engine.blame import Fault
from pullfill.frontend.decode_pool import WorkerPool
from pullfill.frontend.dispatch import Dispatcher
from pullfill.frontend.flight import WAITS, Waits
from pullfill.frontend.forward import sources
from pullfill.frontend.forward.layer import Layer
from pullfill.frontend.forward.protocols import protocol_of
from pullfill.frontend.forward.servers import Servers
from pullfill.frontend.forward.stock import Stock
from pullfill.frontend.request_log import RequestLog
from pullfill.frontend.routing import choice
from pullfill.frontend.routing.balancer import Balancer
from pullfill.frontend.routing.prefixes import Prefixes
from pullfill.ids import new_incarnation
from pullfill.net.this_host import host_id
from pullfill.options import ForwarderName
from pullfill.snapshot import Explained
from pullfill.wire import DecodePolicy, ExplainRecord, RouterConfig, Timings, WorkerRecord, u32
from tests.support.asgi import Client
from tests.support.fake_vllm import (
    LENGTH,
    Output,
    Outputs,
    PlainCodec,
    PrefillStats,
    Request,
    Utility,
    next_token,
)
from tests.support.listening import serving
from tests.support.said import blank
from tests.support.waiting import soon
from tests.support.workers import FakeDirectory, record

PATIENCE_S = 20.0
# Of what was sent where. A frontend has 13 MB for each role: to touch them takes longer than most
# tests.
FEW_BLOCKS = 1 << 10


# --------------------------------------------------------------------------- decode workers


@dataclass
class _Active:
    identity: bytes
    request: Request
    length: int
    total: int
    sent: int = 0


@dataclass
class FakeDecode:
    """A decode worker without an engine, in a thread. Its tokens follow from the prompt
    (`fake_vllm.answer`). `start` it. `record` is what the registry would hold.

    hold: take requests and utility calls, but answer nothing.
    step_s: pause between tokens.
    refuse: text of a NOPE to every HELO.
    migrate: answer ADD with BACK.
    stop_after: no more tokens after so many of an answer. 0: never.
    ahead_s: how far its clock is ahead of ours, as on another host.
    fatal_token: it dies of a prompt with this token.
    fatal_length: it dies once prompt and answer are so long. 0: when the prompt comes.
    killed_by: the prompt that it died of.
    prefix_block_size: as its welcome says. It never tells a block.
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
    prefix_block_size: int = 0
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
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.record = record(
            self.instance_id,
            new_incarnation(),
            model=self.model,
            host_id="elsewhere" if self.ahead_s else host_id(),
            data=f"tcp://127.0.0.1:{self.port}",
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

    def leave(self) -> None:
        """As a drain that ran out of time: DRAIN, then every request is given up."""
        self.send_raw(front_wire.DRAIN)

        def order() -> None:
            for name, active in self._active.items():
                self._send(active.identity, front_wire.BACK, front_wire.encode_list([name]))
            self._active.clear()

        self._orders.put(order)

    def send_raw(self, *frames: bytes) -> None:
        """Send anything to all frontends."""

        def order() -> None:
            for peer in self._peers:
                self._send(peer, *frames)

        self._orders.put(order)

    def say(self, out: Output) -> None:
        """Send an output, whatever has been asked for."""
        self.send_raw(front_wire.OUT, msgspec.msgpack.encode(Outputs(outputs=[out], timestamp=1.0)))

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
        fatal = self.fatal_token and self.fatal_token in prompt
        if not fatal or active.length < self.fatal_length:
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
                self._send(identity, front_wire.BACK, front_wire.encode_list([found.request_id]))
            else:
                prompt = found.prompt_token_ids or []
                active = _Active(identity, found, len(prompt), sum(prompt))
                self._active[found.request_id] = active
                self._fatal(active)
        elif kind == front_wire.ABRT:
            for request_id in front_wire.decode_ids(payload[0]):
                self.aborted.append(request_id)
                if (gone := self._active.pop(request_id, None)) is not None:
                    told = front_wire.encode_list([self._record(gone)])
                    self._send(gone.identity, front_wire.EXPL, told)
        elif kind == front_wire.PING:
            self._send(identity, front_wire.PONG)
        elif kind == front_wire.UTIL:
            call_id, method, args = msgspec.msgpack.decode(payload[0])
            self.utilities.append((method, args))
            if self.hold:
                return
            failure = "no such thing" if method == "fail" else None
            result = None if failure else (None, "0" * 32 if method == "add_lora" else True)
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
                self._finish(active, out)
            else:
                steps.setdefault(active.identity, []).append(out)
        for identity, outs in steps.items():
            self._out(identity, outs)

    def _record(self, active: _Active) -> ExplainRecord:
        return blank(
            ExplainRecord, request_id=active.request.request_id, path="local", reason="short",
            prompt_tokens=len(active.request.prompt_token_ids or []),
            decode_instance=self.instance_id, timings_ms=Timings(queue=1.5),
        )  # fmt: skip

    def _finish(self, active: _Active, out: Output) -> None:
        self._active.pop(active.request.request_id, None)
        out.finish_reason = LENGTH
        out.kv_transfer_params = {"secret": 1}
        told = front_wire.encode_list([self._record(active)])
        self._out(active.identity, [out], front_wire.LAST, told)

    def _out(self, identity: bytes, outs: list[Output], *kind: bytes) -> None:
        message = Outputs(outputs=outs, timestamp=time.monotonic() + self.ahead_s)
        self._send(identity, *(kind or (front_wire.OUT,)), msgspec.msgpack.encode(message))

    def _send(self, identity: bytes, *frames: bytes) -> None:
        self._socket.send_multipart([identity, *frames])


# --------------------------------------------------------------------------- the frontend


class Alone:
    """A `SuspectBoard` of one frontend. refused: number of deaths, by fingerprint."""

    def __init__(self) -> None:
        self.refused: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.refused)

    def left_s(self, fingerprint: str) -> float:
        return 600.0 if fingerprint in self.refused else 0.0

    def refuse_s(self) -> float:
        return 600.0

    def post(self, fingerprint: str, deaths: int, prompt_tokens: int) -> None:
        self.refused[fingerprint] = deaths


@dataclass
class Sink:
    """Collects what vLLM would be given."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    faults: dict[str, Fault] = field(default_factory=dict)
    outs: list[Any] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)

    def outputs(self, instance_id: str, outputs: Any) -> None:
        self.times.append(outputs.timestamp)
        for out in outputs.outputs:
            self.outs.append(out)
            self.tokens.setdefault(out.request_id, []).extend(out.new_token_ids)
            if out.finish_reason is not None:
                assert out.request_id not in self.finished, "ended twice"
                self.finished[out.request_id] = out.finish_reason

    def failed(self, request_id: str, message: str, fault: Fault = Fault.WORKERS) -> None:
        assert request_id not in self.failures, "failed twice"
        self.failures[request_id] = message
        self.faults[request_id] = fault

    @property
    def refused(self) -> set[str]:
        return {name for name, fault in self.faults.items() if fault is Fault.REQUEST}

    def joined(self, welcome: front_wire.DecodeWelcome) -> None: ...

    def loaded(self, instance_id: str, load: front_wire.LoadReport) -> None: ...

    def left(self, instance_id: str) -> None:
        self.gone.append(instance_id)


@dataclass
class Rig:
    directory: FakeDirectory
    pool: WorkerPool
    dispatcher: Dispatcher
    requests: RequestLog
    sink: Sink
    workers: list[FakeDecode]

    async def ready(self, count: int) -> None:
        await soon(lambda: len(self.dispatcher.workers) == count)

    async def told(self, name: str) -> Explained:
        """Return the record of a request that has ended, or will."""
        await soon(lambda: (r := self.requests.get(name)) is not None and r.state != "running")
        await self.requests.settled(name)
        found = self.requests.get(name)
        assert found is not None
        return found

    def add(self, worker: FakeDecode) -> FakeDecode:
        """Start a worker. It dies with the rig."""
        self.workers.append(worker.start())
        self.directory.put(worker.record)
        return worker


@asynccontextmanager
async def rig(
    *workers: FakeDecode,
    wait: bool = True,
    waits: Waits = WAITS,
    board: Any = None,
    prefixes: Prefixes | None = None,
    policy: DecodePolicy = DecodePolicy.ROUND_ROBIN,
) -> AsyncIterator[Rig]:
    """A frontend and its workers. wait: until all take requests."""
    directory: Any = FakeDirectory(*(worker.start().record for worker in workers))
    hello = front_wire.FrontendHello(
        frontend_instance="frontend-t", vllm_version=check.require_version(), model="m"
    )
    prefixes = prefixes or Prefixes(0)
    requests = RequestLog()
    sink: Any = Sink()
    board = Alone() if board is None else board
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "PREDICTED_BLOCKS", FEW_BLOCKS)
        balancer = Balancer(
            lambda: RouterConfig(decode_policy=policy, min_fetch_tokens=0), prefixes
        )
    dispatcher = Dispatcher(sink, PlainCodec(), balancer, requests, board, waits=waits)
    pool = WorkerPool(directory, hello, ["m"], dispatcher, prefixes)
    pool.start()
    made = Rig(directory, pool, dispatcher, requests, sink, list(workers))
    try:
        if wait:
            await made.ready(len(workers))
        yield made
    finally:
        await pool.stop()
        for worker in made.workers:
            worker.die()


# --------------------------------------------------------------------------- stock servers


# Tokens of an answer, unless the request says otherwise.
TOKENS = 4


# The blocks that prefill servers hold, by the name that the connector gives them. So a test sees
# whether the prefill that a decode server was told about has really run.
World = partial(defaultdict[str, asyncio.Event], asyncio.Event)


def events(request_id: str, body: dict[str, Any]) -> list[bytes]:
    """The stream of an answer, event by event."""
    found = []
    for number in range(body.get("max_tokens", TOKENS)):
        choice = {"index": 0, "text": f" {number}é"}
        event = {"id": f"cmpl-{request_id}", "choices": [choice]}
        found.append(b"data: " + json.dumps(event).encode() + b"\n\n")
    return [*found, b"data: [DONE]\n\n"]


def whole(request_id: str, body: dict[str, Any], params: Any = None) -> bytes:
    text = "".join(f" {number}é" for number in range(body.get("max_tokens", TOKENS)))
    answer = {
        "id": f"cmpl-{request_id}",
        "choices": [{"index": 0, "text": text}],
        "usage": {"prompt_tokens": len(str(body.get("prompt", "")))},
        "kv_transfer_params": params,
    }
    return json.dumps(answer).encode()


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"error": _told(status, text)}, status=status)


def _told(status: int, text: str) -> dict[str, Any]:
    return {"message": text, "type": "SomeError", "param": None, "code": status}


class FakeStock:
    """A stock vLLM server with a KV connector, as read from the connectors' sources. Change its
    fields to make it fail.

    connector: the protocol, or empty: it has none.
    refuse: status and text of its answers to requests. late: a stream begins with it instead.
    breaks: it closes the connection after so many events; 0: at once.
    stalls: it answers no request until this is set.
    stops: it sends nothing after the first event of a stream.
    leaves_out: what its parameters lack.
    key: an API key that it asks for, or empty.
    alive: /health answers. metrics_status: of /metrics. models: `data` of its /v1/models.
    requests: (path, headers, body) of each request. remote: how many came with blocks.
    open: requests that it works at. left: requests whose client has left."""

    def __init__(
        self, world: dict[str, asyncio.Event], connector: str = "nixl", *, root: str = "/m"
    ) -> None:
        self.world, self.connector = world, connector
        self.models: Any = [{"id": "m", "root": root}]
        self.refuse: tuple[int, str] | None = None
        self.late = False
        self.blocks: Any = [[1, 2]]
        self.breaks: int | None = None
        self.stalls: asyncio.Event | None = None
        self.stops = False
        self.key = self.leaves_out = ""
        self.alive = True
        self.metrics_status = 200
        self.metrics = "vllm:num_requests_running{} 0.0\n"
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.remote = self.open = self.left = 0
        self.url = ""

    @property
    def kv(self) -> str:
        return self.url.removeprefix("http://")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeStock]:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._get)
        app.router.add_post("/{path:.*}", self._request)
        async with serving(app, cancelling=True) as self.url:
            yield self

    async def _get(self, request: web.Request) -> web.Response:
        if request.path == "/health":
            return web.Response(status=200 if self.alive else 503)
        if request.path == "/metrics":
            return web.Response(text=self.metrics, status=self.metrics_status)
        if request.path == "/query":
            return web.json_response({"0": {"engine_id": "engine-7", "worker_addr": {}}})
        if self._locked(request):
            return _error(401, "Unauthorized")
        return web.json_response({"data": self.models})

    def _locked(self, request: web.Request) -> bool:
        return bool(self.key) and request.headers.get("authorization") != f"Bearer {self.key}"

    async def _request(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        if self._locked(request):
            return _error(401, "Unauthorized")
        try:
            body = json.loads(raw)
        except ValueError:
            return _error(400, "no JSON")
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((request.path, headers, body))
        self.open += 1
        try:
            return await self._answer(request, headers["x-request-id"], body)
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise
        finally:
            self.open -= 1

    async def _answer(
        self, request: web.Request, request_id: str, body: dict[str, Any]
    ) -> web.StreamResponse:
        if self.refuse is not None:
            if self.late and body.get("stream"):
                first = json.dumps({"error": _told(*self.refuse)})
                text = f"data: {first}\n\ndata: [DONE]\n\n"
                return web.Response(text=text, content_type="text/event-stream")
            return _error(*self.refuse)
        if self.breaks == 0:
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(60)
        if self.stalls is not None:
            await self.stalls.wait()
        params = await self._connect(request_id, body.get("kv_transfer_params") or {})
        kind = "application/json"
        if not body.get("stream"):
            return web.Response(body=whole(request_id, body, params), content_type=kind)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        for number, event in enumerate(events(request_id, body)):
            if number == self.breaks:
                await answer.write(event[:9])
                await asyncio.sleep(0.01)
                assert request.transport is not None
                request.transport.abort()
                await asyncio.sleep(60)
            await answer.write(event)
            await asyncio.sleep(60 if self.stops else 0)
        await answer.write_eof()
        return answer

    async def _connect(self, request_id: str, params: dict[str, Any]) -> Any:
        """What the connector does before the answer. Returns its parameters, if it has any."""
        if not self.connector:
            return None
        if self.connector == "p2p" and not request_id.startswith("___prefill_addr_"):
            # P2pNcclConnector takes the KV of each prompt to be elsewhere.
            await asyncio.Event().wait()
        name = request_id if self.connector == "p2p" else params.get("transfer_id", request_id)
        if params.get("do_remote_decode"):
            self.world[name].set()
            if self.connector != "nixl":
                return None
            told = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": self.blocks,
                "remote_engine_id": "e",
                "remote_request_id": name,
                "remote_host": "127.0.0.1",
                "remote_port": 5600,
                "tp_size": 1,
            }
            return {name: value for name, value in told.items() if name != self.leaves_out}
        if params.get("do_remote_prefill"):
            if self.connector == "mooncake":
                assert params["remote_engine_id"] == "engine-7"
                assert params["remote_bootstrap_addr"].startswith("http://127.0.0.1:")
            await self.world[params.get("remote_request_id", name)].wait()
            self.remote += 1
        return None


class FakeApp:
    """Stands for vLLM's app over decode workers: it answers 200 to each request."""

    def __init__(self) -> None:
        self.requests = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests += 1
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


@dataclass
class ForwardRig:
    """share: what `router.stock_share` says. workers: whether there are decode workers."""

    prefill: list[FakeStock]
    decode: list[FakeStock]
    servers: Servers
    stock: Stock
    app: FakeApp
    requests: RequestLog
    policy: DecodePolicy = DecodePolicy.ROUND_ROBIN
    share: float = 1.0
    workers: bool = False
    layer: Layer = field(init=False)

    def __post_init__(self) -> None:
        self.layer = Layer(
            self.app, lambda: self.workers, self.stock, lambda: self.share, self.requests
        )

    @property
    def all(self) -> list[FakeStock]:
        return [*self.prefill, *self.decode]

    def begin(
        self, body: Any = None, *, path: str = "/v1/completions", headers: Any = (), **fields: Any
    ) -> Client:
        """Send a request."""
        body = body or {"model": "m", "prompt": "hello", **fields}
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return Client(self.layer, path, headers=headers).say(raw)

    async def ask(self, body: Any = None, **more: Any) -> Client:
        """Send a request, and wait for its end."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.begin(body, **more).ended()

    async def idle(self) -> None:
        """Wait until no server works at anything."""
        await soon(lambda: not any(fake.open for fake in self.all))

    async def states(self, **wanted: int) -> None:
        """Wait until so many servers are in each state."""

        def now() -> bool:
            found = [s.state for s in self.servers.known.values()]
            return all(found.count(state) == count for state, count in wanted.items())

        await soon(now)


@asynccontextmanager
async def forwarding(
    name: str = "staged",
    protocol: str = "nixl",
    *,
    prefill: int = 1,
    decode: int = 1,
    silence_s: float = 10.0,
    known: bool = True,
    wait: bool = True,
    key: str = "",
    look_s: float = 0.02,
) -> AsyncIterator[ForwardRig]:
    """A forwarder with so many servers. known: they are registered. wait: until they are ready.

    key: the API key that it has for them. look_s: how often it looks at them."""
    async with AsyncExitStack() as stack:
        world = World()
        fakes = [FakeStock(world, protocol) for _ in range(prefill + decode)]
        for fake in fakes:
            await stack.enter_async_context(fake.running())
        headers = {"authorization": f"Bearer {key}"} if key else None
        session = aiohttp.ClientSession(auto_decompress=False, headers=headers)
        stack.push_async_callback(session.close)
        spoken = protocol_of(protocol)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(choice, "PREDICTED_BLOCKS", FEW_BLOCKS)
            servers = Servers(
                session, ("m",), "/m", spoken, lambda: made.policy,
                look_s=look_s, answer_s=0.5,
            )  # fmt: skip
        stack.push_async_callback(servers.close)
        stock = Stock(ForwarderName(name), servers, silence_s)
        made = ForwardRig(fakes[:prefill], fakes[prefill:], servers, stock, FakeApp(), RequestLog())
        if known:
            found = [sources.make("prefill", f.url, f.kv) for f in made.prefill]
            servers.set(found + [sources.make("decode", f.url, f.kv) for f in made.decode])
        if known and wait:
            await made.states(ready=len(fakes))
        yield made
        await made.idle()
