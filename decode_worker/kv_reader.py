"""Reads finished blocks out of another worker's KV memory into ours.

That is a prefill worker with `--kv-mode pull`, or another decode worker that holds a prefix
(prefix/holders.py). A read always ends: it succeeds, the other worker's fence refuses it, or the
connection breaks.

Lifecycle: made when a worker connects that can be read → `leave` when its connection ends → `close`
when this process ends. Our KV memory must live until `close` has returned.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pullfill.errors import HandoffError, IncompatibleError, PullfillError, TransferFailed
from pullfill.net.security import ClusterKey
from pullfill.options import WorkerOptions
from pullfill.runtime import failpoints, log, metrics
from pullfill.runtime.serial_executor import SerialExecutor
from pullfill.transfer.connect import choose, connect, peer_transports, pulled_over
from pullfill.transfer.contract import LocalMemory, PeerSession
from pullfill.wire import FenceToken, RegionDescriptor

logger = log.get("decode_worker.reader")

# Connects to one prefill worker's memory. Blocks. Raises PullfillError.
Open = Callable[[], PeerSession]

# Returns how to connect to a prefill worker's regions. Raises PullfillError if nothing can.
Reach = Callable[[Sequence[RegionDescriptor]], Open]


@dataclass(eq=False, repr=False)
class KvReader:
    """The memory of one other worker, and the thread on which it is read.

    readers: those that may still read. This one is among them until its reads have ended.
    within_reach: whether the last attempt to reach it has succeeded. If not, grants tell the worker
    to write instead, until it connects again."""

    instance_id: str
    open_session: Open
    readers: set[KvReader]
    within_reach: bool = field(init=False, default=True)
    _session: PeerSession | None = field(init=False, default=None)
    _closing: bool = field(init=False, default=False)
    # Of this worker alone, so a slow one delays only its own jobs.
    _thread: SerialExecutor = field(init=False, default_factory=SerialExecutor)

    def __post_init__(self) -> None:
        self.readers.add(self)

    @property
    def moved_bytes(self) -> int:
        """Bytes that the current session has moved so far."""
        session = self._session
        return 0 if session is None else session.moved_bytes

    @property
    def connected(self) -> bool:
        """Whether a session is open."""
        return self._session is not None

    async def read(
        self,
        fence: FenceToken,
        source: Sequence[int],
        target: Sequence[int],
        wanted: Callable[[], bool],
    ) -> tuple[int, float, str]:
        """Copy the worker's blocks `source` into our blocks `target`. Returns how many bytes moved
        in how many seconds, and the transport.

        After it has returned or raised, no thread touches the blocks. If it is cancelled, the copy
        goes on. Raises HandoffError, BadMessage and whatever `open_session` raises.

        wanted: called when its thread gets to this read, and again once the session is open. False:
        do not read."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._read, fence, list(source), list(target), wanted
        )

    def interrupt(self) -> None:
        """End a read that waits for the worker: it raises TransferFailed soon. Never blocks."""
        if (session := self._session) is not None:
            session.interrupt()

    def leave(self) -> None:
        """Take no more reads. Does not block. May be called after `close`."""
        # Reads that were asked for still run, because shared memory outlives its owner.
        try:
            self._thread.submit(self._over)
        except RuntimeError as exc:
            if not self._closing:
                logger.warning("closing the session to %s here: %s", self.instance_id, exc)
                self._let_go()  # nothing runs where a new thread is needed
            self.readers.discard(self)
        self._thread.shutdown(wait=False)

    def close(self) -> None:
        """Drop the reads that have not begun, interrupt the current one and wait for its end.

        Nothing is read afterwards. Idempotent, also after `leave`."""
        self._closing = True
        self.interrupt()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._let_go()

    def _read(
        self,
        fence: FenceToken,
        source: Sequence[int],
        target: Sequence[int],
        wanted: Callable[[], bool],
    ) -> tuple[int, float, str]:
        """Do one read. On its thread."""
        if not wanted():
            raise HandoffError("its job ended before it was read")
        session = self._session or self._connect()
        if self._closing:
            raise HandoffError("this worker is leaving")
        if not wanted():  # opening the session may have taken seconds
            raise HandoffError("its job ended before it was read")
        failpoints.hit("decode.before_read")
        started = time.perf_counter()
        try:
            nbytes = session.move("read", fence, source, target)
        except TransferFailed:
            self._let_go()  # whether it can be reached at all shows when it is made anew
            raise
        seconds, transport = time.perf_counter() - started, session.transport
        metrics.KV_READ_BYTES.labels(transport).inc(nbytes)
        metrics.KV_READ_SECONDS.labels(transport).observe(seconds)
        return nbytes, seconds, transport

    def _connect(self) -> PeerSession:
        try:
            session = self._session = self.open_session()
        except PullfillError as exc:
            if self.within_reach:
                self.within_reach = False
                logger.warning("cannot read from %s: %s", self.instance_id, exc)
            raise
        self.within_reach = True
        logger.info("reading from %s over %s", self.instance_id, session.transport)
        return session

    def _over(self) -> None:
        self._let_go()
        self.readers.discard(self)

    def _let_go(self) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        try:
            session.close()
        except Exception:
            logger.exception("closing a session failed")


def reach_for(
    memories: Sequence[LocalMemory], options: WorkerOptions, key: ClusterKey | None
) -> Reach | None:
    """Return a function that opens another worker's memory for reading. Raises ConfigError.

    Returns None if our own memory cannot be reached.

    memories: of all our ranks, which the KV is read into."""
    if not memories:
        return None
    names = pulled_over(memories[0], options.transports)
    ways = peer_transports(options.transports, memories, key, options.host)
    transports = [way for way in ways if way.name in names]

    def reach(regions: Sequence[RegionDescriptor]) -> Open:
        if not regions:
            raise IncompatibleError("it lets nobody read its KV memory", field="endpoints")
        for region in regions:
            choose(region, transports)
        return lambda: connect(memories, regions, transports)

    return reach
