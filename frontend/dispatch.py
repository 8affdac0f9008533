"""Which request is at which decode worker, and what happens when that changes.

Life of a request: `submit` → waiting (no worker can take it) or at a worker → finished, failed or
aborted. It leaves a worker unfinished when the worker is lost or gives it back. Then it goes to
another worker under a new id. If no token of it is out, it starts again. Otherwise it migrates: it
goes on after the tokens that are out (`engine.migration`). Where that would not be exact, it fails
with a message that says why. All waits are bounded, so every request ends.

A token is out once the sink has it. Messages of a worker about a request that has left it are
dropped, so no token comes twice.

Single event loop. `on_outputs` runs once for each engine step, so it does little for an output.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

from pullfill import wire
from pullfill.engine import front_wire, migration
from pullfill.engine.blame import Fault, explained
from pullfill.errors import BadMessage, PeerUnavailable
from pullfill.frontend import counters
from pullfill.frontend.decode_connection import DecodeConnection
from pullfill.frontend.flight import WAITS, Flight, Waits, ids_of, likely
from pullfill.frontend.request_log import RequestLog, RequestRecord, key_of
from pullfill.frontend.routing.balancer import Balancer
from pullfill.frontend.suspects import Suspects, guilty
from pullfill.registry.suspect_records import SuspectBoard
from pullfill.runtime import log, tracing

if TYPE_CHECKING:
    from pullfill.engine.front_client import DecodeClient

_log = log.get("frontend.dispatch")

# A lost worker may leave hundreds of requests. So many are placed before other callbacks of the
# event loop run. Not one: the choices of a deadly answer shall meet the same worker.
SLICE = 16
# An answer with fewer tokens to come does not move to where fewer streams are: the next of them
# comes late, and one in 100 may.
WORTH_MOVING = 100
# How many workers one request may leave.
MAX_MIGRATIONS = 20
NO_WORKER = "no decode worker is ready: start one with `pullfill decode` (or `pullfill up`)"
# Outcome of a request that cannot be served as it is, or that kills workers.
REFUSED = "refused"
# Outcome of a request that failed by a bug of the server.
OURS = "failed"
_FAULTS = {REFUSED: Fault.REQUEST, OURS: Fault.OURS}
_ABORTED = 2  # vLLM's FinishReason.ABORT


@dataclass(slots=True, eq=False)
class Dispatcher:
    """Implements `engine.front_client.DecodePort`.

    sink: gets the outputs, and hears which requests have failed.
    board: the requests that all frontends refuse.
    never: why no answer can migrate with this configuration. Empty: answers can.
    flights: the requests submitted and not ended, by id. Read it only.
    workers: those to which requests may go, as the pool says. A list of them is never changed.
    """

    sink: DecodeClient
    codec: Any
    balancer: Balancer
    requests: RequestLog
    board: InitVar[SuspectBoard]
    _: KW_ONLY
    never: str = ""
    waits: Waits = WAITS
    flights: dict[str, Flight] = field(default_factory=dict)
    workers: Sequence[DecodeConnection] = ()
    suspects: Suspects = field(init=False)
    # Requests that are at no worker, and are to be placed soon.
    _queue: dict[str, Flight] = field(default_factory=dict)
    _placing: bool = False
    _calls: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _leaving: str = ""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def __post_init__(self, board: SuspectBoard) -> None:
        self.suspects = Suspects(board, self)

    def fail_all(self, why: str) -> None:
        """Fail all requests, and each that is submitted from now on: this frontend leaves."""
        self._leaving = why
        for flight in list(self.flights.values()):
            if flight.worker is not None:
                flight.worker.abort([flight.wire_id])
            self._fail(flight, why)

    # ---------------------------------------------------------------- DecodePort

    def submit(self, request: Any) -> None:
        request_id: str = request.request_id
        now, submitted = self._loop.time(), time.monotonic()
        age = min(max(0.0, time.time() - request.arrival_time), 60.0)
        record = RequestRecord(
            key_of(request_id, request.external_req_id),
            # The loop's own clock stands still within one iteration under uvloop.
            arrived=submitted - age,
            submitted=submitted,
            arrived_at=time.time() - age,
            prompt_tokens=len(request.prompt_token_ids or ()),
            spans=tracing.root(request.trace_headers),
        )
        self.requests.begin(record)
        flight = Flight(request, request_id, record, NO_WORKER)
        self.flights[request_id] = flight
        if len(request_id) > wire.MAX_TEXT:  # clients choose ids
            why = f"the request's id has {len(request_id)} characters"
            self._fail(flight, f"{why}: give one of at most {wire.MAX_TEXT}", REFUSED)
        elif self._leaving:
            self._fail(flight, self._leaving)
        else:
            self.suspects.meet(flight)
            self._try(flight, self.route, now)

    def abort(self, request_ids: Sequence[str], *, answered: bool = False) -> None:
        by_worker: dict[DecodeConnection, list[str]] = {}
        for request_id in request_ids:
            if (flight := self.flights.get(request_id)) is None:
                continue
            self._over(flight, answered)
            if flight.worker is not None:
                by_worker.setdefault(flight.worker, []).append(flight.wire_id)
        for worker, ids in by_worker.items():
            worker.abort(ids)

    async def call(self, method: str, args: Sequence[Any], timeout_s: float) -> list[Any]:
        if not (workers := self.workers):
            raise PeerUnavailable(NO_WORKER)
        call_id = next(self._calls)
        frames = self.codec.encode((call_id, method, tuple(args)))
        for worker in workers:
            worker.calls[call_id] = self._loop.create_future()
            worker.send(front_wire.UTIL, *frames)
        try:
            async with asyncio.timeout(timeout_s):
                return list(await asyncio.gather(*(worker.calls[call_id] for worker in workers)))
        except TimeoutError:
            raise PeerUnavailable(f"{method}: no answer within {timeout_s:g} s") from None
        finally:
            for worker in workers:
                worker.calls.pop(call_id, None)

    # ---------------------------------------------------------------- from the pool

    def on_ready(self, worker: DecodeConnection) -> None:
        """Send waiting requests: this worker takes requests from now on."""
        assert worker.welcome is not None
        self.sink.joined(worker.welcome)
        if (load := worker.welcome.load) is not None:
            self.on_load(worker, load)
        self.suspects.on_return(worker.process)
        self.place_all()

    def on_load(self, worker: DecodeConnection, load: front_wire.LoadReport) -> None:
        """Take what a worker has said about its load. One stream may move to another worker."""
        self.sink.loaded(worker.instance_id, load)
        now = self._loop.time()
        if (uneven := self.balancer.report(worker.instance_id, load, self.workers, now)) is None:
            return
        source, to = uneven
        flights = [flight for flight in source.flights.values() if self._may_move(flight)]
        if (flight := max(flights, key=_to_come, default=None)) is None:
            return
        source.abort([flight.wire_id])
        self._try(flight, self._leave, source, "has more streams than another one")
        self._try(flight, self.route, now, [to])

    def _may_move(self, flight: Flight) -> bool:
        """Whether an answer can go on elsewhere, and is worth it. An answer moves once."""
        if not flight.tokens or flight.attempt or _to_come(flight) < WORTH_MOVING:
            return False
        try:
            return not (self.never or migration.why_not(flight.request, flight.tokens))
        except Exception:  # it goes on where it is
            return False

    def on_lost(self, worker: DecodeConnection, reason: str, died: bool = True) -> None:
        """Migrate or fail the requests of a lost worker. died: its process may have died."""
        flights, worker.flights = list(worker.flights.values()), {}
        # It may come back under the same name, with an empty cache.
        self.balancer.placer.drop(worker.instance_id)
        self.sink.left(worker.instance_id)
        for call in worker.calls.values():
            if not call.done():
                call.set_exception(PeerUnavailable(f"decode worker {worker.instance_id}: {reason}"))
        if died:
            self.suspects.on_death(worker, flights)
        for flight in sorted(flights, key=likely):  # the innocent first
            self._try(flight, self._leave, worker, f"was lost ({reason})")

    def on_message(self, worker: DecodeConnection, kind: bytes, frames: list[Any]) -> None:
        """Handle a message of a worker. Raises BadMessage if it cannot be read."""
        if kind == front_wire.LAST and len(frames) > 1:
            self.requests.take(frames[0])
            kind, frames = front_wire.OUT, frames[1:]
        if kind == front_wire.OUT:
            self.on_outputs(worker, frames)
        elif len(frames) != 1:
            raise BadMessage(f"{kind[:8]!r} with {len(frames)} frames")
        elif kind == front_wire.EXPL:
            self.requests.take(frames[0])
        elif kind == front_wire.LOAD:
            self.on_load(worker, wire.decode(frames[0].bytes, front_wire.LoadReport))
        elif kind == front_wire.BACK:
            for wire_id in front_wire.decode_ids(frames[0]):
                flight = worker.flights.pop(wire_id, None)
                if flight is not None:
                    flight.avoid = worker
                    how = "gave it up: it drains, or has no room for it"
                    self._try(flight, self._leave, worker, how)
        else:
            raise BadMessage(f"unknown kind {kind[:8]!r}")

    def on_outputs(self, worker: DecodeConnection, frames: list[Any]) -> None:
        """Handle the outputs of one engine step of one worker."""
        outputs = self.codec.outputs(frames)
        if outputs.utility_output is not None:
            self._on_result(worker, outputs.utility_output)
            return
        if worker.far:
            worker.to_own_clock(outputs)
        flights = worker.flights
        kept = []
        for out in outputs.outputs:
            if (flight := flights.get(out.request_id)) is None:
                continue  # aborted or migrated meanwhile
            if not flight.proven:
                flight.proven = True
                if flight.share is not None:
                    flight.share.first()
            tokens = flight.tokens
            if not tokens:
                record = flight.record
                record.first_token_ms = (time.monotonic() - record.arrived) * 1000.0
            tokens.extend(out.new_token_ids)
            worker.made += len(out.new_token_ids)
            if out.finish_reason is not None and not self._finish(worker, flight, out):
                out.finish_reason = None
                if not out.new_token_ids:
                    continue
            if flight.attempt:
                out.request_id = flight.request_id
                if flight.record.migrated_tokens:
                    out.events = None  # vLLM has those of the first worker: queued, scheduled
            kept.append(out)
        outputs.outputs = kept
        if kept or outputs.scheduler_stats is not None:
            self.sink.outputs(worker.instance_id, outputs)

    # ---------------------------------------------------------------- inside

    def _on_result(self, worker: DecodeConnection, result: Any) -> None:
        """Take vLLM's UtilityOutput, which answers a call."""
        call = worker.calls.get(result.call_id)
        if call is None or call.done():
            return
        if (why := result.failure_message) is not None:
            call.set_exception(PeerUnavailable(f"decode worker {worker.instance_id}: {why}"))
        else:
            call.set_result(None if result.result is None else result.result.result)

    def _finish(self, worker: DecodeConnection, flight: Flight, out: Any) -> bool:
        """Forget a finished request. Returns False if its answer is not complete.

        The worker then either cut the answer short in its drain, or refused the request."""
        del worker.flights[flight.wire_id]
        fault, out.kv_transfer_params = front_wire.fault_of(out), None
        if out.finish_reason == _ABORTED and not worker.usable:
            # Our own aborts forget the flight first, so this one was cut by the worker's drain.
            self._try(flight, self._leave, worker, "stopped before it was done")
            return False
        if fault is not None:
            self._fail(flight, out.stop_reason, OURS if fault is Fault.OURS else REFUSED)
            out.new_token_ids = []
            return False
        self._over(flight, True)
        return True

    def _over(self, flight: Flight, answered: bool = False, error: str = "") -> None:
        """Forget a request. Without an answer and an error its client has left."""
        self.flights.pop(flight.request_id, None)
        flight.stop_waiting()
        if answered:
            flight.record.answered(flight.request.sampling_params)
        self.requests.over(flight.record, len(flight.tokens), error)
        self.balancer.left(flight)
        self.suspects.on_end(flight, finished=answered)

    def _try(self, flight: Flight, step: Callable[..., None], *args: Any) -> None:
        """Run one step of a request that has not ended. An exception ends this request alone."""
        if self.flights.get(flight.request_id) is not flight:
            return  # it ended with another choice of its answer
        try:
            step(flight, *args)
        except Exception as exc:
            _log.exception("%s cannot be sent to a worker", flight.record.key, extra=ids_of(flight))
            self._fail(flight, explained(exc, "the frontend"), OURS)

    def route(
        self, flight: Flight, now: float, to: Sequence[DecodeConnection] | None = None
    ) -> None:
        """Step 2: send a request to a worker, or let it wait for one. to: None: to any."""
        # An answer that was at no death goes on, although one like it is refused.
        innocent = flight.tokens and not flight.deaths
        if not innocent and (refusal := self.suspects.refusal(flight)):
            self._fail(flight, refusal, REFUSED)
            return
        ready = [worker for worker in to or self.workers if worker is not flight.avoid]
        workers = ready
        if flight.room:
            workers = [w for w in ready if w.welcome and w.welcome.max_model_len >= flight.room]
        # `suspects` soon ends one that is guilty, or finds that it is not.
        if not workers or guilty(flight):
            if ready and not workers:
                why = f"no other has room for {flight.room} tokens"
                flight.failure = flight.failure.replace(NO_WORKER, why)
            if flight.timer is None:
                self._hold(flight, now + self.waits.first)
            return
        around = self.suspects.around(flight, workers, now)
        if not around:
            until = now + self.waits.first
            self._hold(flight, max(until, flight.timer.when()) if flight.timer else until)
            self._loop.call_later(self.waits.look, self._soon, (flight,))
            return
        flight.stop_waiting()
        self._send(flight, self.balancer.choose(flight, around, now))

    def _hold(self, flight: Flight, until: float) -> None:
        """Let a request wait for a worker. until: when it fails, by the loop's clock."""
        flight.stop_waiting()
        flight.timer = self._loop.call_at(until, lambda: self._fail(flight, flight.failure))

    def _soon(self, flights: Iterable[Flight]) -> None:
        """Place these requests soon, in slices, if they wait."""
        self._queue |= {flight.request_id: flight for flight in flights}
        if not self._placing:
            self._placing = True
            self._loop.call_soon(self._place)

    def place_all(self) -> None:
        """Place all soon that wait, the innocent first."""
        waiting = (flight for flight in self.flights.values() if flight.timer is not None)
        self._soon(sorted(waiting, key=likely))

    def _place(self) -> None:
        # Not by the queue: its last slice leaves it empty, and this call is still to come.
        self._placing = bool(self._queue)
        if not self._placing:
            return
        # First, so that an exception below stops none of the others.
        self._loop.call_soon(self._place)
        for request_id in list(itertools.islice(self._queue, SLICE)):
            flight = self._queue.pop(request_id)
            if flight.timer is not None:
                self._try(flight, self.route, self._loop.time())

    def _send(self, flight: Flight, worker: DecodeConnection) -> None:
        if flight.tokens:
            request = migration.migration_request(flight.request, flight.tokens)
        else:
            request = copy.copy(flight.request)
        flight.wire_id = front_wire.attempt_id(flight.request_id, flight.attempt)
        request.request_id = flight.wire_id
        to = flight.record.to(worker.instance_id)
        request.trace_headers = to.headers(request.trace_headers)
        try:
            frames = self.codec.encode(request, self.balancer.holder(flight, worker))
        except (ValueError, OverflowError) as exc:  # e.g. an integer too large for msgpack
            self._fail(flight, f"the request cannot be sent to a decode worker: {exc}", REFUSED)
            return
        flight.worker, flight.proven, flight.waits_since = worker, False, 0.0
        flight.avoid = None  # it may have recovered by the time that this worker is lost
        worker.flights[flight.wire_id] = flight
        self.requests.sent(flight.wire_id, flight.record, to)
        worker.send(front_wire.ADD, *frames)
        if flight.tokens:
            counters.MIGRATED.labels("sent").inc()
        if flight.record.route_ms is None:
            flight.record.route_ms = (time.monotonic() - flight.record.submitted) * 1000.0

    def _leave(self, flight: Flight, worker: DecodeConnection, how: str) -> None:
        """Send a request to another worker, or fail it. `worker` is lost or has dropped it."""
        self.balancer.left(flight)
        flight.worker = None
        flight.attempt += 1
        reason = f"decode worker {worker.instance_id} {how}"
        flight.record.left(reason)
        if flight.tokens:
            flight.record.migrated_tokens = len(flight.tokens)
            reason += f" after {len(flight.tokens)} tokens of this answer"
            why = self.never or migration.why_not(flight.request, flight.tokens)
            if why:
                message = f"{reason}, and another cannot continue it exactly: {why}; send it again"
                self._fail(flight, message, "not_exact")
                return
        if flight.attempt >= MAX_MIGRATIONS:
            self._fail(flight, f"{reason}; given up after {flight.attempt} attempts", "given_up")
            return
        if not flight.room and worker.welcome is not None:
            # The next worker must have room for the same answer.
            most = worker.welcome.max_model_len
            flight.room = min(migration.room_for(flight.request), most)
        waits, now = self.waits, self._loop.time()
        wait = max(waits.least, min(waits.most, worker.heard_at + waits.stalled - now))
        if guilty(flight):
            wait += waits.sure
        flight.failure = f"{reason} and {NO_WORKER}"
        self._hold(flight, now + max(wait, waits.restart))
        self._soon((flight,))

    def _fail(self, flight: Flight, message: str, result: str = "no_worker") -> None:
        if self.flights.get(flight.request_id) is not flight:
            return  # it ended with another choice of its answer
        self._over(flight, error=message)
        if flight.worker is not None:
            flight.worker.flights.pop(flight.wire_id, None)
        if result != REFUSED:
            counters.FAILED.inc()
        if flight.tokens:
            counters.MIGRATED.labels(result).inc()
        _log.warning("request %s failed: %s", flight.record.key, message, extra=ids_of(flight))
        try:
            self.sink.failed(flight.request_id, message, _FAULTS.get(result, Fault.WORKERS))
        except Exception:
            _log.exception("nobody could be told that request %s failed", flight.record.key)


def _to_come(flight: Flight) -> int:
    """How many tokens of the answer are to come at most."""
    most: int = flight.request.sampling_params.max_tokens
    return most - len(flight.tokens)
