"""Copies KV blocks between this worker and one decode worker, on a thread of its own.

Copies are made in order: a prefix read, then the writes of each chunk once it is computed. While a
chunk is written the engine computes the next one, because the copy does not hold the GIL. A small
copy in shared memory is made on the engine's own thread. In pull mode nothing is written: the
blocks are kept until `let_go`, for the decode worker to read.

Each decode worker has a transfer worker of its own, so a stuck peer delays only its own jobs. A
transfer worker has a thread only while it has work (`SerialExecutor`). Every copy ends with exactly
one callback. In pull mode that of a write comes with `let_go`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pullfill.errors import Fenced, HandoffError
from pullfill.prefill_worker.task import PrefillTask
from pullfill.runtime import failpoints, log, metrics
from pullfill.runtime.serial_executor import SerialExecutor
from pullfill.transfer.contract import Direction, LocalMemory, PeerSession
from pullfill.transfer.session import GroupSession
from pullfill.wire import KvMode

logger = log.get("prefill_worker.transfer_worker")

# Bytes that are copied in less time than a thread needs to wake up. One more wake-up for each job
# made the prefill side's CPU per job 1.2 times as high.
_AT_ONCE = 256 << 10

_METRICS = {
    "read": (metrics.KV_READ_BYTES, metrics.KV_READ_SECONDS),
    "write": (metrics.KV_WRITE_BYTES, metrics.KV_WRITE_SECONDS),
}


@dataclass(slots=True)
class Copy:
    """Blocks of one task to read, or to write, or in pull mode to keep.

    local: our blocks. remote: the decode worker's.
    done: called once, with the failure if there is one. On any thread, or inside `copy`.
    last: with these blocks the task has ended well."""

    task: PrefillTask
    verb: Direction
    local: Sequence[int]
    remote: Sequence[int]
    done: Callable[[PrefillTask, BaseException | None], None]
    last: bool = False
    nbytes: int = 0


@dataclass(eq=False, repr=False)
class TransferWorker:
    """Owns one session.

    `close` ends it. Copies that are queued then fail. Copies that are submitted later fail at once,
    on the caller's thread."""

    session: PeerSession
    name: str  # the decode worker's
    memories: Sequence[LocalMemory]  # of each rank that the session copies from
    credits: Credits
    # Why no better transport than the session's is used, for people.
    why_not_better: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._account = self.credits.open(self.name)
        self._block_bytes = sum(memory.layout.block_bytes for memory in self.memories)
        self._thread = SerialExecutor()
        self._lock = threading.Lock()
        self._closed = False
        self._keeping = 0

    @property
    def transport(self) -> str:
        return self.session.transport

    @property
    def moved_bytes(self) -> int:
        """See PeerSession. Grows while the session copies anything, for any job."""
        return self.session.moved_bytes

    @property
    def busy(self) -> bool:
        """Whether a copy runs or waits, or blocks are kept for the decode worker to read."""
        return self._thread.busy or self._keeping > 0

    def copy(self, copy: Copy) -> None:
        """Read prefix blocks. Or write whole blocks, or keep them in pull mode."""
        task = copy.task
        if copy.verb == "write" and task.mode is KvMode.PULL:
            return self._keep(copy)
        with task.lock:
            task.submitted += 1
        copy.nbytes = len(copy.remote) * self._block_bytes
        self._charge(copy, 1)
        if self._is_quick(copy):
            return self._do(copy)
        with self._lock:
            taken = not self._closed and self._put(partial(self._do, copy))
        if not taken:
            self._over(copy, HandoffError(_ENDED if self._closed else _NO_THREAD))

    def let_go(self, task: PrefillTask) -> None:
        """Pull mode: give the blocks of a task back to the engine. Any thread.

        Cancel the task first, or it goes on to keep blocks. Call this only when the decode worker
        reads the blocks no more. A second call does nothing."""
        with task.lock:
            done, task.on_let_go = task.on_let_go, []
            nbytes = len(task.kept) * self._block_bytes if done else 0
        with self._lock:
            self._keeping -= len(done)
        self.credits.add(self._account, -nbytes)
        for tell in done:
            tell(task, None)

    def flush(self, task: PrefillTask, timeout_s: float = 30.0) -> bool:
        """Block until all copies submitted for the task are over. Other tasks do not count.

        Call it before the task's blocks are reused. Returns False after `timeout_s`: a copy may
        still run."""
        with task.quiet:
            return task.quiet.wait_for(lambda: not task.submitted, timeout_s)

    def close(self) -> None:
        """Stop after the running copy, which is interrupted if it waits for the peer.

        Its charges are refunded now, because the peer is gone or treated so. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                if not self._put(self._end_session):
                    self._end_session()  # nothing runs where a new thread is needed
        self.session.interrupt()
        self.credits.add(self._account, 0, close=True)

    def join(self, timeout_s: float) -> bool:
        """After `close`: wait until nothing is copied any more. False: not in time."""
        return self._thread.wait(timeout_s)

    def _keep(self, copy: Copy) -> None:
        """Keep blocks for the decode worker to read. `let_go` calls `done`.

        The engine frees none of the task's blocks before `done` was called."""
        task = copy.task
        with task.lock:
            kept = not task.cancelled
            if kept:
                before = len(task.kept)
                task.kept.update(zip(copy.remote, copy.local, strict=True))
                nbytes = (len(task.kept) - before) * self._block_bytes
                task.on_let_go.append(copy.done)
                with self._lock:
                    self._keeping += 1
        if not kept:
            return copy.done(task, None)
        self.credits.add(self._account, nbytes)
        if self._closed:
            task.end(HandoffError(_ENDED))
        elif copy.last:
            task.end(None)

    def _charge(self, copy: Copy, sign: int) -> None:
        """Charge a write. sign: -1 when it is over."""
        if copy.verb == "write":
            self.credits.add(self._account, sign * copy.nbytes)

    def _is_quick(self, copy: Copy) -> bool:
        """Whether to do it now, on the caller's thread: it comes next, and waits for nobody."""
        return (
            copy.nbytes <= _AT_ONCE
            and self.transport == "shm"  # other transports wait for the decode worker
            and not isinstance(self.session, GroupSession)  # it waits for a thread of each part
            and not self._thread.busy
            and not failpoints.armed()  # a failpoint may stop the copy, and not the engine
        )

    def _put(self, call: Callable[[], object]) -> bool:
        """Queue a call. Returns False if no thread can be started.

        The caller holds the lock, so that nothing is queued after the end."""
        try:
            self._thread.submit(call)
        except RuntimeError as exc:
            logger.warning("no thread for copies, so no KV moves to or from %s: %s", self.name, exc)
            return False
        return True

    def _end_session(self) -> None:
        try:
            self.session.close()
        except Exception:
            logger.exception("closing a session failed")

    def _do(self, copy: Copy) -> None:
        failure: BaseException | None = None
        task = copy.task
        try:
            if task.cancelled or self._closed:
                failure = HandoffError("cancelled" if task.cancelled else _ENDED)
            elif copy.remote:
                self._move(copy)
        except Exception as exc:
            failure = exc
            if isinstance(exc, Fenced):
                metrics.STALE_REFUSED.labels(copy.verb).inc()
        self._over(copy, failure)

    def _move(self, copy: Copy) -> None:
        task, verb, transport = copy.task, copy.verb, self.transport
        failpoints.hit(f"prefill.before_{verb}")
        source, target = copy.local, copy.remote
        if verb == "read":
            source, target = target, source
        began = time.monotonic()
        nbytes = self.session.move(verb, task.grant.fence, source, target)
        ended = time.monotonic()
        task.moves.append((verb, nbytes, began, ended))
        moved, seconds = _METRICS[verb]
        moved.labels(transport).inc(nbytes)
        seconds.labels(transport).observe(ended - began)
        if verb == "write":
            task.written_blocks += len(target)
            failpoints.hit("prefill.after_write")

    def _over(self, copy: Copy, failure: BaseException | None) -> None:
        task = copy.task
        self._charge(copy, -1)
        try:
            try:
                copy.done(task, failure)
                if failure is not None and copy.verb != "read":
                    task.end(failure)
                elif copy.last:
                    task.last_compute = task.last_compute or time.monotonic()
                    task.end(None)
            finally:
                with task.quiet:
                    task.submitted -= 1
                    task.quiet.notify_all()
        except Exception:
            logger.exception("a transfer callback failed")


