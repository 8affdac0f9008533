"""Which workers hold which blocks."""

from __future__ import annotations

import numpy as np
import pytest

from pullfill.prefix.chain import chain, root
from pullfill.prefix.index import Predicted, PrefixIndex
from pullfill.wire.prefix import Op

PROMPT = chain(root(None, None, 16), bytes(range(256)) * 4, 16)


def test_each_worker_matches_its_leading_blocks() -> None:
    index = PrefixIndex(100)
    index.store(1, PROMPT)
    index.store(2, PROMPT[:3])
    index.store(3, PROMPT[1:])
    index.store(4, PROMPT)
    index.remove(4, PROMPT[5:6])
    assert index.match(PROMPT) == {1: 16, 2: 3, 4: 5}
    assert index.match(PROMPT[:2]) == {1: 2, 2: 2, 4: 2}
    assert index.match(PROMPT[:0]) == {}
    assert [index.blocks(worker) for worker in range(6)] == [0, 16, 3, 15, 15, 0]


def test_of_many_workers_those_that_hold_most_are_named() -> None:
    index = PrefixIndex(100)
    for worker in range(20):
        index.store(worker, PROMPT[: 5 if worker < 8 else 9])
    assert index.deepest(PROMPT, 20) == (index.match(PROMPT), 0)
    assert index.deepest(PROMPT[:0], 20) == ({}, 0)
    found, left_out = index.deepest(PROMPT, 15)
    assert left_out == 0
    assert sorted(found.values()) == [5] * 3 + [9] * 12
    named = set()
    for _ in range(12):
        found, left_out = index.deepest(PROMPT, 3)
        assert (len(found), set(found.values()), left_out) == (3, {9}, 9)
        named |= set(found)
    assert named == set(range(8, 20))


def test_blocks_beyond_the_limit_are_refused_and_counted() -> None:
    index = PrefixIndex(10)
    assert index.store(1, PROMPT) == 6
    assert (index.refused(1), len(index)) == (6, 10)
    assert index.store(2, PROMPT[:10]) == 0
    index.remove(1, PROMPT[:10])
    index.remove(2, PROMPT[:10])
    assert index.store(1, PROMPT[10:]) == 0
    assert index.blocks(1) == 6


def test_forgotten_workers_make_room_before_a_block_is_refused() -> None:
    index = PrefixIndex(len(PROMPT))
    index.store(1, PROMPT)
    index.forget(1)
    other = PROMPT + np.uint64(1)
    assert index.room == 0
    assert index.store(2, other) == 0
    assert index.match(other) == {2: 16}


def test_what_is_staged_is_seen_when_it_is_adopted() -> None:
    index = PrefixIndex(100)
    index.store(1, PROMPT[:4])
    index.stage(1, PROMPT[:8])
    assert index.match(PROMPT) == {1: 4}
    index.adopt(1)
    assert index.match(PROMPT) == {1: 8}
    index.stage(1, PROMPT)
    index.discard(1)
    index.stage(1, PROMPT[:2])
    index.adopt(1)
    assert sorted(index.hashes(1)) == sorted(PROMPT[:2])


def test_events_are_applied_in_their_order() -> None:
    index = PrefixIndex(100)
    twice = PROMPT[[0, 1, 0, 2, 1, 1]]
    ops = bytes([Op.STORE, Op.STORE, Op.REMOVE, Op.STORE, Op.REMOVE, Op.STORE])
    index.apply(7, ops, twice)
    assert sorted(index.hashes(7)) == sorted(PROMPT[1:3])
    with pytest.raises(ValueError, match="6 ops for 5 hashes"):
        index.apply(7, ops, twice[:5])


# ------------------------------------------------------------------ predicted blocks


def test_a_sibling_finds_the_shared_blocks() -> None:
    predicted = Predicted(1000, life_s=1.0)
    predicted.add(3, PROMPT, now=0.0)
    sibling = np.array([*PROMPT[:6], 77, 78], np.uint64)
    assert predicted.match(sibling, now=0.5) == {3: 6}
    predicted.forget(3)
    assert predicted.match(sibling, now=0.5) == {}


def test_an_entry_dies_between_one_life_and_two() -> None:
    predicted = Predicted(1000, life_s=1.0)
    predicted.add(3, PROMPT, now=0.0)
    predicted.add(3, PROMPT[:2], now=1.1)
    assert predicted.match(PROMPT, now=1.9) == {3: 16}
    assert predicted.match(PROMPT, now=2.05) == {3: 2}
    assert predicted.match(PROMPT, now=9.0) == {}


def test_it_never_keeps_more_than_its_bound() -> None:
    predicted = Predicted(8, life_s=1.0)
    for start in range(0, 1000, 10):
        predicted.add(1, PROMPT + np.uint64(start), now=start / 100)
        assert len(predicted) <= 8
