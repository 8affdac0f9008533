"""Small moves at once, on a thread that must not be held up (`PeerSession.move_now`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import pytest

from pullfill.errors import BadMessage, Fenced, TransferFailed
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.session import NOW_BYTES, NOW_COPIES
from pullfill.transfer.shm import lock
from tests.support.mapped_held import Held, start_held
from tests.support.transfer_rigs import DENSE, LAYOUTS, RIGS, Rig, assert_same, check_moved, shm_rig

Verb = Literal["write", "read"]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """Shared memory, because it can move small copies at once. Nothing is closed here: the memory
    of a test is freed with its objects."""
    return shm_rig(tmp_path)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("kind", sorted(RIGS))
def test_it_moves_exactly_the_named_blocks_or_nothing(
    kind: str, layout: str, tmp_path: Path
) -> None:
    rig = RIGS[kind](tmp_path)
    region, mine = rig.region(LAYOUTS[layout]), rig.local(DENSE)
    session = rig.connect(mine, region)
    token = region.owner.fences.open(range(40))
    theirs, ours = region.pages.copy(), mine.pages.copy()
    source, target = [3, 9, 4], [30, 31, 7]
    wrote = session.move_now("write", token, source, target)
    assert (wrote is not None) == (kind == "shm")
    if wrote is None:
        assert_same(region.pages, theirs)
        assert session.moved_bytes == 0
    else:
        check_moved(theirs, region.pages, ours[:, source], target)
        assert (wrote.blocks, wrote.nbytes) == (3, 3 * DENSE.block_bytes)
        assert session.move_now("read", token, [30, 5], [20, 21]) is not None
        check_moved(ours, mine.pages, region.pages[:, [30, 5]], [20, 21])
        assert session.moved_bytes == 5 * DENSE.block_bytes
    session.close()
    region.owner.close()


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_dead_fence_refuses_it(rig: Rig, verb: Verb) -> None:
    region, mine = rig.region(DENSE), rig.local(DENSE)
    session = rig.connect(mine, region)
    token = region.owner.fences.open([1, 2])
    assert region.owner.fences.try_revoke(token)
    theirs, ours = region.data.copy(), mine.data.copy()
    with pytest.raises(Fenced):
        session.move_now(verb, token, [1, 2], [1, 2])
    assert_same(region.data, theirs)
    assert_same(mine.data, ours)


def test_the_fence_is_let_go_of(rig: Rig) -> None:
    region, mine = rig.region(DENSE), rig.local(DENSE)
    session = rig.connect(mine, region)
    token = region.owner.fences.open([1, 2])
    assert session.move_now("write", token, [1], [2]) is not None
    with pytest.raises(BadMessage):
        session.move_now("write", token, [1, 2], [1, 99])
    assert region.owner.fences.try_revoke(token)
    session.close()
    with pytest.raises(TransferFailed):
        session.move_now("write", region.owner.fences.open([0]), [0], [0])


def test_nobody_is_waited_for(rig: Rig) -> None:
    """Not for a batch under way in the session, and not for an owner who is at the fence."""
    region, mine = rig.region(DENSE), rig.local(DENSE)
    session, other = rig.connect(mine, region), rig.connect(mine, region)
    token = region.owner.fences.open(range(40))
    held = Held()
    thread = start_held(session, held, "write_blocks", token)
    before = session.moved_bytes
    assert session.move_now("write", token, [9], [9]) is None
    assert session.moved_bytes == before
    held.go_on.set()
    thread.join(20)
    assert held.error is None
    fd = os.open(f"/proc/self/fd/{region.owner.fences._fd}", os.O_RDWR)  # type: ignore[attr-defined]
    assert lock.try_exclusive(fd, 4096, 0), "all slots, as the owner holds one"
    assert other.move_now("write", token, [9], [9]) is None
    os.close(fd)
    assert other.move_now("write", token, [9], [9]) is not None


@pytest.mark.parametrize(("blocks", "page"), [(4, NOW_BYTES // 4), (NOW_COPIES, 64)])
def test_more_than_a_little_is_left_to_others(rig: Rig, blocks: int, page: int) -> None:
    """Many bytes, or many copies."""
    layout = dense_layout(1, 2 * blocks + 2, 1, page)
    region, mine = rig.region(layout), rig.local(layout)
    session = rig.connect(mine, region)
    ids = list(range(0, 2 * blocks + 2, 2))
    token = region.owner.fences.open(ids)
    before = region.data.copy()
    assert session.move_now("write", token, ids, ids) is None
    assert_same(region.data, before)
    assert session.move_now("write", token, ids[1:], ids[1:]) is not None
