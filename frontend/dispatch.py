"""Which request is at which decode worker, and what happens when that changes.

Life of a request here: `submit` → waiting (no worker can take it) or at a worker → finished, failed
or aborted. It leaves a worker unfinished when the worker is lost or hands it back: if no token of
it is out it goes to another worker under a new id, else it fails with a message that names the
worker. Waiting is bounded, so every request ends. The per-request state (request, worker, tokens
out) is what continuing a broken stream elsewhere will need.

Single event loop. `on_outputs` is the per-step path: one decode, one dict lookup per output.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pullfill import log
from pullfill.engine import rpc
from pullfill.engine.front_ports import OutputSink
from pullfill.errors import BadMessage, PeerUnavailable
from pullfill.frontend import metrics
from pullfill.frontend.explain import ExplainStore, Trace, key_of
from pullfill.frontend.link import Link
from pullfill.frontend.router import Router

_log = log.get("frontend.dispatch")

NO_WORKER_WAIT_S = 2.0
"""How long a new request waits for a first decode worker."""
RESEND_WAIT_S = 0.8
"""The same after its worker was lost; with the time to notice the loss this stays below 5 s."""
MAX_ATTEMPTS = 3
"""A request that outlives this many workers is taken to be what kills them."""
NO_WORKER = "no decode worker is ready: start one with `pullfill decode` (or `pullfill up`)"
_ABORTED = 2
"""vLLM's FinishReason.ABORT."""


@dataclass(slots=True, eq=False)
class Flight:
    """One engine request. `link` None: waiting until `deadline` (loop time).

    arrived, submitted: `time.monotonic` of the HTTP request and of `submit`. (The loop's own clock
    stands still within one iteration under uvloop.)"""

    request: Any
    request_id: str
    trace: Trace
    arrived: float
    submitted: float
    link: Link | None = None
    wire_id: str = ""
    attempt: int = 0
    tokens_out: int = 0
    deadline: float = 0.0
    failure: str = NO_WORKER


