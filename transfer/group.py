"""One PeerSession over several: what a mover sees when workers split the model differently.

A member moves one part of each block between one rank here and one rank there (`topology.py`). A
part may be needed for writing, for reading or for both: the decode worker's replicas must all be
written, but only one of them needs to be read, and the same the other way round.

The group owns its members from construction on and closes them; one move at a time, one member
after the other, all under the same fence (one fence covers all ranks of its owner).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pullfill.transfer.contract import MoveResult, PeerSession
from pullfill.wire import FenceToken

_Move = Callable[[PeerSession], MoveResult]


@dataclass(frozen=True, slots=True)
class Member:
    """A session and which verbs it takes part in."""

    session: PeerSession
    writes: bool
    reads: bool


class GroupSession:
    """PeerSession over the members. A move has happened when all of them have done their part."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = list(members)

    @property
    def transport(self) -> str:
        """The name they share, or all names joined by `+`."""
        return "+".join(dict.fromkeys(m.session.transport for m in self._members))

    def write_blocks(
        self, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> MoveResult:
        """See PeerSession. A failure of one member ends the move; others may have written."""
        writers = [m.session for m in self._members if m.writes]
        return _move(writers, len(source), lambda s: s.write_blocks(fence, source, target))

    def read_blocks(
        self, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> MoveResult:
        """See PeerSession."""
        readers = [m.session for m in self._members if m.reads]
        return _move(readers, len(source), lambda s: s.read_blocks(fence, source, target))

    def interrupt(self) -> None:
        """See PeerSession."""
        for member in self._members:
            member.session.interrupt()

    def close(self) -> None:
        """Close every member, also when one of them fails to. Idempotent as they are."""
        failure: Exception | None = None
        for member in self._members:
            try:
                member.session.close()
            except Exception as exc:
                failure = failure or exc
        if failure is not None:
            raise failure


def _move(sessions: Sequence[PeerSession], blocks: int, move: _Move) -> MoveResult:
    started = time.perf_counter()
    results = [move(session) for session in sessions]
    return MoveResult(
        blocks=blocks,
        nbytes=sum(r.nbytes for r in results),
        seconds=time.perf_counter() - started,
        runs=sum(r.runs for r in results),
    )