_ENDED = "the connection to the decode worker ended"
_NO_THREAD = "this worker cannot start a thread for the copy"


# --------------------------------------------------------------------------- credits


@dataclass(slots=True, eq=False)
class Account:
    """What one decode worker is charged with, in bytes."""

    peer: str
    used: int = 0


class Credits:
    """Limits the KV that is computed for a decode worker but not in its memory yet.

    Each decode worker has an account, which its transfer worker uses. A write is charged when it is
    submitted, and refunded when it finishes or fails. In pull mode blocks are charged while they
    are kept for the decode worker.

    An account may exceed the limit by the prefill budget. Any thread.

    limit: bytes for each decode worker.
    on_room: called when no account is at its limit any more. Any thread, no lock held."""

    def __init__(self, limit: int, *, on_room: Callable[[], object] = lambda: None) -> None:
        self.limit = limit
        self._on_room = on_room
        self._lock = threading.Lock()
        self._accounts: list[Account] = []

    def open(self, peer: str) -> Account:
        """Open an account. A peer that has reconnected has two until the old one is closed."""
        account = Account(peer)
        with self._lock:
            self._accounts.append(account)
        return account

    def add(self, account: Account, nbytes: int, *, close: bool = False) -> None:
        """Charge bytes. Negative: refund them. Without effect after `close`.

        close: refund everything that is still charged, and end the account."""
        with self._lock:
            if account not in self._accounts:
                return
            was_full = account.used >= self.limit
            account.used = 0 if close else account.used + nbytes
            if close:
                self._accounts.remove(account)
            room = was_full and all(one.used < self.limit for one in self._accounts)
        if room:
            self._on_room()

    @property
    def used(self) -> dict[str, int]:
        """Bytes by decode worker."""
        used: dict[str, int] = {}
        with self._lock:
            for one in sorted(self._accounts, key=lambda one: one.peer):
                used[one.peer] = used.get(one.peer, 0) + one.used
        return used

    @property
    def gone(self) -> list[str]:
        """Names of the decode workers that have no credit left."""
        # While there is one, the puller pulls no jobs at all: it cannot choose for which decode
        # worker a job is. Jobs that were pulled before are computed all the same.
        with self._lock:
            return sorted({one.peer for one in self._accounts if one.used >= self.limit})

    def refresh_metrics(self) -> None:
        """Set the gauges. Called before a scrape."""
        used = self.used.values()
        metrics.KV_CREDITS.labels("limit").set(self.limit)
        metrics.KV_CREDITS.labels("most").set(max(used, default=0))
        metrics.KV_CREDITS.labels("all").set(sum(used))
