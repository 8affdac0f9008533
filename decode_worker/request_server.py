"""Serves frontends: the ROUTER end of engine/front_wire.py, on the engine thread.

The engine thread itself receives messages between steps and sends the outputs of each step, so no
token waits for another thread. The intake thread prepares requests that are not small: decoding,
our checks and vLLM's block hashes of a prompt of 128k tokens take 50 ms. It takes utility calls
too, which keeps their order. Nobody waits for a preparation under way when the process ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from pullfill import wire
from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.decode_worker.prefix.block_events import Send
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.engine import front_wire, request_limits, requests, speculation
from pullfill.engine.blame import Fault, explained, fault_of
from pullfill.errors import BadMessage, NotNow
from pullfill.net.curve import CurveAuth
from pullfill.net.security import ClusterKey
from pullfill.runtime import failpoints, log
from pullfill.runtime.serial_executor import SerialExecutor
from pullfill.wire.prefix import PrefixFollow

if TYPE_CHECKING:
    from pullfill.worker.engine_loop import EngineLoop

logger = log.get("decode_worker.request_server")
_WITHOUT_PAYLOAD = (front_wire.PING, front_wire.BYE)
# Methods of the engine core that a frontend may call.
UTILITIES = frozenset(
    {"add_lora", "reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache", "profile"}
)
# Messages up to this size may be prepared on the engine thread. 4 KiB is a prompt of 1,000 tokens,
# about 0.2 ms of work.
SMALL_BYTES = 4 << 10
# Most bytes of messages that wait: 2,000 prompts of 128k tokens.
MAX_BYTES = 1 << 30

# What the engine thread must run once a message is prepared.
Work = Callable[[], None]
Preparation = Callable[[], Work | None]


@dataclass(eq=False, repr=False)
class RequestServer:
    """Serves all frontends of one decode worker.

    Engine thread only, except for preparations (intake thread) and reads of `draining` (any)."""

    loop: EngineLoop  # it polls our socket between steps
    traces: RequestTraces
    # Takes `draining`, and returns the message for a new frontend.
    welcome: Callable[[bool], front_wire.DecodeWelcome]
    models: Sequence[str]  # names under which the model is served
    clock: Clock = SYSTEM_CLOCK
    # The cluster key. A frontend that does not hold it is refused.
    key: ClusterKey | None = None
    # See `BlockEvents.follow`.
    follow: Callable[[bytes, Send], object] = lambda *_: None
    address: str = field(init=False, default="")
    draining: bool = field(init=False, default=False)
    intake: Intake = field(init=False)
    _codec: front_wire.WorkerCodec = field(init=False)
    _frontends: dict[bytes, Frontend] = field(init=False, default_factory=dict)
    _taken: dict[str, Request] = field(init=False, default_factory=dict)
    _next_index: int = field(init=False, default=requests.FRONTENDS)
    _max_model_len: int = field(init=False, default=0)
    _socket: Any = field(init=False, default=None)
    _gate: CurveAuth | None = field(init=False, default=None)
    _first: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._codec, self.intake = front_wire.WorkerCodec(), Intake(self.loop.submit)

    def bind(self, host: str, port: int = 0) -> None:
        """Listen (port 0: the OS picks one) and join the engine loop. Raises NotNow."""
        # A context of our own: its CURVE auth has no business with the engine's sockets.
        self._context = zmq.Context(1)
        self._socket = self._context.socket(zmq.ROUTER)
        front_wire.set_options(self._socket)
        # A full queue is an error, not a message less.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._gate = CurveAuth(self._socket, self.key)
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as exc:
            raise NotNow(f"cannot listen for frontends on {host}:{port}: {exc}") from exc
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.loop.register(self._socket, self.receive)
        for socket in self._gate.sockets:
            self.loop.register(socket, self._gate.look)

    def close(self) -> None:
        self.intake.thread.shutdown(wait=False)
        if self._gate is not None:
            self._gate.close()
            self._gate = None
            self._socket.close(0)
            self._context.term()

    @property
    def active_requests(self) -> int:
        """Requests taken and not finished."""
        return len(self._taken)

    def has(self, request_id: str) -> bool:
        """Whether a frontend waits for this request."""
        return request_id in self._taken

    def coming(self) -> set[str]:
        """IDs of the requests that have arrived, but are not in the engine yet."""
        return {request.id for request in self._taken.values() if request.coming}

    def start_drain(self) -> None:
        """Tell every frontend. Requests that still arrive go back to them."""
        self.draining = True
        self.tell(front_wire.DRAIN)

    def migrate(self, request_ids: Collection[str] | None = None) -> None:
        """Have the frontends continue these requests elsewhere, after all outputs sent so far.
        request_ids: None: all of them; call `start_drain` first."""
        for frontend in self._frontends.values():
            mine = [r for r in frontend.requests if request_ids is None or r in request_ids]
            self._abort(frontend, mine)
            for start in range(0, len(mine), front_wire.MAX_IDS):
                some = front_wire.encode_list(mine[start : start + front_wire.MAX_IDS])
                self._send(frontend, front_wire.BACK, some)

    # ------------------------------------------------------------------ in

    def receive(self) -> None:
        """Receive and handle all messages that have arrived."""
        self._first = True
        while front_wire.readable(self._socket):
            message = front_wire.receive(self._socket)
            identity, kind = message[0].bytes, message[1].bytes if len(message) > 1 else b""
            try:
                self._dispatch(identity, kind, message[2:])
            except BadMessage as exc:
                self._end(identity, kind, f"sent something unreadable: {exc}")
            except Exception as exc:
                # This is the engine thread: one frontend's message must not end everybody's.
                logger.exception("a frontend's message %r failed", kind)
                self._end(identity, kind, f"sent something that failed: {exc!r}")

    def _end(self, identity: bytes, kind: bytes, why: str) -> None:
        """End the connection of a frontend that sent nonsense, and abort its requests here."""
        if (frontend := self._frontends.get(identity)) is not None:
            self._drop(frontend, why)
            self._tell(identity, front_wire.GONE)
        elif kind == front_wire.HELO:
            self._tell(identity, front_wire.NOPE, why.encode()[:1000])
        else:
            logger.warning("a frontend that is not connected %s", why)

    def _unreadable(self, frontend: Frontend, kind: bytes, why: Exception) -> Callable[[], None]:
        """Return a function for the engine thread that ends the connection. Intake thread."""

        def end() -> None:
            if self._frontends.get(frontend.identity) is frontend:
                self._end(frontend.identity, kind, f"sent something unreadable: {why}")

        return end

    def _dispatch(self, identity: bytes, kind: bytes, payload: list[Any]) -> None:
        frontend = self._frontends.get(identity)
        if not payload and kind not in _WITHOUT_PAYLOAD:
            raise BadMessage(f"{kind!r} without a payload")
        if kind == front_wire.HELO:
            self._greet(identity, wire.decode(payload[0].bytes, front_wire.FrontendHello))
            return
        if frontend is None:
            if kind != front_wire.BYE:
                # It was dropped, and its requests aborted. It must know, or it waits for them.
                self._tell(identity, front_wire.GONE)
            return
        frontend.last_seen = self.clock.monotonic()
        if kind == front_wire.ADD:
            self._add(frontend, payload)
        elif kind == front_wire.ABRT:
            self._abort(frontend, front_wire.decode_ids(payload[0].bytes))
        elif kind == front_wire.PING:
            self._send(frontend, front_wire.PONG)
        elif kind == front_wire.UTIL:
            self._utility(frontend, payload)
        elif kind == front_wire.FOLW:
            wire.decode(payload[0].bytes, PrefixFollow)
            frontend.follows = True
            self.follow(identity, self._send_blocks)
        elif kind == front_wire.BYE:
            self._drop(frontend, "left")
        else:
            raise BadMessage(f"unknown kind {kind!r}")

    def _greet(self, identity: bytes, hello: front_wire.FrontendHello) -> None:
        welcome = self.welcome(self.draining)
        self._max_model_len, vllm = welcome.max_model_len, welcome.vllm_version
        refusal = front_wire.refuse_hello(hello, vllm_version=vllm, models=self.models)
        if refusal is not None:
            self._tell(identity, front_wire.NOPE, refusal.encode())
            return
        if (old := self._frontends.get(identity)) is not None:
            self._drop(old, "greeted again")
        name, now = hello.frontend_instance, self.clock.monotonic()
        frontend = Frontend(identity, self._next_index, name, now)
        self._next_index += 1
        self._frontends[identity] = frontend
        self._send(frontend, front_wire.HELO, wire.encode(welcome))
        if self.draining:
            self._send(frontend, front_wire.DRAIN)

    def _add(self, frontend: Frontend, payload: list[Any]) -> None:
        request_id = front_wire.request_id(payload)
        if self.draining:
            return self._give_back(frontend, request_id)
        if request_id in self._taken:
            return self._refuse(frontend, request_id, RuntimeError("it is here already"))
        here, self._first = self._first, False
        taken = Request(request_id, frontend)
        preparation = partial(self._prepare, taken, payload, time.time())
        if not self.intake.put(preparation, sum(map(len, payload)), here=here):
            # Too much waits here. Another worker may have room.
            return self._give_back(frontend, request_id)
        frontend.requests.add(request_id)
        self._taken[request_id] = taken

    def _prepare(self, taken: Request, payload: list[Any], arrived: float) -> Work | None:
        """Decode and check a request. Runs as a `Preparation`.

        arrived: when it came, in seconds since 1970 by this host's clock."""
        try:
            request, tokens = self._codec.request(payload)
        except BadMessage as exc:
            return self._unreadable(taken.frontend, front_wire.ADD, exc)
        try:
            if not taken.wanted:
                return None
            _check_fits(request, len(tokens) // 4, self._max_model_len, self.loop.config)
            request.client_index = taken.frontend.index
            # The frontend's clock may differ. vLLM orders requests of one priority by this time.
            request.arrival_time = arrived
            request_limits.strip_transfer_params(request, front_wire.holder_of(payload))
            if request.lora_request is not None:
                request.lora_request = self.loop.adapters.named(request.lora_request)
            failpoints.hit("decode.intake")
            made = self.loop.prepare(request, tokens)
        except Exception as exc:
            failure = exc  # Python deletes `exc` at the end of this block
            return lambda: self._enter(taken, None, failure)
        return lambda: self._enter(taken, made, None)

    def _enter(self, taken: Request, request: Any, failure: Exception | None) -> None:
        """Give a prepared request to the engine. Skip a request that was aborted meanwhile."""
        if not taken.wanted:
            return
        taken.coming = False
        try:
            if failure is not None:
                raise failure
            if self.loop.enter(request):
                taken.grammar = request
        except Exception as exc:
            self._forget(taken.id)
            self._refuse(taken.frontend, taken.id, exc)

    def _give_back(self, frontend: Frontend, request_id: str) -> None:
        """This request is not taken. The frontend sends it elsewhere."""
        self._send(frontend, front_wire.BACK, front_wire.encode_list([request_id]))

    def _refuse(self, frontend: Frontend, request_id: str, why: Exception) -> None:
        """End a request that cannot be taken, and log why."""
        fault, about = fault_of(why), log.ids(request_id=request_id)
        if fault is Fault.REQUEST:
            logger.warning("request %s is refused: %s", request_id, why, extra=about)
            text = f"it is refused: {why}"
        else:
            logger.error("request %s could not be taken in", request_id, exc_info=why, extra=about)
            text = explained(why, f"decode worker {self.welcome(self.draining).decode_instance}")
        self._send_out(frontend, requests.error_outputs(request_id, text, fault))

    def _abort(self, frontend: Frontend, request_ids: Iterable[str]) -> None:
        mine = [r for r in request_ids if r in frontend.requests]
        if inside := [r for r in mine if not self._taken[r].coming]:
            self.loop.drop(inside)
        for request_id in mine:
            self._forget(request_id)
        if records := [r for r in map(self.traces.finish, mine) if r is not None]:
            # A stop string ends a request by an abort. It must be explained like any other.
            self._send(frontend, front_wire.EXPL, front_wire.encode_list(records))

    def _utility(self, frontend: Frontend, payload: list[Any]) -> None:
        prepare = partial(self._prepare_utility, frontend, payload)
        if not self.intake.put(prepare, sum(map(len, payload))):
            raise BadMessage("too many requests wait before a utility call")

    def _prepare_utility(self, frontend: Frontend, payload: list[Any]) -> Work | None:
        """Decode a utility call. Runs on the intake thread."""
        try:
            call_id, method, args = self._codec.utility(payload)
        except BadMessage as exc:
            return self._unreadable(frontend, front_wire.UTIL, exc)

        if method == "add_lora":
            # It reads the files of the adapter. The engine thread does not wait for them.
            run = self.loop.adding(args[0] if args else None)
        else:
            run = partial(self.loop.utility, method, args)

        def call() -> None:
            try:
                if method not in UTILITIES:
                    raise PermissionError(f"{method} cannot be called from a frontend")
                answer = requests.utility_outputs(call_id, run(), None)
            except Exception as exc:
                answer = requests.utility_outputs(call_id, None, str(exc))
            self._send_out(frontend, answer)

        return call

    # ------------------------------------------------------------------ out

    def send_outputs(self, outputs: dict[int, Any]) -> None:
        """Send one step's outputs, each to the frontend that its request came from."""
        for index, batch in outputs.items():
            records = [r for r in map(self._look, batch.outputs) if r is not None]
            frontend = next((f for f in self._frontends.values() if f.index == index), None)
            if frontend is None and batch.scheduler_stats is not None and not batch.outputs:
                # Without outputs vLLM gives a step's statistics to client 0, which may be gone.
                frontend = next(iter(self._frontends.values()), None)
            if frontend is None:
                continue
            last = (front_wire.LAST, front_wire.encode_list(records)) if records else ()
            self._send(frontend, *(last or (front_wire.OUT,)), *self._codec.encode(batch))

    def _look(self, output: Any) -> wire.ExplainRecord | None:
        """Correct an output. Returns its request's record if it is the last one."""
        requests.correct_cached_tokens(output, self.traces.offloaded)
        if output.finish_reason is None:
            return None
        taken = self._taken.get(output.request_id)
        if taken is not None and taken.grammar is not None:
            requests.explain_error(output, taken.grammar)
        self._forget(output.request_id)
        return self.traces.finish(output.request_id)

    def tell(self, *parts: Any) -> None:
        """Send a message to all frontends. Never blocks."""
        for frontend in list(self._frontends.values()):
            self._send(frontend, *parts)

    def _send_blocks(self, payload: bytes, to: bytes | None) -> None:
        """See `Send`. Any thread."""

        def send() -> None:
            for frontend in list(self._frontends.values()):
                if frontend.follows and to in (None, frontend.identity):
                    self._send(frontend, front_wire.BLKS, payload)

        self.loop.submit(send)

    def check_silent(self) -> None:
        """Drop frontends that have said nothing for too long."""
        now = self.clock.monotonic()
        if any(f.silent(now) for f in self._frontends.values()):
            self.receive()  # what waited while the engine was busy counts as heard
        for frontend in list(self._frontends.values()):
            if frontend.clogged:
                self._drop(frontend, "does not read what it is sent")
            elif frontend.silent(self.clock.monotonic()):
                self._drop(frontend, f"silent for {front_wire.SILENCE_S:.0f} s")

    def _drop(self, frontend: Frontend, why: str) -> None:
        lost = list(frontend.requests)
        level = logger.warning if lost else logger.info
        level("frontend %s %s; aborting %d requests", frontend.name, why, len(lost))
        self._abort(frontend, lost)
        self._frontends.pop(frontend.identity, None)

    def _forget(self, request_id: str) -> None:
        if (taken := self._taken.pop(request_id, None)) is not None:
            taken.wanted = False
            taken.frontend.requests.discard(request_id)

    def _send(self, frontend: Frontend, *parts: Any) -> None:
        """Send a message without blocking. A frontend whose queue was full once gets no more."""
        if not frontend.clogged:
            frontend.clogged = not self._tell(frontend.identity, *parts)

    def _send_out(self, frontend: Frontend, outputs: Any) -> None:
        self._send(frontend, front_wire.OUT, *self._codec.encode(outputs))

    def _tell(self, identity: bytes, *parts: Any) -> bool:
        """Send a message. Returns False if the peer's queue is full. It may be gone already."""
        try:
            front_wire.send(self._socket, (identity, *parts))
        except zmq.ZMQError as exc:
            return not isinstance(exc, zmq.Again)
        return True


class Intake:
    """Runs preparations one after another. Call it on the engine thread.

    submit: `EngineLoop.submit`."""

    def __init__(self, submit: Callable[..., None]) -> None:
        self._submit = submit
        self.thread = SerialExecutor()
        # Bytes so far. Two sums, because each is changed by another thread.
        self._put = self._done = 0

    def put(self, preparation: Preparation, size: int, *, here: bool = False) -> bool:
        """Queue a preparation. Returns whether it was queued.

        It is dropped if too much waits already, or if the intake thread cannot start.

        size: bytes of the message.
        here: the caller's thread may prepare a small message itself, at once."""
        # A small message that nothing waits before: two wake-ups of threads cost more than it does.
        if here and size <= SMALL_BYTES and not self.thread.busy:
            self._prepare(preparation, wake=False)
            return True
        if self._put - self._done + size > MAX_BYTES:
            return False

        def run() -> None:
            self._prepare(preparation, wake=True)
            self._done += size

        self._put += size
        try:
            self.thread.submit(run)
        except RuntimeError as exc:  # no thread can be started, or this worker ends
            logger.warning("a message is not prepared: %s", exc)
            self._put -= size
            return False
        return True

    def _prepare(self, preparation: Preparation, wake: bool) -> None:
        try:
            if (work := preparation()) is not None:
                self._submit(work, wake=wake)
        except Exception:
            logger.exception("a frontend's message failed; it is ignored")


@dataclass(slots=True, eq=False)
class Frontend:
    """One connection."""

    identity: bytes
    index: int
    name: str
    last_seen: float
    clogged: bool = False  # its send queue is full, because the frontend does not read
    follows: bool = False  # it wants to know which blocks are stored and removed
    requests: set[str] = field(default_factory=set)

    def silent(self, now: float) -> bool:
        """Whether nothing came from the frontend for so long that it counts as gone.

        A frontend without requests sends PING half as often, so it gets more time."""
        more = 0.0 if self.requests else front_wire.PING_INTERVAL_S
        return now - self.last_seen > front_wire.SILENCE_S + more


@dataclass(slots=True, eq=False)
class Request:
    """One request that the request server has accepted."""

    id: str
    frontend: Frontend
    coming: bool = True  # it is not in the engine yet
    wanted: bool = True  # it was not aborted since it was accepted
    grammar: Any = None  # vLLM's Request, if it has structured output


def _check_fits(request: Any, prompt_tokens: int, max_model_len: int, config: Any) -> None:
    """Refuse a request that would make vLLM's engine fail, or that it would serve only in part.

    A failure would end this worker. vLLM makes these checks only in the frontend, with the
    frontend's flags and the limits of the worker that was chosen first. If that worker dies, the
    request comes here, and this worker's `max_model_len` may be smaller. Raises BadMessage."""
    if request.resumable:
        raise BadMessage("streaming input is not supported")
    if prompt_tokens >= max_model_len:
        raise BadMessage(f"{prompt_tokens} prompt tokens, at most {max_model_len - 1}")
    speculation.check_params(config, request.sampling_params)
