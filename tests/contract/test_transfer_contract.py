"""What every transport must do, run over each of them."""

from __future__ import annotations

import contextlib
import gc
import operator
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pullfill.errors import (
    BadMessage,
    ConfigError,
    Fenced,
    IncompatibleError,
    OverloadedError,
    PeerUnavailable,
    TransferFailed,
)
from pullfill.transfer.contract import Direction, PeerSession
from pullfill.transfer.copying import read_pages
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.session import MappedSession
from pullfill.wire import FenceToken
from tests.support.fuzz import MANY
from tests.support.loopback import Faults
from tests.support.transfer_rigs import (
    CONNECTS,
    DENSE,
    LAYOUTS,
    MAPPED,
    PAGE,
    RIGS,
    Local,
    Rig,
    assert_same,
    check_moved,
    scattered,
)
from tests.support.waiting import Call, eventually


def held(session: PeerSession, verb: Direction, token: FenceToken) -> tuple[Faults, Call]:
    """A move that stops inside the fence, before the first byte, until it is told to go on."""
    assert isinstance(session, MappedSession)
    faults = Faults().hold()
    session.copier = faults.copy
    call = Call(session.move, verb, token, [0, 1, 2], [3, 4, 5])
    assert faults.wait_held()
    return faults, call


@pytest.fixture(params=sorted(RIGS.keys() - {"loopback"}))
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = RIGS[request.param](tmp_path)
    yield made
    made.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("local", "remote"),
    [
        *(("dense", remote) for remote in sorted(LAYOUTS)),
        ("padded-heads", "block-outermost"),
        ("block-outermost", "padded-blocks"),
    ],
)
@pytest.mark.essential
def test_write_moves_exactly_the_named_blocks(rig: Rig, local: str, remote: str) -> None:
    region, mine = rig.region(LAYOUTS[remote]), rig.local(LAYOUTS[local])
    before, gaps = region.pages.copy(), region.data.copy()
    source, target = scattered(3, 17), scattered(4, 17)
    session = rig.connect(mine, region)
    token = region.owner.fences.open(target)
    result = session.move("write", token, source, target)
    check_moved(before, region.pages, mine.pages[:, source], target)
    assert result == 17 * 3 * 2 * PAGE
    # Padding between pages is not ours to touch.
    region.pages[:] = 0
    restored = np.frombuffer(gaps, np.uint8).copy()
    Local(restored, region.memory).pages[:] = 0
    assert_same(region.data, restored)
    assert region.owner.fences.try_revoke(token)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_read_moves_exactly_the_named_blocks(rig: Rig, layout: str) -> None:
    region, mine = rig.region(LAYOUTS[layout]), rig.local(DENSE)
    before = mine.pages.copy()
    source, target = scattered(5, 11), list(range(20, 31))
    session = rig.connect(mine, region)
    token = region.owner.fences.open(source)
    assert session.move("read", token, source, target) == 11 * 3 * 2 * PAGE
    check_moved(before, mine.pages, region.pages[:, source], target)
    plain = replace(mine.memory, device=None)  # what stands for a GPU here is plain memory
    read = read_pages([plain], target)
    assert (read == read_pages([region.memory], source)).all()
    assert (read != read_pages([region.memory], source[::-1])).any()


def test_many_batches_and_long_runs(rig: Rig) -> None:
    layout = dense_layout(2, 96, 2, 64 << 10)  # 24 MiB: several batches, runs cut
    region, mine = rig.region(layout), rig.local(layout)
    session = rig.connect(mine, region)
    token = region.owner.fences.open(range(96))
    source, target = scattered(6, 60, 96), scattered(7, 60, 96)
    session.move("write", token, source, target)
    assert_same(region.pages[:, target], mine.pages[:, source])
    session.move("write", token, range(96), range(96))
    session.move("read", token, range(3), range(3))
    assert session.move("write", token, [], []) == 0
    assert_same(region.pages, mine.pages)
    assert session.moved_bytes == (60 + 96 + 3) * layout.block_bytes