class Dispatcher:
    """Implements `engine.front_ports.DecodePort`.

    codec: `rpc.FrontendCodec` or the like. candidates: connections that may take requests.
    """

    def __init__(
        self,
        codec: Any,
        router: Router,
        explain: ExplainStore,
        candidates: Callable[[], Sequence[Link]],
    ) -> None:
        self._codec = codec
        self._router = router
        self._explain = explain
        self._candidates = candidates
        self._sink: OutputSink | None = None
        self._loop = asyncio.get_running_loop()
        self._flights: dict[str, Flight] = {}
        self._waiting: dict[str, Flight] = {}
        self._expiry: asyncio.TimerHandle | None = None
        self._calls: dict[int, tuple[Link, asyncio.Future[Any]]] = {}
        self._next_call = 1
        self._tasks: tuple[str, ...] | None = None

    def bind(self, sink: OutputSink) -> None:
        """Say where outputs go; before the first worker is connected."""
        self._sink = sink

    @property
    def sink(self) -> OutputSink:
        assert self._sink is not None, "bind() comes first"
        return self._sink

    @property
    def in_flight(self) -> int:
        """Requests submitted and not ended."""
        return len(self._flights)

    # ---------------------------------------------------------------- DecodePort

    def submit(self, request: Any) -> None:
        request_id: str = request.request_id
        known = self._flights.get(request_id)
        if known is not None:  # a further part of a streaming input goes where the first went
            known.request = request
            if known.link is not None:
                known.link.send(rpc.ADD, *self._codec.encode(request))
            return
        now, submitted = self._loop.time(), time.monotonic()
        trace = Trace(key_of(request_id, request.external_req_id))
        age = min(max(0.0, time.time() - request.arrival_time), 60.0)
        flight = Flight(request, request_id, trace, submitted - age, submitted)
        flight.deadline = now + NO_WORKER_WAIT_S
        self._flights[request_id] = flight
        self._place(flight, now)

    def abort(self, request_ids: Sequence[str]) -> None:
        by_link: dict[Link, list[str]] = {}
        for request_id in request_ids:
            flight = self._flights.pop(request_id, None)
            if flight is None:
                continue
            self._waiting.pop(request_id, None)
            if flight.link is not None:
                flight.link.flights.pop(flight.wire_id, None)
                by_link.setdefault(flight.link, []).append(flight.wire_id)
        for link, ids in by_link.items():
            link.send(rpc.ABRT, rpc.encode_ids(ids))

    async def call(self, method: str, args: Sequence[Any], timeout_s: float) -> list[Any]:
        links = list(self._candidates())
        if not links:
            raise PeerUnavailable(NO_WORKER)
        futures: list[asyncio.Future[Any]] = []
        ids: list[int] = []
        for link in links:
            call_id, self._next_call = self._next_call, self._next_call + 1
            future = self._loop.create_future()
            self._calls[call_id] = (link, future)
            link.send(rpc.UTIL, *self._codec.encode((call_id, method, tuple(args))))
            futures.append(future)
            ids.append(call_id)
        try:
            async with asyncio.timeout(timeout_s):
                return list(await asyncio.gather(*futures))
        except TimeoutError:
            raise PeerUnavailable(f"{method}: no answer within {timeout_s:g} s") from None
        finally:
            for call_id in ids:
                self._calls.pop(call_id, None)

    def supported_tasks(self) -> tuple[str, ...] | None:
        return self._tasks

    # ---------------------------------------------------------------- from the pool

    def on_ready(self, link: Link) -> None:
        """A connection takes requests now: send it what waits."""
        assert link.welcome is not None
        self._tasks = self._tasks or tuple(link.welcome.supported_tasks)
        self.sink.joined(link.welcome)
        now = self._loop.time()
        for flight in list(self._waiting.values()):
            self._place(flight, now)

    def on_lost(self, link: Link, reason: str) -> None:
        """A connection is gone: move or fail its requests and calls."""
        flights, link.flights = list(link.flights.values()), {}
        self.sink.left(link.instance_id)
        for other, future in list(self._calls.values()):
            if other is link and not future.done():
                future.set_exception(PeerUnavailable(f"decode worker {link.instance_id}: {reason}"))
        for flight in flights:
            self._leave(flight, f"decode worker {link.instance_id} was lost ({reason})")

    def on_message(self, link: Link, kind: bytes, frames: list[Any]) -> None:
        """Raises BadMessage on what cannot be read."""
        if kind == rpc.OUT:
            self.on_outputs(link, frames)
            return
        if len(frames) != 1:
            raise BadMessage(f"{kind[:8]!r} with {len(frames)} frames")
        if kind == rpc.EXPL:
            for record in rpc.decode_explain(frames[0]):
                self._explain.put(record)
        elif kind == rpc.BACK:
            for wire_id in rpc.decode_ids(frames[0]):
                flight = link.flights.pop(wire_id, None)
                if flight is not None:
                    self._leave(flight, f"decode worker {link.instance_id} takes no new requests")
        else:
            raise BadMessage(f"unknown kind {kind[:8]!r}")

    def on_outputs(self, link: Link, frames: list[Any]) -> None:
        """One engine step's outputs of one worker."""
        outputs = self._codec.outputs(frames)
        if outputs.utility_output is not None:
            self._on_result(link, outputs.utility_output)
            return
        flights = link.flights
        kept = []
        for out in outputs.outputs:
            flight = flights.get(out.request_id)
            if flight is None:
                continue  # aborted or moved meanwhile
            if flight.tokens_out == 0:
                flight.trace.first_token_ms = (time.monotonic() - flight.arrived) * 1000.0
            flight.tokens_out += len(out.new_token_ids)
            if out.finish_reason is not None and not self._finish(link, flight, out):
                continue
            if flight.attempt:
                out.request_id = flight.request_id
            kept.append(out)
        if len(kept) != len(outputs.outputs):
            outputs.outputs = kept
        if kept or outputs.scheduler_stats is not None:
            self.sink.outputs(link.instance_id, outputs)

    # ---------------------------------------------------------------- inside

    def _finish(self, link: Link, flight: Flight, out: Any) -> bool:
        """Forget a finished request. False: the worker cut it short, and it goes on elsewhere."""
        if flight.request.resumable:
            return True
        del link.flights[flight.wire_id]
        if out.finish_reason == _ABORTED and not link.usable:
            # Our own aborts forget the flight first, so this one was cut by the worker's drain.
            self._leave(flight, f"decode worker {link.instance_id} stopped before it was done")
            return False
        out.kv_transfer_params = None
        del self._flights[flight.request_id]
        return True

    def _place(self, flight: Flight, now: float) -> None:
        """Send a request to a worker, or let it wait for one."""
        workers = self._candidates()
        if not workers:
            self._waiting[flight.request_id] = flight
            self._arm(now)
            return
        self._waiting.pop(flight.request_id, None)
        link = self._router.choose(flight.request.prompt_token_ids, workers)
        request = flight.request
        flight.wire_id = request.request_id = rpc.attempt_id(flight.request_id, flight.attempt)
        try:
            frames = self._codec.encode(request)
        except Exception as exc:  # e.g. an integer that no wire type holds
            self._fail(flight, f"the request cannot be sent to a decode worker: {exc}")
            return
        finally:
            request.request_id = flight.request_id
        flight.link = link
        link.flights[flight.wire_id] = flight
        self._explain.open(flight.wire_id, flight.trace)
        link.send(rpc.ADD, *frames)
        if flight.trace.route_ms is None:
            flight.trace.route_ms = (time.monotonic() - flight.submitted) * 1000.0

    def _leave(self, flight: Flight, reason: str) -> None:
        """The flight's worker will not finish it, and has forgotten it or is gone."""
        flight.link = None
        if flight.tokens_out:
            self._fail(
                flight,
                f"{reason} after {flight.tokens_out} tokens of this request; send it again",
            )
            return
        flight.attempt += 1
        if flight.attempt >= MAX_ATTEMPTS or flight.request.resumable:
            self._fail(flight, f"{reason}; given up after {flight.attempt} attempts")
            return
        metrics.RESENT.inc()
        now = self._loop.time()
        flight.deadline = now + RESEND_WAIT_S
        flight.failure = f"{reason} and {NO_WORKER}"
        self._place(flight, now)

    def _fail(self, flight: Flight, message: str) -> None:
        self._flights.pop(flight.request_id, None)
        self._waiting.pop(flight.request_id, None)
        metrics.FAILED.inc()
        _log.warning("request %s failed: %s", flight.trace.key, message)
        self.sink.failed(flight.request_id, message)

    def _arm(self, now: float) -> None:
        if self._expiry is None and self._waiting:
            first = min(flight.deadline for flight in self._waiting.values())
            self._expiry = self._loop.call_later(max(0.0, first - now) + 0.005, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        now = self._loop.time()
        for flight in list(self._waiting.values()):
            if flight.deadline <= now:
                self._fail(flight, flight.failure)
        self._arm(now)

    def _on_result(self, link: Link, result: Any) -> None:
        owner, future = self._calls.get(result.call_id, (None, None))
        if future is None or owner is not link or future.done():
            return
        if result.failure_message is not None:
            future.set_exception(
                PeerUnavailable(f"decode worker {link.instance_id}: {result.failure_message}")
            )
        else:
            future.set_result(None if result.result is None else result.result.result)
