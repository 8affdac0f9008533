"""Which workers hold which blocks: against Python sets, and at its bounds."""

from __future__ import annotations

import functools
import operator
import random
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pullfill.prefix.chain import extend, root
from pullfill.prefix.index import Predicted, PrefixIndex

PROMPT = [random.Random(number).getrandbits(64) for number in range(16)]
WORKERS = st.integers(0, 4)
CHOICES = st.lists(st.sampled_from(PROMPT), max_size=20)


class Model(RuleBasedStateMachine):
    """An index and what it should hold. It has no room for blocks that are forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(len(PROMPT))
        self.held: dict[int, set[int]] = {}

    @rule(worker=WORKERS, blocks=CHOICES, seed=st.integers(0, 9))
    def apply(self, worker: int, blocks: list[int], seed: int) -> None:
        ops = random.Random(seed).choices((0, 1), k=len(blocks))
        self.index.apply(worker, bytes(ops), blocks)
        held = self.held.setdefault(worker, set())
        for op, one in zip(ops, blocks, strict=True):
            (held.add if op else held.discard)(one)

    @rule(worker=WORKERS)
    def forget(self, worker: int) -> None:
        self.index.forget(worker)
        self.held.pop(worker, None)

    @rule(blocks=CHOICES)
    def match(self, blocks: list[int]) -> None:
        assert self.index.match(blocks) == self.leading(blocks)

    @invariant()
    def equal(self) -> None:
        assert self.index.match(PROMPT) == self.leading(PROMPT)
        assert len(self.index) == len(set().union(*self.held.values()))
        for worker, held in self.held.items():
            told = self.index.held(worker)
            assert told.blocks == held
            assert told.digest == functools.reduce(operator.xor, held, 0)
            assert told.refused == 0

    def leading(self, blocks: Sequence[int]) -> dict[int, int]:
        """What `match` should say."""
        found = {}
        for worker, held in self.held.items():
            lacks = (count for count, one in enumerate(blocks) if one not in held)
            if blocks and (count := next(lacks, len(blocks))):
                found[worker] = count
        return found


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_of_many_workers_those_that_hold_most_are_named() -> None:
    index = PrefixIndex(100)
    for worker in range(100):
        index.store(worker, PROMPT[: 5 if worker < 88 else 9])
    assert index.deepest(PROMPT, 100) == (index.match(PROMPT), 0)
    found, left_out = index.deepest(PROMPT, 15)
    assert left_out == 0
    assert sorted(found.values()) == [5] * 3 + [9] * 12
    named = set()
    for _ in range(12):
        found, left_out = index.deepest(PROMPT, 5)
        assert (len(found), set(found.values()), left_out) == (5, {9}, 7)
        named |= set(found)
    assert named == set(range(88, 100))


def test_predicted_blocks_die_between_one_life_and_two() -> None:
    predicted = Predicted(1000, life_s=1.0)
    predicted.add(3, PROMPT, now=0.0)
    predicted.add(3, PROMPT[:2], now=1.1)
    predicted.add(4, PROMPT[:1], now=1.1)
    assert predicted.match([*PROMPT[:6], 77], now=1.9) == {3: 6, 4: 1}
    assert predicted.match(PROMPT, now=2.05) == {3: 2, 4: 1}
    predicted.forget(3)
    assert predicted.match(PROMPT, now=2.05) == {4: 1}
    assert predicted.match(PROMPT, now=9.0) == {}


def test_predicted_blocks_never_exceed_their_bound() -> None:
    predicted = Predicted(8, life_s=1.0)
    for start in range(0, 1000, 10):
        now = start / 100
        predicted.add(1, [one + start for one in PROMPT], now)
        sent = [one + old for old in range(0, start + 1, 10) for one in PROMPT]
        assert 0 < sum(1 in predicted.match([one], now) for one in sent) <= 8


TOKENS = array("I", range(100)).tobytes()


@pytest.mark.parametrize("block_size", [1, 16, 17])
def test_a_block_is_named_by_all_tokens_up_to_its_end(block_size: int) -> None:
    seed = root(None, None, block_size)
    hashes = extend(seed, TOKENS, block_size)
    assert len(hashes) == 100 // block_size
    for block in range(len(hashes)):
        changed = bytearray(TOKENS)
        changed[4 * block_size * block] ^= 1
        other = extend(seed, bytes(changed), block_size)
        differ = [one != two for one, two in zip(other, hashes, strict=True)]
        assert differ == [i >= block for i in range(len(hashes))]


def test_salt_adapter_and_block_size_each_make_another_root() -> None:
    fields = [
        (None, None, 16), ("", None, 16), (None, "", 16), ("a", None, 16), (None, "a", 16),
        ("ab", "c", 16), ("a", "bc", 16), ("abc", None, 16), (None, None, 32), ("\ud800", None, 16),
    ]  # fmt: skip
    assert len({root(*field) for field in fields}) == len(fields)


def test_hashes_are_the_same_in_every_process_and_build() -> None:
    assert extend(root("salt", "lora", 4), TOKENS[:16], 4) == [15150132224142579675]
