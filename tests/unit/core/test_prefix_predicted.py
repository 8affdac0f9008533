"""Where prompts went whose blocks are not stored yet."""

from __future__ import annotations

import numpy as np

from pullfill.prefix.predicted import Predicted

PROMPT = np.arange(1, 11, dtype=np.uint64)


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
    assert predicted.match(PROMPT, now=1.9) == {3: 10}
    assert predicted.match(PROMPT, now=2.05) == {3: 2}
    assert predicted.match(PROMPT, now=9.0) == {}


def test_it_never_keeps_more_than_its_bound() -> None:
    predicted = Predicted(8, life_s=1.0)
    for start in range(0, 1000, 10):
        predicted.add(1, PROMPT + np.uint64(start), now=start / 100)
        assert len(predicted) <= 8
