"""A PeerSession made of several sessions, for workers that split the model over ranks.

A member session moves one part of each block, between one rank here and one rank there
(`topology.py`). A part is needed for writing, for reading or for both: every replica of a KV head
must be written, but only one of them must be read.

The group owns its members and closes them. It makes one move at a time. In a move all members copy
at the same time, under the same fence, which covers all ranks of its owner. A move returns or
raises only after every member has ended its part. Then no member reads or writes any more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from pullfill.errors import Fenced
from pullfill.runtime.lanes import POOL
from pullfill.transfer.contract import Direction, MoveResult, PeerSession
from pullfill.wire import FenceToken


@dataclass(frozen=True, slots=True)
class Member:
    """A session, and whether it takes part in writes and in reads."""

    session: PeerSession
    writes: bool
    reads: bool


class GroupSession(PeerSession):
    """See the module. `move_now` moves nothing, because it would be one move per member."""

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
            POOL.run(partial(run, number))
        except RuntimeError:  # no thread can be started
            run(number)
    if parts:
        run(0)
    failures = [exc for end in ends if (exc := end.exception()) is not None]  # waits
    if failures:
        raise next((exc for exc in failures if isinstance(exc, Fenced)), failures[0])
    return [end.result() for end in ends]
