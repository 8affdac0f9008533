"""The loopback transport: faults on demand, and checks of the grant."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pullfill.errors import BadMessage, Fenced, PullfillError, TransferFailed
from pullfill.testing.loopback import LoopbackOwner
from pullfill.transfer.layout import dense_layout
from tests.support.transfer_rigs import (
    Region,
    loopback_rig,
)

LAYOUT = dense_layout(2, 8, 2, 64)


class Rigged:
    """A loopback region, a session, and a thread that writes."""

    def __init__(self, tmp_path: Path) -> None:
        rig = loopback_rig(tmp_path)
        self.region: Region = rig.region(LAYOUT)
        self.mine = rig.local(LAYOUT)
        self.session = rig.connect(self.mine, self.region)
        assert isinstance(self.region.owner, LoopbackOwner)
        self.owner = self.region.owner
        self.error: PullfillError | None = None

    def write_in_thread(self, blocks: list[int]) -> Callable[[], None]:
        self.token = self.owner.fences.open(blocks)

        def run() -> None:
            try:
                self.session.write_blocks(self.token, blocks, blocks)
            except PullfillError as exc:
                self.error = exc

        thread = threading.Thread(target=run)
        thread.start()
        assert self.owner.faults.wait_held()
        return lambda: thread.join(20)


@pytest.fixture
def rigged(tmp_path: Path) -> Rigged:
    return Rigged(tmp_path)


def test_held_batch_blocks_the_revoke_and_lands_on_resume(rigged: Rigged) -> None:
    rigged.owner.faults.hold()
    before = rigged.region.data.copy()
    join = rigged.write_in_thread([1, 2])
    assert not rigged.owner.fences.try_revoke(rigged.token)
    np.testing.assert_array_equal(rigged.region.data, before)
    rigged.owner.faults.resume()
    join()
    assert rigged.error is None
    np.testing.assert_array_equal(rigged.region.pages[:, 1:3], rigged.mine.pages[:, 1:3])
    assert rigged.owner.fences.try_revoke(rigged.token)


def test_killed_batch_lands_nothing_and_frees_the_fence(rigged: Rigged) -> None:
    rigged.owner.faults.hold()
    before = rigged.region.data.copy()
    join = rigged.write_in_thread([1, 2])
    assert not rigged.owner.fences.try_revoke(rigged.token)
    rigged.owner.faults.kill()
    assert rigged.owner.fences.try_revoke(rigged.token)
    join()
    assert isinstance(rigged.error, TransferFailed)
    np.testing.assert_array_equal(rigged.region.data, before)
    token = rigged.owner.fences.open([3])
    rigged.session.write_blocks(token, [3], [3])  # a later writer is not affected


def test_hold_lets_the_first_batches_pass(rigged: Rigged) -> None:
    rigged.owner.faults.hold(after=1)
    first = rigged.owner.fences.open([0])
    rigged.session.write_blocks(first, [0], [0])
    join = rigged.write_in_thread([1])
    rigged.owner.faults.resume()
    join()


def test_loopback_checks_the_grant(rigged: Rigged) -> None:
    token = rigged.owner.fences.open([1, 2])
    before = rigged.region.data.copy()
    with pytest.raises(BadMessage, match=r"\[3\] are outside"):
        rigged.session.write_blocks(token, [0, 1], [2, 3])
    with pytest.raises(BadMessage):
        rigged.session.read_blocks(token, [0], [0])
    np.testing.assert_array_equal(rigged.region.data, before)
    assert rigged.owner.fences.try_revoke(token)
    with pytest.raises(Fenced):
        rigged.session.write_blocks(token, [0], [2])


def test_loopback_keeps_a_prefix_hit_from_being_written(rigged: Rigged) -> None:
    token = rigged.owner.fences.open([1, 2], 1)
    with pytest.raises(BadMessage, match=r"\[1\] are outside"):
        rigged.session.write_blocks(token, [0, 1], [1, 2])
    rigged.session.read_blocks(token, [1, 2], [0, 1])
    rigged.session.write_blocks(token, [1], [2])
