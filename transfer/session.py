"""The part of a peer session that every address-mapped transport shares.

A transport that can see the owner's memory at an address (shm, loopback, later CUDA IPC with its
own copier) supplies a `FenceHold` and the address; planning, batching, fencing and accounting are
here.

Order inside one batch: enter the gate (which refuses a dead fence) → copy → leave. Nothing is
copied outside a gate. `close` waits for a batch under way, because letting go of the lock or of
the mapping under a running copy would break the owner's proof.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pullfill.errors import TransferFailed
from pullfill.transfer.contract import Direction, KvLayout, LocalMemory, MoveResult, Part
from pullfill.transfer.copying import copy_batch
from pullfill.transfer.layout import check_bounds, check_pair
from pullfill.transfer.runs import LIMITS, Batch, CopyPlan, Planner
from pullfill.wire import FenceToken

Copier = Callable[[int, int, Batch], None]

NOW_BYTES = 256 << 10
"""Most bytes that `move_now` moves: 0.05 ms at 5 GB/s."""
NOW_COPIES = 64
"""Most pieces that `move_now` copies."""


class FenceHold(Protocol):
    """Holds a fence while a batch is copied."""

    def enter(self, token: FenceToken, wait: bool = True) -> bool:
        """Hold the fence. Raises Fenced, without holding it, if the token is not valid any more.

        wait: if False, and the owner uses the fence in this moment, return False."""
        ...

    def leave(self, token: FenceToken) -> None:
        """Let go of it. Called exactly once per successful `enter`."""
        ...

    def before_batch(self, verb: str) -> None:
        """Outside the fence, before each batch; `verb` is `write` or `read`."""
        ...

    def inside_batch(self, verb: str) -> None:
        """Holding the fence, before the first byte moves."""
        ...

    def copied(self, verb: str, address: int) -> None:
        """Holding the fence, after the last byte moved; the first one is at `address` now."""
        ...

    def close(self) -> None: ...


class MappedSession:
    """PeerSession over memory mapped at `remote_address`. Owns the gate; closes it once."""

    def __init__(
        self,
        transport: str,
        local: LocalMemory,
        remote: KvLayout,
        remote_address: int,
        gate: FenceHold,
        *,
        part: Part | None = None,
        copier: Copier = copy_batch,
        now: Copier | None = None,
        limits: tuple[int, int, int] = LIMITS,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`now`: copies small moves at once and waits for nobody (None: `move_now` does nothing).
        `limits` of a batch: bytes, copies, bytes below which no run is cut (`CopyPlan.batches`).
        `on_close` gives the mapping back, after the gate is closed. Raises IncompatibleError
        when the layouts, or their `part`, do not hold the same bytes (the caller keeps both)."""
        check_bounds(local.layout, local.nbytes)
        check_pair(local.layout, remote, part)
        self._writes = Planner(local.layout, remote, part)
        self._reads = Planner(remote, local.layout, part.swapped() if part else None)
        self._transport = transport
        self._local = local
        self._remote_address = remote_address
        self._gate = gate
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
        """See PeerSession."""
        return self._moved

    def write_blocks(
        self, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> MoveResult:
        """See PeerSession."""
        return self._move("write", fence, source, target)

    def read_blocks(
        self, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> MoveResult:
        """See PeerSession."""
        return self._move("read", fence, source, target)

    def move_now(
        self, verb: Direction, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> MoveResult | None:
        """See PeerSession."""
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

    def interrupt(self) -> None:
        """Nothing to do: a copy needs nobody else."""

    def close(self) -> None:
        """Waits for a batch under way, then lets go of the region. Idempotent."""
        with self._busy:
            if not self._closed:
                self._closed = True
                self._gate.close()
                self._on_close()

    def _plan(self, verb: Direction, source: Sequence[int], target: Sequence[int]) -> CopyPlan:
        planner = self._writes if verb == "write" else self._reads
        return planner.plan(source, target)

    def _move(
        self, verb: Direction, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> MoveResult:
        started = time.perf_counter()
        todo = self._plan(verb, source, target)
        with self._busy:
            self._batches(verb, fence, todo, self._copy)
        return _result(todo, started)

    def _batches(
        self, verb: Direction, fence: FenceToken, todo: CopyPlan, copy: Copier, wait: bool = True
    ) -> bool:
        """Move all batches of a plan. No other move may run.

        wait: as for `enter`. False is for plans of one batch only. If it returns False, nothing was
        moved."""
        if self._closed:
            raise TransferFailed("the session is closed")
        gate, src, dst = self._gate, self._local.address, self._remote_address
        if verb == "read":
            src, dst = dst, src
        for batch in todo.batches(*self._limits):
            gate.before_batch(verb)
            if not gate.enter(fence, wait):
                return False
            try:
                gate.inside_batch(verb)
                copy(src, dst, batch)
                gate.copied(verb, dst + batch.target[0])
            finally:
                gate.leave(fence)
            self._moved += batch.total
        return True


def _result(todo: CopyPlan, started: float) -> MoveResult:
    return MoveResult(
        blocks=todo.blocks,
        nbytes=todo.total,
        seconds=time.perf_counter() - started,
        runs=todo.runs,
    )
