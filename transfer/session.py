"""The peer sessions that need no port: over mapped memory, and over several sessions at once.

`MappedSession` serves every transport that maps the owner's memory: shm, cuda_ipc. The
transport brings the address, a `ShmHold` and a copier. Each batch: take the fence (a dead one is
refused), copy, let go of the fence. Nothing is copied without the fence.

`GroupSession` makes one session of those between several ranks here and several ranks there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

from pullfill.errors import Fenced, TransferFailed
from pullfill.runtime import failpoints
from pullfill.runtime.serial_executor import SerialExecutor
from pullfill.transfer.contract import (
    Direction,
    KvLayout,
    LocalMemory,
    PeerSession,
)
from pullfill.transfer.copying import copy_batch
from pullfill.transfer.runs import LIMITS, Copies, Planner
from pullfill.transfer.shm.fence import ShmHold
from pullfill.wire import FenceToken

Copier = Callable[[int, int, Copies], None]


@dataclass(eq=False, repr=False)
class MappedSession(PeerSession):
    """Over memory mapped at `remote_address`. Owns the hold; closes it once."""

    transport: str
    # Both sides of what is moved (`layout.both_sides`).
    local: LocalMemory
    remote: KvLayout
    remote_address: int
    hold: ShmHold
    copier: Copier = copy_batch  # copies a batch
    limits: tuple[int, int] = LIMITS  # of a batch, see `Copies.batches`
    # Gives the mapping back. Called once, after the hold is closed.
    on_close: Callable[[], None] = lambda: None

    moved_bytes = 0

    def __post_init__(self) -> None:
        self._writes = Planner(self.local.layout, self.remote)
        self._reads = Planner(self.remote, self.local.layout)
        self._busy = threading.Lock()
        self._closed = False

    def move(
        self, verb: Direction, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> int:
        todo = (self._writes if verb == "write" else self._reads).plan(source, target)
        transport, src, dst = self.transport, self.local.address, self.remote_address
        if verb == "read":
            src, dst = dst, src
        with self._busy:
            if self._closed:
                raise TransferFailed("the session is closed")
            for batch in todo.batches(*self.limits):
                failpoints.hit(f"{transport}.{verb}.before_batch")
                self.hold.enter(fence)
                try:
                    failpoints.hit(f"{transport}.{verb}.batch")
                    self.copier(src, dst, batch)
                finally:
                    self.hold.leave(fence)
                self.moved_bytes += batch.total
        return todo.total

    def close(self) -> None:
        """Wait for a batch under way, then let go of the region. Idempotent."""
        # To let go of the lock or the mapping under a running copy would break the owner's proof.
        with self._busy:
            if not self._closed:
                self._closed = True
                self.hold.close()
                self.on_close()


class GroupSession(PeerSession):
    """Owns its members and closes them. One move at a time.

    In a move, those that take part copy at the same time, under the same fence, which covers all
    ranks of its owner. A move returns or raises only after each has ended its part."""

    def __init__(self, writers: Sequence[PeerSession], readers: Sequence[PeerSession]) -> None:
        """writers, readers: those that take part in writes, and in reads. Each is between one rank
        here and one there."""
        self._parts: dict[Direction, Sequence[PeerSession]] = {"write": writers, "read": readers}
        self._members = list(dict.fromkeys([*writers, *readers]))
        # The name they share, or all names joined by `+`.
        self.transport = "+".join(dict.fromkeys(member.transport for member in self._members))

    @property
    def moved_bytes(self) -> int:
        return sum(member.moved_bytes for member in self._members)

    def move(
        self, verb: Direction, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> int:
        """See PeerSession. If a member fails, the move fails once the others have ended. They may
        have written."""
        moves = [partial(part.move, verb, fence, source, target) for part in self._parts[verb]]
        return sum(_side_by_side(moves))

    def interrupt(self) -> None:
        for member in self._members:
            member.interrupt()

    def close(self) -> None:
        """Close every member, also when one of them fails to close. Idempotent."""
        with contextlib.ExitStack() as members:
            for member in self._members:
                members.callback(member.close)


def _side_by_side(parts: Sequence[Callable[[], int]]) -> list[int]:
    """Run all parts at the same time, each on a thread, and wait for all of them. Raises the error
    of a part that failed, or RuntimeError if a thread cannot be started."""
    ends: list[Future[int]] = []
    try:
        for part in parts:
            ends.append(SerialExecutor(linger_s=0.0).submit(part))
    finally:
        # After a failure the other parts go on, each for its own time limit: a session cannot be
        # used after an interrupt, and the next job needs it.
        wait(ends)
    failures = [exc for end in ends if (exc := end.exception()) is not None]
    if failures:
        # Only Fenced tells that the grant is gone.
        raise next((exc for exc in failures if isinstance(exc, Fenced)), failures[0])
    return [end.result() for end in ends]
