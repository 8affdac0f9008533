"""A group of sessions over real memories: TP-1 memory to TP-2 memory and back, byte for byte."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from pullfill.errors import Fenced, TransferFailed
from pullfill.transfer import session as session_module
from pullfill.transfer.contract import Direction, MoveResult, Rect
from pullfill.transfer.layout import part_of, plan_routes
from pullfill.transfer.session import GroupSession, MappedSession, Member
from pullfill.wire import FenceToken
from tests.support.ranked import HALVES, PAGE, REPLICAS, STAGES, WHOLE, RankedWorker

TOKEN = FenceToken(slot=0, epoch=1)


class _OpenHold:
    def __init__(self) -> None:
        self.entered = 0
        self.closed = 0
        self.fenced = False

    def enter(self, token: FenceToken, wait: bool = True) -> bool:
        if self.fenced:
            raise Fenced("revoked")
        self.entered += 1
        return True

    def leave(self, token: FenceToken) -> None: ...

    def before_batch(self, verb: str) -> None: ...

    def inside_batch(self, verb: str) -> None: ...

    def close(self) -> None:
        self.closed += 1


def group(ours: RankedWorker, theirs: RankedWorker) -> tuple[GroupSession, list[_OpenHold]]:
    holds: list[_OpenHold] = []
    members: list[Member] = []

    def session(here: int, there: int, part: Rect) -> MappedSession:
        hold = _OpenHold()
        holds.append(hold)
        local, remote = part_of(ours.memories[here], part), part_of(theirs.memories[there], part)
        return MappedSession("test", local, remote.layout, remote.address, hold)

    for route in plan_routes(ours.rects, theirs.rects):
        members.append(Member(session(route.source, route.target, route.part), True, False))
    for route in plan_routes(theirs.rects, ours.rects):
        members.append(Member(session(route.target, route.source, route.part), False, True))
    return GroupSession(members), holds


@pytest.mark.parametrize("ours", [WHOLE, HALVES, REPLICAS, STAGES])
@pytest.mark.parametrize("theirs", [WHOLE, HALVES, REPLICAS, STAGES])
def test_blocks_arrive_whole_in_both_directions(ours: list[Rect], theirs: list[Rect]) -> None:
    prefill, decode = RankedWorker(ours, 1), RankedWorker(theirs, 2)
    session, _ = group(prefill, decode)
    session.read_blocks(TOKEN, [7, 6], [0, 1])
    before = decode.block(2)
    result = session.write_blocks(TOKEN, [0, 1], [5, 3])
    assert decode.block(5) == prefill.block(0)
    assert decode.block(3) == prefill.block(1)
    assert all(len(copies) == 1 for copies in decode.block(5).values()), "replicas differ"
    assert decode.block(2) == before, "another block was touched"
    assert result.blocks == 2
    written = sum(r.heads * r.layers for r in theirs)
    assert result.nbytes == 2 * written * PAGE


class _Scripted:
    """A PeerSession that does what it is told."""

    def __init__(self, failure: Exception | None = None, transport: str = "shm") -> None:
        self.failure, self.transport = failure, transport
        self.moves: list[str] = []
        self.closed = self.interrupted = False

    def interrupt(self) -> None:
        self.interrupted = True

    def move(
        self, verb: Direction, fence: FenceToken, s: Sequence[int], t: Sequence[int]
    ) -> MoveResult:
        self.moves.append(verb)
        if verb == "read":
            return MoveResult(len(s), 7, 0.5, 1)
        if self.failure is not None:
            raise self.failure
        return MoveResult(len(s), 10, 0.5, 2)

    def close(self) -> None:
        self.closed = True
        if self.failure is not None:
            raise self.failure


def test_sums_and_roles() -> None:
    both, writer, reader = _Scripted(), _Scripted(), _Scripted(transport="tcp")
    whole = GroupSession(
        [Member(both, True, True), Member(writer, True, False), Member(reader, False, True)]
    )
    wrote = whole.write_blocks(TOKEN, [1, 2, 3], [4, 5, 6])
    assert (wrote.blocks, wrote.nbytes, wrote.runs) == (3, 20, 4)
    read = whole.read_blocks(TOKEN, [1], [4])
    assert (read.blocks, read.nbytes, read.runs) == (1, 14, 2)
    assert (both.moves, writer.moves, reader.moves) == (["write", "read"], ["write"], ["read"])
    assert whole.transport == "shm+tcp"
    assert GroupSession([Member(both, True, True), Member(writer, True, True)]).transport == "shm"


@pytest.mark.parametrize("failure", [Fenced("gone"), TransferFailed("broken")])
def test_a_failure_of_one_part_fails_the_whole(failure: Exception) -> None:
    first, broken, last = _Scripted(), _Scripted(failure), _Scripted()
    whole = GroupSession([Member(s, True, True) for s in (first, broken, last)])
    with pytest.raises(type(failure)):
        whole.write_blocks(TOKEN, [1], [2])


@pytest.mark.parametrize("order", [1, -1])
def test_a_grant_that_is_gone_is_told_before_anything_else(order: int) -> None:
    broken = [_Scripted(TransferFailed("broken")), _Scripted(Fenced("gone"))][::order]
    whole = GroupSession([Member(s, True, True) for s in broken])
    with pytest.raises(Fenced):
        whole.write_blocks(TOKEN, [1], [2])


class _Meets(_Scripted):
    """Ends a move only when all of `party` are in one."""

    def __init__(self, party: threading.Barrier) -> None:
        super().__init__()
        self._party = party

    def move(
        self, verb: Direction, fence: FenceToken, s: Sequence[int], t: Sequence[int]
    ) -> MoveResult:
        self._party.wait(10)
        return super().move(verb, fence, s, t)


@pytest.mark.parametrize("verb", ["write_blocks", "read_blocks"])
def test_members_copy_side_by_side(verb: str) -> None:
    party = threading.Barrier(8)
    whole = GroupSession([Member(_Meets(party), True, True) for _ in range(8)])
    for _ in range(3):
        assert getattr(whole, verb)(TOKEN, [1, 2], [3, 4]).blocks == 2


class _Slow(_Scripted):
    """Writes one byte after the other until it has written all, or is interrupted."""

    def __init__(self, data: bytearray, begun: threading.Event) -> None:
        super().__init__()
        self._data, self._begun, self._stop = data, begun, threading.Event()

    def move(
        self, verb: Direction, fence: FenceToken, s: Sequence[int], t: Sequence[int]
    ) -> MoveResult:
        for index in range(len(self._data)):
            if self._stop.wait(0.001):
                raise TransferFailed("interrupted")
            self._data[index] = 1
            self._begun.set()
        return super().move(verb, fence, s, t)

    def interrupt(self) -> None:
        self._stop.set()


class _FailsLater(_Scripted):
    """Fails once another member is in the middle of its part."""

    def __init__(self, failure: Exception, begun: threading.Event) -> None:
        super().__init__(failure)
        self._begun = begun

    def move(
        self, verb: Direction, fence: FenceToken, s: Sequence[int], t: Sequence[int]
    ) -> MoveResult:
        assert self._begun.wait(10)
        return super().move(verb, fence, s, t)


@pytest.mark.parametrize("first", ["fails", "writes"])
@pytest.mark.parametrize("failure", [Fenced("gone"), TransferFailed("broken")])
def test_nothing_is_written_after_a_move_has_failed(failure: Exception, first: str) -> None:
    """The owner takes the blocks back then, and gives them to others."""
    data, begun = bytearray(20), threading.Event()
    sessions: list[_Scripted] = [_FailsLater(failure, begun), _Slow(data, begun)]
    if first == "writes":
        sessions.reverse()
    whole = GroupSession([Member(s, True, True) for s in sessions])
    with pytest.raises(type(failure)):
        whole.write_blocks(TOKEN, [1], [2])
    data[:] = bytes(20)
    time.sleep(0.01)
    assert data == bytes(20)


def test_an_interrupt_ends_every_part_of_a_move() -> None:
    begun = [threading.Event() for _ in range(3)]
    parts = [bytearray(5_000) for _ in begun]
    slow = [_Slow(data, event) for data, event in zip(parts, begun, strict=True)]
    whole = GroupSession([Member(s, True, True) for s in slow])
    with ThreadPoolExecutor(1) as transfer_worker:
        move = transfer_worker.submit(whole.write_blocks, TOKEN, [1], [2])
        assert all(event.wait(10) for event in begun)
        whole.interrupt()
        with pytest.raises(TransferFailed, match="interrupted"):
            move.result(10)


def test_without_more_threads_the_parts_are_copied_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(session_module.POOL, "run", refuse)
    members = [_Scripted() for _ in range(3)]
    whole = GroupSession([Member(s, True, True) for s in members])
    assert whole.write_blocks(TOKEN, [1], [2]).nbytes == 30
    assert all(s.moves == ["write"] for s in members)


def test_close_reaches_everyone() -> None:
    members = [_Scripted(), _Scripted(TransferFailed("x")), _Scripted()]
    whole = GroupSession([Member(s, True, True) for s in members])
    with pytest.raises(TransferFailed):
        whole.close()
    assert all(s.closed for s in members)


def test_interrupt_reaches_everyone() -> None:
    members = [_Scripted(), _Scripted()]
    GroupSession([Member(members[0], True, False), Member(members[1], False, True)]).interrupt()
    assert all(s.interrupted for s in members)


def test_a_dead_fence_of_one_member_fails_the_group() -> None:
    prefill, decode = RankedWorker(WHOLE, 1), RankedWorker(HALVES, 2)
    session, holds = group(prefill, decode)
    holds[1].fenced = True
    with pytest.raises(Fenced):
        session.write_blocks(TOKEN, [0], [5])
    session.close()
    assert all(hold.closed == 1 for hold in holds)