def test_revoked_fence_refuses_both_ways(rig: Rig) -> None:
    region, mine = rig.region(DENSE), rig.local(DENSE)
    session = rig.connect(mine, region)
    token = region.owner.fences.open([1, 2])
    assert region.owner.fences.in_use == 1
    assert region.owner.fences.try_revoke(token)
    assert region.owner.fences.try_revoke(token), "idempotent"
    assert region.owner.fences.in_use == 0
    theirs, ours = region.data.copy(), mine.data.copy()
    with pytest.raises(Fenced):
        session.move("write", token, [1, 2], [1, 2])
    with pytest.raises(Fenced):
        session.move("read", token, [1, 2], [1, 2])
    assert_same(region.data, theirs)
    assert_same(mine.data, ours)


@pytest.mark.parametrize("rig", MAPPED, indirect=True)
@pytest.mark.parametrize("verb", ["write", "read"])
@pytest.mark.essential
def test_no_revoke_while_a_batch_is_under_way(rig: Rig, verb: Direction) -> None:
    region, mine = rig.region(DENSE), rig.local(DENSE)
    session, other = rig.connect(mine, region), rig.connect(mine, region)
    fences = region.owner.fences
    token, unrelated = fences.open(range(6)), fences.open(range(6, 9))
    faults, call = held(session, verb, token)
    other.move("write", token, [0], [0])  # ranks of one grant copy at once
    assert not fences.try_revoke(token)
    assert not fences.try_revoke(token)
    with pytest.raises(Fenced):  # dying: no new batch, not even from another session
        other.move("write", token, [0], [0])
    assert fences.try_revoke(unrelated), "one stuck grant does not hold up another"
    faults.resume()
    assert call.end() is None
    assert fences.try_revoke(token)
    with pytest.raises(Fenced):
        session.move(verb, token, [0], [1])


@pytest.mark.parametrize("rig", MAPPED, indirect=True)
def test_close_waits_for_the_batch_under_way(rig: Rig) -> None:
    region, mine = rig.region(DENSE), rig.local(DENSE)
    session = rig.connect(mine, region)
    token = region.owner.fences.open(range(6))
    faults, call = held(session, "write", token)
    closer = Call(session.close)
    closer.join(0.05)
    assert closer.is_alive()
    assert not region.owner.fences.try_revoke(token)
    faults.resume()
    assert (call.end(), closer.end()) == (None, None)
    assert region.owner.fences.try_revoke(token)
    with pytest.raises(TransferFailed):
        session.move("write", region.owner.fences.open([0]), [0], [0])


def test_slots_are_reused_with_new_epochs(rig: Rig) -> None:
    region, mine = rig.region(DENSE, slots=2), rig.local(DENSE)
    session, fences = rig.connect(mine, region), region.owner.fences
    old = [fences.open([0]), fences.open([1])]
    with pytest.raises(OverloadedError):
        fences.open([2])
    seen = {(t.slot, t.epoch) for t in old}
    for _ in range(5):
        assert all(fences.try_revoke(t) for t in old)
        old = [fences.open([0]), fences.open([1])]
        seen |= {(t.slot, t.epoch) for t in old}
    assert len(seen) == 12
    assert {slot for slot, _ in seen} == {0, 1}
    session.move("write", old[0], [7], [0])
    for slot, epoch in seen - {(t.slot, t.epoch) for t in old}:
        stale = FenceToken(slot=slot, epoch=epoch)
        with pytest.raises(Fenced):
            session.move("write", stale, [0], [0])
        assert fences.try_revoke(stale)
    session.move("write", old[1], [7], [1])  # proving stale tokens dead hurt no live one
    with pytest.raises(Fenced):
        session.move("write", FenceToken(slot=99, epoch=1), [0], [0])


def test_bad_block_ids_move_nothing(rig: Rig) -> None:
    region, mine = rig.region(DENSE), rig.local(DENSE)
    session = rig.connect(mine, region)
    token = region.owner.fences.open(range(40))
    theirs, ours = region.data.copy(), mine.data.copy()
    both: tuple[Direction, ...] = "write", "read"
    bad: list[tuple[list[Any], list[Any]]] = [
        ([0], [40]), ([0], [-1]), ([40], [0]), ([0, 1], [0]), ([0, 1], [5, 5]), ([0], [2**63]),
        ([0], ["x"]),
    ]  # fmt: skip
    for source, target in bad:
        for verb in both:
            with pytest.raises(BadMessage):
                session.move(verb, token, source, target)
    assert_same(region.data, theirs)
    assert_same(mine.data, ours)


