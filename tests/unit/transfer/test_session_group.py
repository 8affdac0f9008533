"""A group of sessions: who takes part, and how a move ends. (Bytes: test_connect.py.)"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from pullfill.errors import Fenced, TransferFailed
from pullfill.transfer.contract import Direction
from pullfill.transfer.session import GroupSession
from pullfill.wire import FenceToken

TOKEN = FenceToken(slot=0, epoch=1)


class _Scripted:
    """A PeerSession that does what it is told when it writes and when it is closed."""

    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        self.act, self.transport = act, "shm"
        self.moves: list[str] = []
        self.closed = False

    def interrupt(self) -> None:
        self.moves.append("interrupt")

    def move(self, verb: Direction, *_: object) -> int:
        self.act()
        return 10

    def close(self) -> None:
        self.closed = True
        self.act()


def failing(exc: Exception, begun: threading.Event | None = None) -> _Scripted:
    """Once `begun` is set."""

    def fail() -> None:
        assert begun is None or begun.wait(10)
        raise exc

    return _Scripted(fail)


@pytest.mark.parametrize("order", [1, -1])
def test_a_grant_that_is_gone_is_told_before_anything_else_and_nothing_is_written_after(
    order: int,
) -> None:
    """The owner takes the blocks back when a move has failed, and gives them to others."""
    data, begun = bytearray(20), threading.Event()

    def write_slowly() -> None:
        for index in range(len(data)):
            time.sleep(0.001)
            data[index] = 1
            begun.set()

    sessions = [
        failing(TransferFailed("broken")), failing(Fenced("gone"), begun), _Scripted(write_slowly)
    ][::order]  # fmt: skip
    whole = GroupSession(sessions, sessions)
    with pytest.raises(Fenced):
        whole.move("write", TOKEN, [1], [2])
    data[:] = bytes(20)
    time.sleep(0.01)
    assert data == bytes(20)


def test_interrupt_and_close_reach_everyone() -> None:
    members = [_Scripted(), failing(TransferFailed("x")), _Scripted()]
    whole = GroupSession(members, members)
    whole.interrupt()
    assert all(s.moves == ["interrupt"] for s in members)
    with pytest.raises(TransferFailed):
        whole.close()
    assert all(s.closed for s in members)
