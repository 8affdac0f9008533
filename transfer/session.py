"""The peer session of every transport that maps the owner's memory: shm, cuda_ipc, loopback.

The transport brings the address, a `FenceHold` and a copier. Planning, batching, fencing and
accounting are here.

Each batch: take the fence (a dead one is refused) → copy → let go of it. Nothing is copied without
the fence. `close` waits for a batch under way: to let go of the lock or of the mapping under a
running copy would break the owner's proof.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from pullfill.errors import TransferFailed
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