@pytest.mark.essential
def test_restarted_owner_is_out_of_reach_of_an_old_descriptor(rig: Rig) -> None:
    region, mine = rig.region(DENSE), rig.local(DENSE)
    old_session = rig.connect(mine, region)
    token = region.owner.fences.open([1])
    region.owner.close()
    region.owner.close()
    with pytest.raises(ConfigError):
        region.owner.fences.open([2])
    with pytest.raises(ConfigError):
        region.owner.fences.try_revoke(token)
    reborn = rig.region(DENSE)  # same name, same incarnation text, new memory
    before = reborn.data.copy()
    if rig.name in MAPPED:  # a port that does not answer shows when it is dialled
        assert rig.transport.can_reach(region.descriptor) is not None
    with pytest.raises(PeerUnavailable):
        rig.connect(mine, region)
    with pytest.raises(Fenced):
        old_session.move("write", token, [0], [1])
    assert_same(reborn.data, before)


def test_a_descriptor_that_does_not_fit_is_refused(rig: Rig) -> None:
    """By name, where the shape of blocks differs. Also one whose pages leave the region, or
    overlap."""
    region, mine = rig.region(DENSE), rig.local(DENSE)
    with pytest.raises(PeerUnavailable, match="incarnation"):
        rig.connect(mine, region, incarnation="i0")
    for field, value in {"page_bytes": PAGE // 2, "num_layers": 2, "num_kv_heads": 1}.items():
        with pytest.raises(IncompatibleError) as caught:
            rig.connect(mine, region, **{field: value})
        assert caught.value.field == field
    lies = [
        ("num_blocks", 41), ("num_blocks", 0), ("base_offset", 1), ("base_offset", -1),
        ("layer_stride", 64), ("block_stride", 10), ("head_stride", 8), ("nbytes", 1 << 40),
    ]  # fmt: skip
    for field, value in lies:
        with pytest.raises(BadMessage):
            rig.connect(mine, region, **{field: value})


def usage() -> tuple[int, int, int]:
    """Descriptors, mappings of regions, threads."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("pullfill-")
    return len(os.listdir("/proc/self/fd")), maps, threading.active_count()


def test_many_connects_leave_nothing(rig: Rig) -> None:
    region, mine = rig.region(DENSE), rig.local(DENSE)
    token = region.owner.fences.open([0])
    before = usage()
    for _ in range(CONNECTS.get(rig.name, 200 if MANY else 60)):
        session = rig.connect(mine, region)
        session.move("write", token, [0], [0])
        session.close()
        session.close()
    for changes in ({"incarnation": "no"}, {"num_layers": 1}):
        with pytest.raises((PeerUnavailable, IncompatibleError)):
            rig.connect(mine, region, **changes)
    # Less is no leak: threads may end late.
    eventually(lambda: all(map(operator.le, usage(), before)), "connections left something behind")


def test_two_writers_of_one_grant_and_a_revoke_storm(rig: Rig) -> None:
    """Threads write under tokens that are revoked at any moment: after each proved revoke the
    owner's bytes stand still."""
    region = rig.region(DENSE)
    fences = region.owner.fences
    token = [fences.open(range(40))]
    stop = threading.Event()

    def write(mine: Local) -> None:
        session = rig.connect(mine, region)
        while not stop.is_set():
            with contextlib.suppress(Fenced):
                session.move("write", token[0], range(40), range(40))
        session.close()

    writers = [Call(write, rig.local(DENSE, seed)) for seed in (8, 9)]
    proved = 0
    try:
        while proved < 30 and all(writer.is_alive() for writer in writers):
            if not fences.try_revoke(token[0]):
                continue
            proved += 1
            region.data[:] = proved
            still = bool((region.data == proved).all())
            stop.wait(0.001)
            assert still
            assert bool((region.data == proved).all())
            token[0] = fences.open(range(40))
    finally:
        stop.set()
    assert [writer.end() for writer in writers] == [None, None]
    assert proved == 30
