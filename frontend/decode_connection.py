"""One ZMQ connection from this frontend to one decode worker.

Life: `connecting` → welcome → `ready` → (`draining`) → `closed`. On NOPE `connecting` → `closed`.
A connection that breaks is closed for good. The dispatcher sends its requests elsewhere, and the
pool opens a new connection if the worker is still listed.

Owned by `decode_pool.WorkerPool`, used on its event loop only.
"""

from __future__ import annotations

import asyncio
import enum
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from pullfill import wire
from pullfill.engine import front_wire
from pullfill.errors import BadMessage
from pullfill.net import curve
from pullfill.net.security import ClusterKey
from pullfill.net.this_host import host_id
from pullfill.runtime import log

if TYPE_CHECKING:
    from pullfill.frontend.decode_pool import WorkerPool
    from pullfill.frontend.flight import Flight

_log = log.get("frontend.decode_connection")

# Messages read before other callbacks of the loop get their turn.
_BATCH = 64
# Messages read after the connection broke. It takes less than the 200 ms until ZMQ connects
# again.
_LAST = 2048


class ConnectionState(enum.StrEnum):
    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    CLOSED = "closed"


class DecodeConnection:
    """A DEALER socket connected to `record.data`. It sends HELO at once.

    pool: is told what happens, on the loop, but never from inside `send`.
    flights: requests that this worker has now, by the ID they have at the worker.
    calls: engine utilities that it has been asked for and has not answered.
    key: the cluster key. The worker must hold the same one.
    trouble: why the connection is still connecting, in words for people.
    far: whether the worker runs on another host, whose clock differs.
    made: tokens of answers that it has sent.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        record: wire.WorkerRecord,
        hello: front_wire.FrontendHello,
        pool: WorkerPool,
        key: ClusterKey | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = pool
        self._key = key
        self.trouble = ""
        self.record = record
        self.state = ConnectionState.CONNECTING
        self.welcome: front_wire.DecodeWelcome | None = None
        self.flights: dict[str, Flight] = {}
        self.calls: dict[int, asyncio.Future[Any]] = {}
        self.made = 0
        self.far = record.host_id != host_id()
        self._ahead: float | None = None
        self._breaks: list[int] = []
        self.heard_at = self._loop.time()
        self._socket = context.socket(zmq.DEALER)
        front_wire.set_options(self._socket)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 200)
        self._socket.setsockopt(
            zmq.ROUTING_ID, f"{hello.frontend_instance}.{secrets.token_hex(4)}".encode()
        )
        if key is not None:
            curve.present(self._socket, key)
            # ZMQ repeats a failed handshake without end. This makes the pauses longer.
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | curve.HANDSHAKE_FAILED
        )
        # One engine step of the worker is one callback: ZMQ's file descriptor is watched,
        # edge-triggered, without a future per message.
        self._loop.add_reader(self._monitor.fileno(), self._on_readable)
        self._loop.add_reader(self._socket.fileno(), self._on_readable)
        self._socket.connect(record.data)
        self.send(front_wire.HELO, wire.encode(hello))
        self._loop.call_soon(self._on_readable)

    @property
    def instance_id(self) -> str:
        return self.record.instance_id

    @property
    def process(self) -> str:
        """A name of the worker's process. It changes if a worker restarts with the same id."""
        return f"{self.instance_id}@{self.record.pid}.{self.record.started_at}"

    @property
    def usable(self) -> bool:
        """Whether new requests may be sent here."""
        return self.state is ConnectionState.READY

    def send(self, kind: bytes, *frames: Any) -> None:
        """Queue one message; never blocks. Nothing happens on a closed connection."""
        if self.state is ConnectionState.CLOSED:
            return
        try:
            front_wire.send(self._socket, (kind, *frames), copy=False)
        except zmq.Again:
            self._loop.call_soon(self.lose, "it does not take what it is sent")
            return
        # ZMQ's file descriptor announces a message once, and sending may have used that up.
        if front_wire.readable(self._socket):
            self._loop.call_soon(self._on_readable)

    def abort(self, wire_ids: Sequence[str]) -> None:
        """Tell the worker to abort these requests, and stop tracking them on this connection.

        wire_ids: the IDs under which the requests were sent to the worker."""
        for wire_id in wire_ids:
            self.flights.pop(wire_id, None)
        self.send(front_wire.ABRT, front_wire.encode_list(wire_ids))

    def to_own_clock(self, outputs: Any) -> None:
        """Convert the times in a far worker's outputs to this host's clock."""
        # vLLM subtracts these times from each other, and a migrated answer has times of two
        # workers. The converted times are late by the delay of the first message.
        if self._ahead is None:
            self._ahead = outputs.timestamp - time.monotonic()
        outputs.timestamp -= self._ahead
        for out in outputs.outputs:
            for event in out.events or ():
                event.timestamp -= self._ahead

    def close(self) -> None:
        """Say BYE if the worker knows us, and free the sockets.

        Idempotent. The pool is not told."""
        if self.state is ConnectionState.CLOSED:
            return
        if self.state is not ConnectionState.CONNECTING:
            self.send(front_wire.BYE)
        self.state = ConnectionState.CLOSED
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(200)

    def _on_readable(self) -> None:
        # If the connection breaks, ZMQ makes another, and messages between the two are lost. ZMQ
        # tells of both before a message of the new connection can be read. So the messages are read
        # first, and handled if no new connection was told of.
        batch = self._received(_BATCH)
        self._read_events()
        if self._breaks:
            batch += self._received(_LAST)  # what arrived before the break still counts
            self._read_events()
        if zmq.EVENT_HANDSHAKE_SUCCEEDED in self._breaks:
            batch = []
        for frames in batch:
            self.heard_at = self._loop.time()
            try:
                self._handle(frames[0].bytes, frames[1:])
            except Exception as exc:
                # The message may have held a part of an answer. So no later part may be used.
                if not isinstance(exc, BadMessage):
                    _log.exception("a message of %s could not be handled", self.instance_id)
                self.lose(f"it sent something unreadable: {exc}", died=False)
            if self._socket.closed:
                return
        if self._breaks:
            self.lose("its connection broke")
        elif len(batch) == _BATCH:
            self._loop.call_soon(self._on_readable)

    def _received(self, most: int) -> list[list[zmq.Frame]]:
        """Return the messages that can be received now, at most so many."""
        batch: list[list[zmq.Frame]] = []
        while len(batch) < most and not self._socket.closed and front_wire.readable(self._socket):
            batch.append(front_wire.receive(self._socket))
        return batch

    def _handle(self, kind: bytes, frames: list[Any]) -> None:
        if kind == front_wire.PONG:
            return
        if kind == front_wire.HELO:
            self._on_welcome(frames)
        elif kind == front_wire.DRAIN:
            if self.state is ConnectionState.READY:
                self.state = ConnectionState.DRAINING
                self._pool.on_draining(self)
        elif kind == front_wire.GONE:
            self.lose("it had given us up", died=False)
        elif kind == front_wire.NOPE:
            reason = front_wire.text_of(frames[0]) if frames else "no reason given"
            self.close()
            self._pool.on_refused(self, reason)
        else:
            self._pool.on_message(self, kind, frames)

    def _on_welcome(self, frames: list[Any]) -> None:
        if self.state is not ConnectionState.CONNECTING or len(frames) != 1:
            return
        welcome = wire.decode(frames[0].bytes, front_wire.DecodeWelcome)
        if welcome.decode_instance != self.instance_id:
            self.lose(f"its address is now used by {welcome.decode_instance}")
            return
        self.welcome, self.trouble = welcome, ""
        self.state = ConnectionState.READY
        self._pool.on_ready(self)

    def _read_events(self) -> None:
        """Read what ZMQ tells of the connection. `_breaks` are the events since a break."""
        while not self._monitor.closed and front_wire.readable(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            if event & curve.HANDSHAKE_FAILED:
                self._on_handshake_failed(event)
            elif self._breaks or (event == zmq.EVENT_DISCONNECTED and not self.trouble):
                self._breaks.append(event)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.trouble = ""  # HELO leaves now: from here on a break may have lost it

    def _on_handshake_failed(self, event: int) -> None:
        """The keys of the two ends differ, or the worker died during the handshake."""
        if self._key is None:
            trouble = "it ends the handshake: has it a cluster key? Set [cluster] key_file here too"
        else:
            trouble = (
                f"it ends the handshake: has it no cluster key, or another than ours "
                f"({self._key.fingerprint})? Check [cluster] key_file on both"
            )
        # An error that names the cause (`PROTOCOL`, `AUTH`) is final. After others ZMQ tries again.
        if self.state is ConnectionState.CONNECTING and event != curve.NO_DETAIL:
            self.close()
            self._pool.on_refused(self, trouble)
        elif self.state is ConnectionState.CONNECTING and not self.trouble:
            self.trouble = trouble
            _log.warning("decode worker %s: %s", self.instance_id, trouble)

    def lose(self, reason: str, died: bool = True) -> None:
        """Close the connection, and tell the pool once that the worker cannot be reached over it.

        died: whether the worker's process may have died."""
        if self.state is ConnectionState.CLOSED:
            return
        self.close()
        self._pool.on_lost(self, reason, died)
