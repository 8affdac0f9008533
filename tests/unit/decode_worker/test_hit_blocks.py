"""Which blocks of a prefix hit a job may read, and which are held for it."""

from __future__ import annotations

import pytest

from pullfill.decode_worker.hit_blocks import HitBlocks
from tests.support.fakes import FakePool, FakeRequest

SIZE, WINDOW = 4, 8
HIT = 6 * SIZE
"""The window sees 7 tokens before token 24: from position 4 on."""
REQUEST = FakeRequest("r", [0] * 50, block_hashes=[f"h{at}" for at in range(12)])
TABLES = [list(range(11, 24)), [0] * 10 + [41, 42, 43]]


class Rig:
    """cached: positions of the window's blocks that are cached. Block 60 + i is at position i."""

    def __init__(self, cached: set[int]) -> None:
        self.pool = FakePool(80, SIZE)
        self.pool.cached = {(f"h{at}", 1): 60 + at for at in cached}
        self.blocks = HitBlocks(SIZE)
        self.blocks.pool = self.pool
        self.blocks.kept_from = lambda tokens: (0, max(0, tokens - WINDOW + 1) // SIZE)

    def held(self) -> set[int]:
        return {block.block_id - 60 for block in self.pool.blocks if block.ref_cnt}


@pytest.mark.parametrize(
    ("cached", "first"),
    [({2, 3, 4, 5}, 4), ({0, 1, 2, 4, 5}, 4), ({0, 1, 2, 3, 5}, 6), ({4}, 6)],
)
def test_what_is_cached_of_the_window_is_held(cached: set[int], first: int) -> None:
    """But not a part of a window, which nobody can use."""
    rig = Rig(cached)
    read_from, listed = rig.blocks.hold(REQUEST, TABLES, HIT, (0, 10))
    assert read_from == (0, first)
    expected = [[11 + at] + ([60 + at] if at >= first else []) for at in range(6)]
    assert listed == [block for blocks in expected for block in blocks]
    assert rig.held() == set(range(first, 6))
    rig.blocks.give_back("r")
    rig.blocks.give_back("r")
    assert rig.held() == set()


def test_blocks_of_the_request_are_not_held() -> None:
    """The prompt ends in the window of the hit: vLLM has kept the blocks from position 4 on."""
    rig = Rig({2, 3})
    tables = [TABLES[0], [0] * 4 + [64, 65, *range(41, 48)]]
    assert rig.blocks.hold(REQUEST, tables, HIT, (0, 4)) == (
        (0, 4), [11, 12, 13, 14, 15, 64, 16, 65],
    )  # fmt: skip
    assert rig.held() == set()


def test_without_a_hit_nothing_is_looked_up() -> None:
    rig = Rig({0, 1, 2})
    assert rig.blocks.hold(REQUEST, TABLES, 0, (0, 10)) == ((0, 0), [])
