"""The control connections to the decode workers of our model that the directory lists.

A connection is made in two cases: this worker is one of those that stay connected to the decode
worker (standing.py), or a job of that decode worker was pulled. If it is needed for neither for a
minute, it is closed. In a cluster of few prefill workers all connections stay open.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from pullfill.config import STANDING_LINKS
from pullfill.errors import PeerUnavailable
from pullfill.net.security import ClusterKey
from pullfill.prefill_worker.control_connection import ControlConnection
from pullfill.prefill_worker.standing import Standing
from pullfill.prefill_worker.transfer_worker import TransferWorker
from pullfill.registry.directory import Directory
from pullfill.runtime import log
from pullfill.runtime.idle import IDLE_S
from pullfill.wire import Compat, Hello, Load, Revoke, Trial, WorkerRecord, WorkerState

logger = log.get("prefill_worker.control_connections")

_APPEAR_S = 2.0
"""How long a job waits for the connection to a decode worker that is in the directory."""
_UNKNOWN_S = 0.1
"""How long a job waits for a decode worker that the directory never listed. The directory may learn
of it a little later than the job comes."""
_REMEMBERED = 10_000
LOAD_S = 0.1
"""A report of this worker's load is used again for this long."""


class ControlConnections:
    """See the module. asyncio thread only.

    compat: decode workers with another one are never connected.
    most: number of prefill workers that stay connected to one decode worker.
    idle_s: a connection that nothing needs is closed after this long.
    """

    def __init__(
        self,
        directory: Directory,
        hello: Hello,
        compat: Compat,
        open_transfer_worker: Callable[[WorkerRecord], Awaitable[TransferWorker]],
        on_revoke: Callable[[ControlConnection, Revoke], None],
        on_lost: Callable[[ControlConnection], None],
        key: ClusterKey | None = None,
        on_trial: Callable[[Trial], None] = lambda _trial: None,
        most: int = STANDING_LINKS,
        idle_s: float = IDLE_S,
    ) -> None:
        self._directory = directory
        self._hello = hello
        self._compat = compat
        self._open_transfer_worker = open_transfer_worker
        self._on_revoke = on_revoke
        self._on_lost = on_lost
        self._key = key
        self._on_trial = on_trial
        self._idle_s = idle_s
        self._standing = Standing(hello.prefill_instance, most)
        self._records: dict[str, WorkerRecord] = {}
        self._connections: dict[str, ControlConnection] = {}
        # Decode workers that left the directory. With a record: it may still drain, so one attempt
        # to connect is made. None: that was tried.
        self._gone: dict[str, WorkerRecord | None] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._started = False
        self._unsubscribe: Callable[[], None] = lambda: None
        self._leaving = False
        self._why_not = ""
        self._loaded, self._loaded_at = Load(), -math.inf
        self.activity: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.load: Callable[[], Load] = Load
        """As in `ControlConnection`. Set both before `start`."""
        self._closed = False

    def start(self) -> None:
        """Connect to the decode workers in the directory, and follow its changes."""
        self._unsubscribe = self._directory.subscribe(self._on_change)
        for role in ("prefill", "decode"):
            for record in self._directory.workers(role).values():
                self._on_change(None, record)
        self._started = True
        self._refresh()

    def leave(self) -> None:
        """Tell every decode worker that this worker drains.

        A decode worker that knows no other prefill worker then prefills locally."""
        self._leaving = True
        for connection in self._connections.values():
            connection.leave()

    def pause(self, why: str) -> None:
        """Tell every decode worker why this worker pulls no jobs. Empty: it pulls again."""
        self._why_not = why
        for connection in self._connections.values():
            connection.pause(why)

    async def close(self) -> None:
        self._closed = True
        self._unsubscribe()
        for connection in list(self._connections.values()):
            await connection.close()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def knows(self, instance_id: str) -> bool:
        """Whether the decode worker is in the directory, as far as etcd tells."""
        return instance_id in self._records or not self._directory.reachable

    @property
    def connected(self) -> list[str]:
        return sorted(i for i, connection in self._connections.items() if connection.connected)

    @property
    def routes(self) -> dict[str, dict[str, object]]:
        """The transport that is used to each decode worker that was written to."""
        routes = {
            instance_id: connection.transfer.route
            for instance_id, connection in self._connections.items()
        }
        return {name: route for name, route in routes.items() if route is not None}

    def is_up(self, instance_id: str) -> bool:
        """Whether `find` may succeed at once: it is connected, or nobody has tried yet."""
        connection = self._connections.get(instance_id)
        return instance_id in self._records if connection is None else connection.connected

    async def find(self, instance_id: str) -> ControlConnection:
        """Return the connected connection to a decode worker. Makes it if there is none.

        Waits briefly for a decode worker that the directory does not list yet, but not for one that
        has left it. Raises PeerUnavailable."""
        deadline = asyncio.get_running_loop().time() + _UNKNOWN_S
        while (connection := self._connection_to(instance_id)) is None:
            if instance_id in self._gone:
                raise PeerUnavailable(f"decode worker {instance_id} left the directory")
            left = deadline - asyncio.get_running_loop().time()
            self._changed.clear()
            try:
                async with asyncio.timeout(max(left, 0.0)):
                    await self._changed.wait()
            except TimeoutError:
                raise PeerUnavailable(f"decode worker {instance_id} is not known") from None
        await connection.wait_up(_APPEAR_S)
        return connection

    def _connection_to(self, instance_id: str) -> ControlConnection | None:
        """Return the connection, or make one."""
        if (connection := self._connections.get(instance_id)) is not None or self._closed:
            return connection
        if (record := self._records.get(instance_id)) is not None:
            return self._open(record)
        if (record := self._gone.get(instance_id)) is not None:
            # It is dead, or it drains and still has jobs. One attempt to connect tells which.
            self._gone[instance_id] = None
            connection = self._open(record)
            connection.retired = True
            return connection
        return None

    # ------------------------------------------------------------------ connections

    def _open(self, record: WorkerRecord, standing: bool = False) -> ControlConnection:
        connection = self._connections[record.instance_id] = ControlConnection(
            record, self._hello, self._open_transfer_worker, self._on_revoke, self._on_lost,
            self._key, on_trial=self._on_trial, on_idle=self._on_idle, idle_s=self._idle_s,
        )  # fmt: skip
        connection.standing = standing
        connection.activity = lambda: self.activity()
        connection.load = self._load
        connection.when_over(self._on_end)
        if self._leaving:
            connection.leave()
        connection.pause(self._why_not)
        return connection

    def _load(self) -> Load:
        """Return this worker's load, at most LOAD_S old. Each claim carries it."""
        now = asyncio.get_running_loop().time()
        if now - self._loaded_at >= LOAD_S:
            self._loaded, self._loaded_at = replace(self.load(), pool=self._standing.pool), now
        return self._loaded

    def _refresh(self) -> None:
        """Make the standing connections. Those that are not standing any more end when idle."""
        if not self._started or self._closed:
            return
        wanted = self._standing.wanted()
        for name, connection in self._connections.items():
            connection.standing = name in wanted
        for name in wanted - self._connections.keys():
            self._open(self._records[name], standing=True)

    def _on_idle(self, connection: ControlConnection) -> None:
        """Close a connection that nothing needs."""
        if self._connections.get(connection.record.instance_id) is connection:
            logger.debug("closing the idle control connection to %s", connection.record.instance_id)
            del self._connections[connection.record.instance_id]
        self._close(connection)

    def _close(self, connection: ControlConnection) -> None:
        task = asyncio.ensure_future(connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _on_end(self, connection: ControlConnection) -> None:
        """Handle a connection that has ended by itself, because its decode worker is gone."""
        if self._connections.get(connection.record.instance_id) is connection:
            del self._connections[connection.record.instance_id]
            if not connection.retired:  # the key came back while the connection was ending
                self._refresh()

    # ------------------------------------------------------------------ the directory

    def _on_change(self, old: WorkerRecord | None, new: WorkerRecord | None) -> None:
        record = new or old
        if record is None:
            return
        if record.role == "prefill":
            pulls = new is not None and new.state is WorkerState.READY and self._fits(new)
            self._standing.prefill(record.instance_id, pulls)
        elif record.role == "decode" and record.instance_id != self._hello.prefill_instance:
            if new is None:
                self._left(record.instance_id)
            else:
                self._came(new)
            self._standing.decode(record.instance_id, record.instance_id in self._records)
        self._refresh()
        self._changed.set()

    def _fits(self, record: WorkerRecord) -> bool:
        return record.compat is not None and not self._compat.differs_from(record.compat)

    def _left(self, name: str) -> None:
        record, connection = self._records.pop(name, None), self._connections.get(name)
        self._gone[name] = record if connection is None else None
        while len(self._gone) > _REMEMBERED:
            del self._gone[next(iter(self._gone))]
        if connection is not None:
            connection.retire()

    def _came(self, new: WorkerRecord) -> None:
        """Handle a decode worker that is new, or whose record has changed."""
        name = new.instance_id
        self._gone.pop(name, None)
        connection = self._connections.get(name)
        usable = self._fits(new) and bool(new.control)
        if usable:
            self._records[name] = new
        else:
            self._records.pop(name, None)
            self._warn(new)
        if connection is None:
            return
        before = connection.record
        if (before.incarnation, before.control) == (new.incarnation, new.control):
            connection.retired = False
        else:
            del self._connections[name]
            self._close(connection)

    def _warn(self, record: WorkerRecord) -> None:
        """Warn about a decode worker that serves our model but is not compatible."""
        theirs = record.compat
        if theirs is None or theirs.model != self._compat.model:
            return
        if differences := self._compat.differs_from(theirs):
            field, our_value, their_value = differences[0]
            logger.warning(
                "not connecting to %s: its %s is %r, ours is %r",
                record.instance_id, field, their_value, our_value,
            )  # fmt: skip
