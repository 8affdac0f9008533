"""Digests of blocks: what they depend on, and which blocks a sample takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pullfill.errors import BadMessage
from pullfill.transfer import digest
from pullfill.transfer.contract import KvLayout
from pullfill.transfer.digest import BlockDigester
from pullfill.transfer.layout import dense_layout
from pullfill.wire import DigestMode
from tests.support.transfer_rigs import (
    LAYOUTS,
    Local,
    extent,
    memory_over,
    pages,
    random_bytes,
    scattered,
)

LAYOUT = dense_layout(2, 8, 2, 64)


def test_digest_depends_on_bytes_and_order_not_on_strides() -> None:
    wide = KvLayout(5, 2, 8, 2, 64, layer_stride=2000, block_stride=200, head_stride=80)
    a, b = random_bytes(2 * 8 * 2 * 64, 1), np.zeros(4100, np.uint8)
    mine, theirs = Local(a, memory_over(a, LAYOUT)), Local(b, memory_over(b, wide))
    theirs.pages[:] = mine.pages
    made = BlockDigester(mine.memory).digest([3, 1])
    assert made == BlockDigester(theirs.memory).digest([3, 1])
    assert made != BlockDigester(mine.memory).digest([1, 3])
    theirs.pages[1, 3, 1, 63] ^= 1
    assert made != BlockDigester(theirs.memory).digest([3, 1])
    assert BlockDigester(mine.memory).digest([]) == BlockDigester(theirs.memory).digest([])
    with pytest.raises(BadMessage):
        BlockDigester(mine.memory).digest([8])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_each_block_has_its_own_digest_in_any_company(
    layout: KvLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the blocks do not fit the buffer at once."""
    monkeypatch.setattr(digest, "_STAGE_BYTES", 3 * layout.block_bytes)
    data = random_bytes(extent(layout), 5)
    digester = digest.BlockDigester(memory_over(data, layout))
    ids = scattered(1, 8)
    together = digester.digest(ids)
    assert together == b"".join(digester.digest([block]) for block in ids)
    changed = ids[4]
    pages(data, layout)[-1, changed, -1, -1] ^= 1
    again = digester.digest(ids)
    size = digest.DIGEST_BYTES
    differ = [i for i in range(8) if again[i * size :][:size] != together[i * size :][:size]]
    assert differ == [4]


@given(st.integers(1, 3000), st.binary(min_size=1, max_size=16), st.integers(1, 3))
def test_both_ends_sample_the_same_blocks(count: int, job: bytes, attempt: int) -> None:
    some = digest.sampled(DigestMode.SAMPLE, count, job, attempt)
    assert some == digest.sampled(DigestMode.SAMPLE, count, job, attempt)
    assert some == sorted(set(some))
    assert some[-1] == count - 1, "the last block is always checked"
    assert some[0] >= 0
    assert digest.sampled(DigestMode.FULL, count, job, attempt) == list(range(count))
    assert digest.sampled(DigestMode.OFF, count, job, attempt) == []


def test_a_sample_is_about_one_block_of_sixteen_and_another_each_attempt() -> None:
    draws = [digest.sampled(DigestMode.SAMPLE, 1601, b"job", n) for n in (1, 2, 3)]
    assert len({tuple(draw) for draw in draws}) == 3
    assert all(60 < len(draw) < 150 for draw in draws)
