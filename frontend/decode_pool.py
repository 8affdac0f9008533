"""Which decode workers exist, and which connections may take requests.

Follows the registry's `workers/decode` keys by watch. A worker of our model gets one
`DecodeConnection`; what happens on a link is passed to the `Dispatcher`. Two sources of truth are
kept apart on purpose: the connection says whether a worker is alive, the registry whether it should
get new requests. A worker whose key is gone while its connection lives (an etcd outage outlived its
lease) keeps its streams, and takes new requests only while no listed worker is ready.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import zmq

from pullfill.engine import front_wire
from pullfill.errors import BadMessage
from pullfill.frontend import metrics
from pullfill.frontend.decode_connection import ConnectionState, DecodeConnection, process_of
from pullfill.frontend.dispatch import Dispatcher
from pullfill.net.security import ClusterKey
from pullfill.runtime import log
from pullfill.wire import WorkerRecord, WorkerState

_log = log.get("frontend.pool")

DECODE = "decode"
REOPEN_S = 0.5
IDLE_TICKS = 2
"""A worker that has no request of ours is asked every so many ticks: many are idle, and each answer
wakes this process."""
HUNG_S = 60.0
"""A worker whose engine answers no PING for so long is lost even if its I/O thread still lives."""


class Directory(Protocol):
    """What this room needs of `registry.Directory`."""

    def workers(self, role: str) -> Mapping[str, WorkerRecord]: ...

    def subscribe(self, callback: Callable[[Any, Any], None]) -> Any: ...


class WorkerPool:
    """All links of this frontend. `start` after `Dispatcher.bind`; `stop` closes every link.

    names: under which of a worker's names (`model`, `model_path`) it serves our model. key: the
    cluster key, if the cluster has one.
    """

    def __init__(
        self,
        directory: Directory,
        hello: front_wire.FrontendHello,
        names: Sequence[str],
        key: ClusterKey | None = None,
    ) -> None:
        self._directory = directory
        self._hello = hello
        self._names = frozenset(names)
        self._key = key
        self._dispatcher: Dispatcher | None = None
        self._context: zmq.Context[Any] = zmq.Context(1)
        self._links: dict[str, DecodeConnection] = {}
        self._lost: dict[str, str] = {}
        self._refused: dict[str, tuple[str, str]] = {}
        self._ready = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._stopped = False
        self._usable: list[DecodeConnection] = []

    async def start(self, dispatcher: Dispatcher) -> None:
        """Connect to what is listed and follow changes."""
        self._dispatcher = dispatcher
        self._directory.subscribe(lambda old, new: self.refresh())
        self.refresh()
        self._ticker = asyncio.create_task(self._tick(), name="frontend-ping")

    async def stop(self) -> None:
        """Close all links. Requests still at workers are aborted there by our BYE."""
        self._stopped = True
        if self._ticker is not None:
            self._ticker.cancel()
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._update()
        # The last BYE frames leave within the sockets' linger.
        await asyncio.get_running_loop().run_in_executor(None, self._context.term)

    # ---------------------------------------------------------------- questions

    def candidates(self) -> Sequence[DecodeConnection]:
        """ControlConnections that may take a new request, best tier only."""
        return self._usable

    async def wait_ready(self, timeout_s: float) -> bool:
        """Whether a worker can take requests, waiting at most `timeout_s` for the first."""
        if self._usable:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return False
        return True

    def refusals(self) -> list[str]:
        """For people: workers that are listed but not usable by this frontend, and why."""
        reasons = {name: reason for name, (_, reason) in self._refused.items()}
        reasons |= {name: link.trouble for name, link in self._links.items() if link.trouble}
        return [f"{name}: {reason}" for name, reason in sorted(reasons.items())]

    def state_of(self, instance_id: str) -> ConnectionState | None:
        """The connection's state; None if there is none."""
        link = self._links.get(instance_id)
        return link.state if link is not None else None

    # ---------------------------------------------------------------- registry

    def refresh(self) -> None:
        """Bring links in line with the registry. Cheap; called on every change."""
        if self._stopped:
            return
        records = dict(self._directory.workers(DECODE))
        for name in [n for n in self._refused if n not in records]:
            del self._refused[name]
        for name, process in list(self._lost.items()):
            if name not in records or process != process_of(records[name]):
                del self._lost[name]
                self.dispatcher.suspects.on_gone(process)
        for name, record in records.items():
            self._follow(name, record)
        for name, link in list(self._links.items()):
            link.listed = name in records
            if not link.listed and link.state is ConnectionState.CONNECTING:
                link.close()
                del self._links[name]
        self._update()

    def _follow(self, name: str, record: WorkerRecord) -> None:
        link = self._links.get(name)
        if link is not None:
            if link.record.data == record.data:
                link.record = record
                return
            link.lose("it moved to another address")
        if record.state is not WorkerState.READY or not record.data:
            return
        if self._refused.get(name, ("",))[0] == record.incarnation:
            return
        if self._names.isdisjoint((record.model, record.model_path)):
            reason = f"serves model {record.model!r}, not {self._hello.model!r}"
            self._refuse(name, record, reason)
            return
        assert self._dispatcher is not None
        try:
            self._links[name] = DecodeConnection(
                self._context, record, self._hello, self, self._key
            )
        except zmq.ZMQError as exc:
            self._refuse(name, record, f"cannot connect to {record.data!r}: {exc}")

    def _refuse(self, name: str, record: WorkerRecord, reason: str) -> None:
        self._refused[name] = (record.incarnation, reason)
        _log.warning("decode worker %s is not used: %s", name, reason)

    # ---------------------------------------------------------------- ConnectionOwner

    def on_ready(self, link: DecodeConnection) -> None:
        _log.info("decode worker %s takes requests (%s)", link.instance_id, link.record.data)
        self._refused.pop(link.instance_id, None)
        if self._lost.get(link.instance_id) == link.process:
            del self._lost[link.instance_id]
        self._update()
        self.dispatcher.on_ready(link)

    def on_draining(self, link: DecodeConnection) -> None:
        _log.info("decode worker %s drains", link.instance_id)
        self._update()

    def on_refused(self, link: DecodeConnection, reason: str) -> None:
        self._links.pop(link.instance_id, None)
        self._refuse(link.instance_id, link.record, reason)
        self._update()

    def on_lost(self, link: DecodeConnection, reason: str, died: bool = True) -> None:
        if self._links.get(link.instance_id) is link:
            del self._links[link.instance_id]
        if link.flights or link.record.state is WorkerState.READY:
            _log.warning("decode worker %s is lost: %s", link.instance_id, reason)
        self._update()
        if died:
            self._lost[link.instance_id] = link.process
        self.dispatcher.on_lost(link, reason, died)
        asyncio.get_running_loop().call_later(REOPEN_S, self.refresh)

    def on_message(self, link: DecodeConnection, kind: bytes, frames: list[Any]) -> None:
        try:
            self.dispatcher.on_message(link, kind, frames)
        except BadMessage:
            metrics.BAD_MESSAGES.inc()
            raise

    @property
    def dispatcher(self) -> Dispatcher:
        assert self._dispatcher is not None, "start() comes first"
        return self._dispatcher

    # ---------------------------------------------------------------- inside

    def _update(self) -> None:
        usable = [link for link in self._links.values() if link.usable]
        best = [link for link in usable if link.listed and link.record.state is WorkerState.READY]
        draining = sum(link.state is ConnectionState.DRAINING for link in self._links.values())
        self._usable = best or [link for link in usable if not link.listed]
        if self._usable:
            self._ready.set()
        else:
            self._ready.clear()
        metrics.DECODE_WORKERS.labels("ready").set(len(self._usable))
        metrics.DECODE_WORKERS.labels("draining").set(draining)
        metrics.DECODE_WORKERS.labels("refused").set(len(self._refused))

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        for number in itertools.count():
            await asyncio.sleep(front_wire.PING_INTERVAL_S)
            now = loop.time()
            for link in list(self._links.values()):
                if link.state is ConnectionState.CONNECTING:
                    continue
                if now - link.heard_at > HUNG_S:
                    link.lose(f"it answered nothing for {HUNG_S:g} s")
                elif link.flights or number % IDLE_TICKS == 0:
                    link.send(front_wire.PING)
            metrics.IN_FLIGHT.set(self.dispatcher.in_flight)
