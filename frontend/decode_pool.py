"""Which decode workers exist, and which connections may take requests.

The pool watches the registry's `workers/decode` keys. It opens one `DecodeConnection` to each
worker of our model, and passes what happens on it to the `Dispatcher`.

The connection says whether a worker is alive. The registry says whether it should get requests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from pullfill.engine import front_wire
from pullfill.errors import IncompatibleError
from pullfill.frontend import counters
from pullfill.frontend.decode_connection import ConnectionState, DecodeConnection
from pullfill.frontend.dispatch import NO_WORKER, Dispatcher
from pullfill.frontend.routing.prefixes import Prefixes
from pullfill.net.security import ClusterKey
from pullfill.registry.directory import Directory
from pullfill.runtime import log
from pullfill.wire import WorkerRecord, WorkerState

_log = log.get("frontend.decode_pool")

DECODE = "decode"
# A worker that has no request of ours is asked every so many ticks: many are idle, and each
# answer wakes this process.
IDLE_TICKS = 2


def refuse_other_models(
    directory: Directory, names: Sequence[str], model: str, namespace: str
) -> None:
    """Raise IncompatibleError, naming it, if a worker serves another model.

    names: as of `WorkerPool`. model: that of this frontend."""
    # A namespace has one model. A frontend of another one would never serve a request.
    for record in (*directory.workers(DECODE).values(), *directory.workers("prefill").values()):
        if not _fits(record, names):
            raise IncompatibleError(
                f"this frontend cannot join namespace {namespace!r}: its model is {model!r}, but "
                f"that of {record.role} worker {record.instance_id} on {record.host} is "
                f"{record.model!r}; start it with the same --model and --served-model-name, or in "
                "another --namespace",
                field="model",
            )


def _fits(record: WorkerRecord, names: Sequence[str]) -> bool:
    return record.model in names or record.model_path in names


@dataclass(slots=True, eq=False)
class WorkerPool:
    """All connections of this frontend, from `start` to `stop`.

    names: a worker serves our model if its `model` or `model_path` is one of these.
    dispatcher: hears which workers may take requests, and what they send.
    prefixes: which worker holds which blocks.
    key: the cluster key, if the cluster has one.
    """

    directory: Directory
    hello: front_wire.FrontendHello
    names: Sequence[str]
    dispatcher: Dispatcher
    prefixes: Prefixes
    key: ClusterKey | None = None
    _context: zmq.Context[Any] = field(default_factory=lambda: zmq.Context(1))
    _connections: dict[str, DecodeConnection] = field(default_factory=dict)
    # Of workers that are not used: the incarnation, and why.
    _refused: dict[str, tuple[str, str]] = field(default_factory=dict)
    _ticker: asyncio.Task[None] | None = None
    _stopped: bool = False

    def start(self) -> None:
        """Connect to what is listed and follow changes."""
        self.directory.subscribe(lambda old, new: self.refresh())
        self.refresh()
        self._ticker = asyncio.create_task(self._tick(), name="frontend-ping")

    async def stop(self) -> None:
        """Close all connections. Requests still at workers are aborted there by our BYE."""
        self._stopped = True
        if self._ticker is not None:
            self._ticker.cancel()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._update()
        # The last BYE frames leave within the sockets' linger.
        await asyncio.get_running_loop().run_in_executor(None, self._context.term)

    def trouble(self) -> str:
        """Return why no worker can take requests. Empty: one can."""
        return "" if self.dispatcher.workers else NO_WORKER

    def refusals(self) -> list[str]:
        """Return, for people, which listed workers this frontend cannot use, and why."""
        reasons = {name: reason for name, (_, reason) in self._refused.items()}
        reasons |= {
            name: connection.trouble
            for name, connection in self._connections.items()
            if connection.trouble
        }
        return [f"{name}: {reason}" for name, reason in sorted(reasons.items())]

    def made(self) -> dict[str, int]:
        """Return how many tokens each worker has sent over its connection."""
        return {name: connection.made for name, connection in self._connections.items()}

    def refresh(self) -> None:
        """Bring connections in line with the registry. Cheap; called on every change."""
        if self._stopped:
            return
        records = dict(self.directory.workers(DECODE))
        self._refused = {name: why for name, why in self._refused.items() if name in records}
        for name, record in records.items():
            self._follow(name, record)
        for name, connection in list(self._connections.items()):
            if name not in records and connection.state is ConnectionState.CONNECTING:
                connection.close()
                del self._connections[name]
        self._update()

    def _follow(self, name: str, record: WorkerRecord) -> None:
        connection = self._connections.get(name)
        if connection is not None:
            if connection.record.data == record.data:
                connection.record = record
                return
            connection.lose("it moved to another address")
        if record.state is not WorkerState.READY or not record.data:
            return
        if self._refused.get(name, ("",))[0] == record.incarnation:
            return
        if not _fits(record, self.names):
            reason = f"serves model {record.model!r}, not {self.hello.model!r}"
            self._refuse(name, record, reason)
            return
        try:
            self._connections[name] = DecodeConnection(
                self._context, record, self.hello, self, self.key
            )
        except zmq.ZMQError as exc:
            self._refuse(name, record, f"cannot connect to {record.data!r}: {exc}")

    def _refuse(self, name: str, record: WorkerRecord, reason: str) -> None:
        self._refused[name] = (record.incarnation, reason)
        _log.warning("decode worker %s is not used: %s", name, reason)

    def on_ready(self, connection: DecodeConnection) -> None:
        _log.info(
            "decode worker %s takes requests (%s)", connection.instance_id, connection.record.data
        )
        self._refused.pop(connection.instance_id, None)
        self._update()
        self.prefixes.follow(connection, connection.heard_at)
        self.dispatcher.on_ready(connection)

    def on_draining(self, connection: DecodeConnection) -> None:
        _log.info("decode worker %s drains", connection.instance_id)
        self._update()

    def on_refused(self, connection: DecodeConnection, reason: str) -> None:
        self._connections.pop(connection.instance_id, None)
        self._refuse(connection.instance_id, connection.record, reason)
        self._update()

    def on_lost(self, connection: DecodeConnection, reason: str, died: bool = True) -> None:
        self._connections.pop(connection.instance_id, None)
        if connection.flights or connection.record.state is WorkerState.READY:
            _log.warning("decode worker %s is lost: %s", connection.instance_id, reason)
        self._update()
        self.prefixes.forget(connection)
        self.dispatcher.on_lost(connection, reason, died)
        asyncio.get_running_loop().call_later(0.5, self.refresh)

    def on_message(self, connection: DecodeConnection, kind: bytes, frames: list[Any]) -> None:
        """Handle a message. Raises BadMessage if it cannot be read."""
        if kind == front_wire.BLKS and len(frames) == 1:
            self.prefixes.take(connection, frames[0].buffer, connection.heard_at)
        else:
            self.dispatcher.on_message(connection, kind, frames)

    def _update(self) -> None:
        usable = [connection for connection in self._connections.values() if connection.usable]
        listed = self.directory.workers(DECODE)
        best = [
            connection
            for connection in usable
            if connection.instance_id in listed and connection.record.state is WorkerState.READY
        ]
        draining = sum(
            connection.state is ConnectionState.DRAINING
            for connection in self._connections.values()
        )
        # If etcd is away for longer than a lease, a worker's key goes while its connection lives.
        # Such a worker keeps its streams, and gets new requests only while no listed one is ready.
        self.dispatcher.workers = best or [c for c in usable if c.instance_id not in listed]
        self.dispatcher.balancer.placer.peers = max(1, len(self.directory.workers("frontend")))
        counters.DECODE_WORKERS.labels("ready").set(len(self.dispatcher.workers))
        counters.DECODE_WORKERS.labels("draining").set(draining)
        counters.DECODE_WORKERS.labels("refused").set(len(self._refused))

    async def _tick(self) -> None:
        # A worker whose engine answers nothing for so long is lost even if its I/O thread lives.
        hung_s = 10 * front_wire.SILENCE_S
        loop = asyncio.get_running_loop()
        for number in itertools.count():
            await asyncio.sleep(front_wire.PING_INTERVAL_S)
            now = loop.time()
            for connection in list(self._connections.values()):
                if connection.state is ConnectionState.CONNECTING:
                    continue
                if now - connection.heard_at > hung_s:
                    connection.lose(f"it answered nothing for {hung_s:g} s")
                elif connection.flights or number % IDLE_TICKS == 0:
                    connection.send(front_wire.PING)
            self.prefixes.tick(now)
            counters.IN_FLIGHT.set(len(self.dispatcher.flights))
