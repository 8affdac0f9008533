"""The peer sessions that need no port: over mapped memory, and over several sessions at once.

`MappedSession` serves every transport that maps the owner's memory: shm, cuda_ipc, loopback. The
transport brings the address, a `FenceHold` and a copier. Each batch: take the fence (a dead one is
refused), copy, let go of the fence. Nothing is copied without the fence.

`GroupSession` makes one session of those between several ranks here and several ranks there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from pullfill.errors import Fenced, TransferFailed
from pullfill.transfer.contract import (
    Direction,
    FenceHold,
    KvLayout,
    LocalMemory,
    MoveResult,
    PeerSession,
)
from pullfill.transfer.copying import copy_batch
from pullfill.transfer.runs import LIMITS, Batch, CopyPlan, Planner
from pullfill.wire import FenceToken

Copier = Callable[[int, int, Batch], None]

NOW_BYTES = 256 << 10
"""Bytes that `move_now` moves at most: 0.05 ms at 5 GB/s."""
NOW_COPIES = 64
"""Copies that `move_now` makes at most."""


class MappedSession(PeerSession):
    """Over memory mapped at `remote_address`. Owns the hold; closes it once."""

    def __init__(
        self,
        transport: str,
        local: LocalMemory,
        remote: KvLayout,
        remote_address: int,
        hold: FenceHold,
        *,
        copier: Copier = copy_batch,
        now: Copier | None = None,
        limits: tuple[int, int, int] = LIMITS,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """
        local, remote: both sides of what is moved (`layout.both_sides`).
        copier: copies a batch.
        now: copies a small batch without waiting for anybody. None: `move_now` moves nothing.
        limits: of a batch, see `CopyPlan.batches`.
        on_close: gives the mapping back. Called once, after the hold is closed.
        """
        self._writes = Planner(local.layout, remote)
        self._reads = Planner(remote, local.layout)
        self._transport = transport
        self._local = local
        self._remote_address = remote_address
        self._hold = hold
        self._copy, self._copy_now, self._limits = copier, now, limits
        self._on_close = on_close
        self._busy = threading.Lock()
        self._closed = False
        self._moved = 0

    @property
    def transport(self) -> str:
        return self._transport

    @property
    def moved_bytes(self) -> int:
        return self._moved

    def move(
        self, verb: Direction, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> MoveResult:
        started = time.perf_counter()
        todo = self._plan(verb, source, target)
        with self._busy:
            self._batches(verb, fence, todo, self._copy)
        return _result(todo, started)

    def move_now(
        self, verb: Direction, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> MoveResult | None:
        if self._copy_now is None or len(source) * self._local.layout.block_bytes > NOW_BYTES:
            return None
        started = time.perf_counter()
        todo = self._plan(verb, source, target)
        if todo.runs > NOW_COPIES or not self._busy.acquire(blocking=False):
            return None
        try:
            done = self._batches(verb, fence, todo, self._copy_now, wait=False)
        finally:
            self._busy.release()
        return _result(todo, started) if done else None

    def close(self) -> None:
        """Wait for a batch under way, then let go of the region. Idempotent."""
        # To let go of the lock or the mapping under a running copy would break the owner's proof.
        with self._busy:
            if not self._closed:
                self._closed = True
                self._hold.close()
                self._on_close()

    def _plan(self, verb: Direction, source: Sequence[int], target: Sequence[int]) -> CopyPlan:
        plans = self._writes if verb == "write" else self._reads
        return plans.plan(source, target)

    def _batches(
        self, verb: Direction, fence: FenceToken, todo: CopyPlan, copy: Copier, wait: bool = True
    ) -> bool:
        """Move all batches of a plan. The caller holds `_busy`.

        wait: see `FenceHold.enter`. False is for plans of one batch only.

        Returns False if nothing was moved."""
        if self._closed:
            raise TransferFailed("the session is closed")
        hold, src, dst = self._hold, self._local.address, self._remote_address
        if verb == "read":
            src, dst = dst, src
        for batch in todo.batches(*self._limits):
            hold.before_batch(verb)
            if not hold.enter(fence, wait):
                return False
            try:
                hold.inside_batch(verb)
                copy(src, dst, batch)
            finally:
                hold.leave(fence)
            self._moved += batch.total
        return True


def _result(todo: CopyPlan, started: float) -> MoveResult:
    return MoveResult(
        blocks=todo.blocks,
        nbytes=todo.total,
        seconds=time.perf_counter() - started,
        runs=todo.runs,
    )


@dataclass(frozen=True, slots=True)
class Member:
    """A session between one rank here and one there, and whether it takes part in writes and in
    reads."""

    # Every replica of a KV head must be written, but only one of them must be read.

    session: PeerSession
    writes: bool
    reads: bool


class GroupSession(PeerSession):
    """Owns its members and closes them. One move at a time.

    In a move all members copy at the same time, under the same fence, which covers all ranks of its
    owner. A move returns or raises only after every member has ended its part. `move_now` moves
    nothing, because it would be one move per member."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = list(members)

    @property
    def transport(self) -> str:
        """The name they share, or all names joined by `+`."""
        return "+".join(dict.fromkeys(m.session.transport for m in self._members))

    @property
    def moved_bytes(self) -> int:
        return sum(member.session.moved_bytes for member in self._members)

    def move(
        self, verb: Direction, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> MoveResult:
        """See PeerSession. If a member fails, the move fails once the others have ended. They may
        have written."""
        started = time.perf_counter()
        needed = [m.session for m in self._members if (m.writes if verb == "write" else m.reads)]
        results = _side_by_side([partial(s.move, verb, fence, source, target) for s in needed])
        return MoveResult(
            blocks=len(source),
            nbytes=sum(r.nbytes for r in results),
            seconds=time.perf_counter() - started,
            runs=sum(r.runs for r in results),
        )

    def interrupt(self) -> None:
        for member in self._members:
            member.session.interrupt()

    def close(self) -> None:
        """Close every member, also when one of them fails to close. Idempotent."""
        with contextlib.ExitStack() as members:
            for member in self._members:
                members.callback(member.session.close)


def _side_by_side(parts: Sequence[Callable[[], MoveResult]]) -> list[MoveResult]:
    """Run all parts at the same time, the first on this thread, and wait for all of them.

    Raises the error of a part that failed. Fenced goes first, because only it tells that the grant
    is gone. The other parts are not interrupted, because a session cannot be used after an
    interrupt, and the next job needs it. Each part has a time limit of its own.
    """
    ends: list[Future[MoveResult]] = [Future() for _ in parts]

    def run(number: int) -> None:
        try:
            ends[number].set_result(parts[number]())
        except BaseException as exc:
            ends[number].set_exception(exc)

    for number in range(1, len(parts)):
        try:
            threading.Thread(target=run, args=(number,), name="kv-copy", daemon=True).start()
        except RuntimeError:  # no thread can be started
            run(number)
    if parts:
        run(0)
    failures = [exc for end in ends if (exc := end.exception()) is not None]  # waits
    if failures:
        raise next((exc for exc in failures if isinstance(exc, Fenced)), failures[0])
    return [end.result() for end in ends]
