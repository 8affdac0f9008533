"""Which multimodal inputs may go to a prefill worker. Their bytes: tests/integration."""

from __future__ import annotations

import pytest

from pullfill.engine import features
from tests.support.features import stand_in


@pytest.mark.parametrize(
    ("made", "may"),
    [
        ([(0, 4, 9), (5, 5, 9)], True),
        ([(0, 4, 9), (6, 5, 9)], False),  # a part of it is beyond what is computed there
        ([(0, 4, features.MAX_BYTES)], True),
        ([(0, 4, features.MAX_BYTES), (5, 1, 9)], False),
        ([(0, 4, 0)], False),  # vLLM's caches leave the data out
    ],
)
def test_whole_features_up_to_a_limit_may_go(made: list[tuple[int, int, int]], may: bool) -> None:
    found = [stand_in(offset, length, nbytes) for offset, length, nbytes in made]
    assert features.may_go(found, tokens=10) is may


def test_data_may_be_nested() -> None:
    nested = stand_in(0, 1, 12)
    (elem,) = nested.data.values()
    elem.data = [elem.data, [elem.data, elem.data], 7]
    assert features.nbytes([nested]) == 36
