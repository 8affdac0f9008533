"""The compiled table, against Python sets."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pullfill.prefix import table
from pullfill.prefix.chain import HashArray
from pullfill.prefix.index import PrefixIndex

WORKERS = st.integers(0, 9)
FEW = np.random.default_rng(1).integers(1, 2**64 - 1, 24, np.uint64)
CHOICES = st.lists(st.integers(0, len(FEW) - 1), max_size=30)


def leading(held: dict[int, set[int]], hashes: HashArray) -> dict[int, int]:
    """What `match` should say."""
    found = {}
    for worker, blocks in held.items():
        count = 0
        while count < len(hashes) and int(hashes[count]) in blocks:
            count += 1
        if count:
            found[worker] = count
    return found


class Model:
    """An index and what it should hold."""

    def __init__(self, max_blocks: int) -> None:
        self.index = PrefixIndex(max_blocks)
        self.held: dict[int, set[int]] = {}
        self.staged: dict[int, set[int]] = {}

    def store(self, worker: int, hashes: HashArray) -> None:
        assert self.index.store(worker, hashes) == 0
        self.held.setdefault(worker, set()).update(hashes.tolist())

    def remove(self, worker: int, hashes: HashArray) -> None:
        self.index.remove(worker, hashes)
        self.held.get(worker, set()).difference_update(hashes.tolist())

    def apply(self, worker: int, ops: bytes, hashes: HashArray) -> None:
        assert self.index.apply(worker, ops, hashes) == 0
        held = self.held.setdefault(worker, set())
        for op, one in zip(ops, hashes.tolist(), strict=True):
            (held.add if op else held.discard)(one)

    def forget(self, worker: int) -> None:
        self.index.forget(worker)
        self.held.pop(worker, None)

    def stage(self, worker: int, hashes: HashArray) -> None:
        assert self.index.stage(worker, hashes) == 0
        self.staged.setdefault(worker, set()).update(hashes.tolist())

    def adopt(self, worker: int) -> None:
        self.index.adopt(worker)
        self.held[worker] = self.staged.pop(worker, set())

    def check(self) -> None:
        for worker, held in self.held.items():
            assert set(self.index.hashes(worker).tolist()) == held
            assert self.index.blocks(worker) == len(held)
            digest = functools.reduce(operator.xor, held, 0)
            assert self.index.digest(worker) == digest & (2**63 - 1)
            assert {int(one) for page in self.index.pages(worker) for one in page} == held

    def tidied(self) -> int:
        while not self.index.tidy(0.01):
            pass
        return len(set().union(*self.held.values(), *self.staged.values()))


class Machine(RuleBasedStateMachine):
    """Few blocks and workers, so that sets grow into rows and shrink again."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(100)

    @rule(worker=WORKERS, blocks=CHOICES)
    def store(self, worker: int, blocks: list[int]) -> None:
        self.model.store(worker, FEW[blocks])

    @rule(worker=WORKERS, blocks=CHOICES)
    def remove(self, worker: int, blocks: list[int]) -> None:
        self.model.remove(worker, FEW[blocks])

    @rule(worker=WORKERS, blocks=CHOICES, seed=st.integers(0, 99))
    def apply(self, worker: int, blocks: list[int], seed: int) -> None:
        ops = random.Random(seed).choices((0, 1), k=len(blocks))
        self.model.apply(worker, bytes(ops), FEW[blocks])

    @rule(worker=WORKERS)
    def forget(self, worker: int) -> None:
        self.model.forget(worker)

    @rule(worker=WORKERS, blocks=CHOICES)
    def stage(self, worker: int, blocks: list[int]) -> None:
        self.model.stage(worker, FEW[blocks])

    @rule(worker=WORKERS)
    def adopt(self, worker: int) -> None:
        self.model.adopt(worker)

    @rule()
    def tidy(self) -> None:
        self.model.index.tidy(0.0)

    @rule(blocks=CHOICES)
    def match(self, blocks: list[int]) -> None:
        assert self.model.index.match(FEW[blocks]) == leading(self.model.held, FEW[blocks])

    @invariant()
    def equal(self) -> None:
        self.model.check()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("workers", [3, 65, 1000])
def test_many_blocks_of_many_workers(workers: int) -> None:
    """Enough blocks to split segments, with workers that come and go."""
    blocks = np.random.default_rng(workers).integers(1, 2**64 - 1, 6000, np.uint64)
    chance, model = random.Random(workers), Model(20_000)
    for _ in range(600):
        worker = chance.randrange(workers)
        start = chance.randrange(len(blocks))
        some = blocks[start : start + chance.choice((1, 20, 900))]
        actions: list[Callable[[], None]] = [
            lambda w=worker, s=some: model.store(w, s),
            lambda w=worker, s=some: model.store(w, s),
            lambda w=worker, s=some: model.store(w % 8, s),
            lambda w=worker, s=some: model.remove(w, s),
            lambda w=worker: model.forget(w),
        ]
        chance.choice(actions)()
        assert model.index.match(some[:40]) == leading(model.held, some[:40])
        model.index.tidy(0.0)
    model.check()
    assert model.tidied() == len(model.index)
    assert int(model.index._m.meta[table.USED]) > 4, "no segment was split"
    for worker in list(model.held):
        model.forget(worker)
    assert model.tidied() == len(model.index) == 0


def test_memory_stays_within_its_bound_per_block() -> None:
    count = 20_000
    blocks = np.random.default_rng(3).integers(1, 2**64 - 1, count, np.uint64)
    index = PrefixIndex(count)
    for worker in range(64):
        assert index.store(worker, blocks) == 0
    assert len(index) == count
    assert index.nbytes <= 100 * count
    before = index.nbytes
    for turn in range(10):
        part = blocks[turn * 2000 : (turn + 1) * 2000]
        for worker in range(64):
            index.remove(worker, part)
        for worker in range(64):
            assert index.store(worker, part ^ np.uint64(turn + 1)) == 0
    # As many blocks again have come and gone. What grows is up to chance: which segments were full.
    assert index.nbytes <= 1.25 * before


def test_a_full_pool_refuses_and_says_so() -> None:
    index = PrefixIndex(8)
    blocks = np.arange(1, 9, dtype=np.uint64)
    refused = [index.store(worker, blocks) for worker in range(1200)]
    assert refused[0] == 0
    assert sum(refused) == sum(map(index.refused, range(1200))) > 0
    assert all(index.blocks(worker) + index.refused(worker) == 8 for worker in range(1200))
    for worker in range(1200):
        index.forget(worker)
    while not index.tidy(0.01):
        pass
    assert index.store(5, blocks) == 0
