"""A group of sessions: who takes part, and how a move ends. (Bytes: test_connect.py.)"""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest.mock import Mock

import pytest

from pullfill.errors import Fenced, TransferFailed
from pullfill.transfer.session import GroupSession
from pullfill.wire import FenceToken

TOKEN = FenceToken(slot=0, epoch=1)


def member(act: Any = None) -> Mock:
    """Return a PeerSession. act: its `move` and `close` call it. An exception is raised there."""
    made = Mock(transport="shm")
    made.move.side_effect = made.close.side_effect = act
    return made


@pytest.mark.parametrize("order", [1, -1])
def test_a_grant_that_is_gone_is_told_before_anything_else_and_nothing_is_written_after(
    order: int,
) -> None:
    """The owner takes the blocks back when a move has failed, and gives them to others."""
    data, begun = bytearray(20), threading.Event()

    def write_slowly(*_: object) -> None:
        for index in range(len(data)):
            time.sleep(0.001)
            data[index] = 1
            begun.set()

    def is_gone(*_: object) -> None:
        assert begun.wait(10)
        raise Fenced("gone")

    sessions = [member(TransferFailed("broken")), member(is_gone), member(write_slowly)][::order]
    whole = GroupSession(sessions, sessions)
    with pytest.raises(Fenced):
        whole.move("write", TOKEN, [1], [2])
    data[:] = bytes(20)
    time.sleep(0.01)
    assert data == bytes(20)


def test_interrupt_and_close_reach_everyone() -> None:
    members = [member(), member(TransferFailed("x")), member()]
    whole = GroupSession(members, members)
    whole.interrupt()
    with pytest.raises(TransferFailed):
        whole.close()
    for each in members:
        each.interrupt.assert_called_once_with()
        each.close.assert_called_once_with()
