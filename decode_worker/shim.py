"""Serves frontends: the ROUTER end of engine/rpc.py, on the engine thread.

The engine thread itself receives requests between steps and sends each step's outputs, so no
helper thread competes with the model for the core, and a token waits for no hand-over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import zmq

from pullfill import log, wire
from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.decode_worker.gatekeeper import Gatekeeper
from pullfill.decode_worker.story import Stories
from pullfill.engine import outputs as vllm_outputs
from pullfill.engine import rpc
from pullfill.errors import BadMessage
from pullfill.security import ClusterKey

if TYPE_CHECKING:
    from pullfill.engine.host import EngineHost

logger = log.get("decode_worker.shim")

_UTILITIES = frozenset({
    "get_supported_tasks", "reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache",
    "is_sleeping", "profile", "is_scheduler_paused", "get_kv_cache_group_metadata",
    "get_weight_version",
})  # fmt: skip


@dataclass(slots=True, eq=False)
class _Frontend:
    identity: bytes
    index: int
    last_seen: float
    name: str = ""
    clogged: bool = False
    requests: set[str] = field(default_factory=set)

    def silent(self, now: float) -> bool:
        """Whether it is taken for gone. One without requests says PING half as often."""
        more = 0.0 if self.requests else rpc.PING_INTERVAL_S
        return now - self.last_seen > rpc.SILENCE_S + more


class FrontendShim:
    """All frontends of one decode worker. Engine thread only, but for `drain`'s flag.

    welcome: what a new frontend is told; models: names under which the model is known; key: a
    frontend that does not hold it is turned away.
    """

    def __init__(
        self,
        host: EngineHost,
        stories: Stories,
        *,
        welcome: Callable[[], rpc.DecodeWelcome],
        models: Iterable[str],
        clock: Clock = SYSTEM_CLOCK,
        key: ClusterKey | None = None,
    ) -> None:
        self.host = host
        self._stories = stories
        self._welcome = welcome
        self._models = list(models)
        self._clock = clock
        self._codec = rpc.WorkerCodec()
        self._frontends: dict[bytes, _Frontend] = {}
        self._by_index: dict[int, _Frontend] = {}
        self._owner: dict[str, _Frontend] = {}
        self._grammars: dict[str, Any] = {}
        self._next_index = 0
        self._max_model_len = 0
        self._next_check = 0.0
        self._socket: Any = None
        self._key = key
        self._gate: Gatekeeper | None = None
        self.draining = False
        self.address = ""

    def bind(self, host: str, port: int = 0) -> None:
        """Listen (port 0: the OS picks one) and join the engine loop."""
        # A context of our own: its gatekeeper has no business with the engine's sockets.
        self._context = zmq.Context(1)
        self._socket = self._context.socket(zmq.ROUTER)
        rpc.set_options(self._socket)
        # A full queue is an error, not a message less.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._gate = Gatekeeper(self._socket, self._key)
        self._socket.bind(f"tcp://{host}:{port or '*'}")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.host.register(self._socket, self.receive)
        for socket in self._gate.sockets:
            self.host.register(socket, self._gate.look)

    def close(self) -> None:
        if self._gate is not None:
            self._gate.close()
            self._gate = None
            self._socket.close(0)
            self._context.term()

    @property
    def active_requests(self) -> int:
        """Requests taken and not finished."""
        return len(self._owner)

    def start_drain(self) -> None:
        """Tell every frontend; requests that still arrive are handed back."""
        self.draining = True
        for frontend in self._frontends.values():
            self._send(frontend, rpc.DRAIN)

    def hand_back(self, request_ids: Collection[str] | None = None) -> None:
        """Give up these requests (None: every one, after `start_drain`): the frontends continue
        them elsewhere from the tokens they have. Whatever was sent before arrives before."""
        for frontend in self._frontends.values():
            mine = [r for r in frontend.requests if request_ids is None or r in request_ids]
            if not mine:
                continue
            self._abort(frontend, mine)
            for start in range(0, len(mine), rpc.MAX_IDS):
                ids = mine[start : start + rpc.MAX_IDS]
                self._send(frontend, rpc.BACK, rpc.encode_ids(ids))

    # ------------------------------------------------------------------ in

    def receive(self) -> None:
        """Take everything that has arrived."""
        while True:
            try:
                message = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
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
        """End this frontend's connection: nobody knows what its message asked for. Its requests
        here are aborted, and it continues them elsewhere."""
        if (frontend := self._frontends.get(identity)) is not None:
            self._drop(frontend, why)
            self._tell(identity, rpc.GONE)
        elif kind == rpc.HELO:
            self._tell(identity, rpc.NOPE, why.encode()[:1000])
        else:
            logger.warning("a frontend that is not connected %s", why)

    def _dispatch(self, identity: bytes, kind: bytes, payload: list[Any]) -> None:
        frontend = self._frontends.get(identity)
        if not payload and kind in (rpc.HELO, rpc.ADD, rpc.ABRT, rpc.UTIL):
            raise BadMessage(f"{kind!r} without a payload")
        if kind == rpc.HELO:
            self._greet(identity, wire.decode(payload[0].bytes, rpc.FrontendHello))
            return
        if frontend is None:
            if kind != rpc.BYE:
                # It was silent for too long and dropped; its requests here are aborted. It must
                # know, or it would wait for them and send more.
                self._tell(identity, rpc.GONE)
            return
        frontend.last_seen = self._clock.monotonic()
        if kind == rpc.ADD:
            self._add(frontend, payload)
        elif kind == rpc.ABRT:
            self._abort(frontend, rpc.decode_ids(payload[0].bytes))
        elif kind == rpc.PING:
            self._send(frontend, rpc.PONG)
        elif kind == rpc.UTIL:
            self._utility(frontend, payload)
        elif kind == rpc.BYE:
            self._drop(frontend, "left")
        else:
            raise BadMessage(f"unknown kind {kind!r}")

    def _greet(self, identity: bytes, hello: rpc.FrontendHello) -> None:
        welcome = self._welcome()
        self._max_model_len = welcome.max_model_len
        refusal = rpc.refuse_hello(hello, vllm_version=welcome.vllm_version, models=self._models)
        if refusal is not None:
            self._tell(identity, rpc.NOPE, refusal.encode())
            return
        if (old := self._frontends.get(identity)) is not None:
            self._drop(old, "greeted again")
        frontend = _Frontend(identity, self._next_index, self._clock.monotonic())
        frontend.name = hello.frontend_instance
        self._next_index += 1
        self._frontends[identity] = self._by_index[frontend.index] = frontend
        self._send(frontend, rpc.HELO, wire.encode(welcome))
        if self.draining:
            self._send(frontend, rpc.DRAIN)

    def _add(self, frontend: _Frontend, payload: list[Any]) -> None:
        request = self._codec.request(payload)
        if self.draining:
            self._send(frontend, rpc.BACK, rpc.encode_ids([request.request_id]))
            return
        request.client_index = frontend.index
        core = self.host.core
        assert core is not None
        try:
            self._check(request)
            vllm_outputs.strip_transfer_params(request)
            made, wave = core.preprocess_add_request(request)
            core.add_request(made, wave)
        except Exception as exc:
            logger.exception("request %s is refused", request.request_id)
            failed = vllm_outputs.error_outputs(request.request_id, f"it is refused: {exc}")
            self._send(frontend, rpc.OUT, *self._codec.encode(failed))
            return
        if vllm_outputs.has_grammar(made):
            self._grammars[request.request_id] = made
        frontend.requests.add(request.request_id)
        self._owner[request.request_id] = frontend

    def _check(self, request: Any) -> None:
        """What vLLM checks in its frontend only: a request that was accepted for another worker,
        and is sent here after that one died, may not fit this one and would end the engine."""
        if request.request_id in self._owner:
            raise BadMessage(f"request {request.request_id} is here already")
        if request.resumable:
            raise BadMessage("streaming input is not supported")
        limit = self._max_model_len
        if request.prompt_token_ids is not None and len(request.prompt_token_ids) >= limit:
            raise BadMessage(f"{len(request.prompt_token_ids)} prompt tokens, at most {limit - 1}")

    def _abort(self, frontend: _Frontend, request_ids: Iterable[str]) -> None:
        mine = [r for r in request_ids if self._owner.get(r) is frontend]
        core = self.host.core
        if mine and core is not None:
            core.abort_requests(mine)
        records = []
        for request_id in mine:
            self._forget(request_id)
            if (record := self._stories.finish(request_id)) is not None:
                records.append(record)
        if records:
            # A stop string is found in the frontend and comes here as an abort; such a request
            # is to be explained like any other.
            self._send(frontend, rpc.EXPL, rpc.encode_explain(records))

    def _utility(self, frontend: _Frontend, payload: list[Any]) -> None:
        call_id, method, args = self._codec.utility(payload)

        def answer(future: Future[Any]) -> None:
            exc = future.exception()
            reply = vllm_outputs.utility_outputs(
                call_id, None if exc else future.result(), str(exc) if exc else None
            )
            self.host.submit(lambda _: self._send(frontend, rpc.OUT, *self._codec.encode(reply)))

        future: Future[Any] = Future()
        try:
            if method not in _UTILITIES:
                raise PermissionError(f"{method} cannot be called from a frontend")
            result = getattr(self.host.core, method)(*args)
        except Exception as exc:
            future.set_exception(exc)
        else:
            if isinstance(result, Future):
                future = result
            else:
                future.set_result(result)
        future.add_done_callback(answer)

    # ------------------------------------------------------------------ out

    def send_outputs(self, outputs: dict[int, Any]) -> None:
        """One step's outputs, to the frontend each request came from."""
        for index, batch in outputs.items():
            records = []
            for output in batch.outputs:
                vllm_outputs.correct_cached_tokens(output)
                if output.finish_reason is not None:
                    if (made := self._grammars.get(output.request_id)) is not None:
                        vllm_outputs.explain_error(output, made)
                    self._forget(output.request_id)
                    record = self._stories.finish(output.request_id)
                    if record is not None:
                        records.append(record)
            frontend = self._by_index.get(index)
            if frontend is None:
                # Statistics of a step without outputs come for index 0; any frontend will do.
                frontend = next(iter(self._by_index.values()), None)
                if frontend is None or batch.outputs:
                    continue
            if records:
                self._send(frontend, rpc.EXPL, rpc.encode_explain(records))
            self._send(frontend, rpc.OUT, *self._codec.encode(batch))

    def check_silent(self) -> None:
        """Drop frontends that said nothing for too long; cheap, call often."""
        now = self._clock.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + 1.0
        if any(f.silent(now) for f in self._frontends.values()):
            self.receive()  # what waited while the engine was busy counts as heard
        for frontend in list(self._frontends.values()):
            if frontend.clogged:
                self._drop(frontend, "does not read what it is sent")
            elif frontend.silent(self._clock.monotonic()):
                self._drop(frontend, f"silent for {rpc.SILENCE_S:.0f} s")

    def _drop(self, frontend: _Frontend, why: str) -> None:
        lost = list(frontend.requests)
        level = logger.warning if lost else logger.info
        level("frontend %s %s; aborting %d requests", frontend.name, why, len(lost))
        self._abort(frontend, lost)
        self._frontends.pop(frontend.identity, None)
        self._by_index.pop(frontend.index, None)

    def _forget(self, request_id: str) -> None:
        self._grammars.pop(request_id, None)
        frontend = self._owner.pop(request_id, None)
        if frontend is not None:
            frontend.requests.discard(request_id)

    def _send(self, frontend: _Frontend, *parts: Any) -> None:
        """Never blocks. After a message that found no room nothing is sent any more: what the
        frontend has of each answer must be its beginning."""
        if not frontend.clogged:
            frontend.clogged = not self._tell(frontend.identity, *parts)

    def _tell(self, identity: bytes, *parts: Any) -> bool:
        """False: too much waits for this peer already. A peer that is gone is told nothing."""
        try:
            self._socket.send_multipart([identity, *parts], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            pass
        return True
