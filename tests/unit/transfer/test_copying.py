"""Copies of runs of bytes, with and without the GIL."""

from __future__ import annotations

import numpy as np
import pytest

from pullfill.errors import BadMessage
from pullfill.transfer.contract import KvLayout
from pullfill.transfer.copying import copy_batch, read_pages
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.runs import SINGLE, Copies, Rows
from tests.support.transfer_rigs import (
    Local,
    memory_over,
    random_bytes,
)


@pytest.mark.parametrize("counts", [(), (3,), (2, 3), (1, 1)])
def test_every_run_is_copied_in_all_its_rows(counts: tuple[int, ...]) -> None:
    """Runs of several lengths, apart by other strides on either side."""
    strides = (9000, 2500)[-len(counts) :], (7000, 2000)[-len(counts) :]
    rows = Rows(counts, *strides) if counts else SINGLE
    sources, targets, lengths = range(0, 24 * 60, 60), range(23 * 50, -1, -50), [48, 16, 7] * 8
    batch = Copies([*sources], [*targets], lengths, rows)
    source, target = random_bytes(30_000, 1), np.zeros(30_000, np.uint8)
    copy_batch(source.ctypes.data, target.ctypes.data, batch)
    expected = np.zeros_like(target)
    for s, t, n in zip(*batch.flat(), strict=True):
        expected[t : t + n] = source[s : s + n]
    np.testing.assert_array_equal(target, expected)


LAYOUT = dense_layout(2, 8, 2, 64)


def test_the_bytes_do_not_depend_on_strides() -> None:
    wide = KvLayout(5, 2, 8, 2, 64, layer_stride=2000, block_stride=200, head_stride=80)
    a, b = random_bytes(2 * 8 * 2 * 64, 1), np.zeros(4100, np.uint8)
    mine, theirs = Local(a, memory_over(a, LAYOUT)), Local(b, memory_over(b, wide))
    theirs.pages[:] = mine.pages
    read = read_pages([mine.memory], [3, 1])
    assert (read == read_pages([theirs.memory], [3, 1])).all()
    theirs.pages[1, 3, 1, 63] ^= 1
    assert np.argwhere(read != read_pages([theirs.memory], [3, 1])).tolist() == [[0, 255]]
    assert read_pages([mine.memory], []).shape == (0, 256)
    with pytest.raises(BadMessage):
        read_pages([mine.memory], [8])
