"""Copies of runs of bytes, with and without the GIL."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pullfill.transfer.copying import copy_batch, copy_held
from pullfill.transfer.runs import SINGLE, Batch, Rows
from tests.support.transfer_rigs import random_bytes


@pytest.mark.parametrize("copy", [copy_batch, copy_held])
@pytest.mark.parametrize("counts", [(), (3,), (2, 3), (1, 1)])
def test_every_run_is_copied_in_all_its_rows(
    counts: tuple[int, ...], copy: Callable[[int, int, Batch], None]
) -> None:
    """Runs of several lengths, apart by other strides on either side."""
    strides = (9000, 2500)[-len(counts) :], (7000, 2000)[-len(counts) :]
    rows = Rows(counts, *strides) if counts else SINGLE
    sources, targets, lengths = range(0, 24 * 60, 60), range(23 * 50, -1, -50), [48, 16, 7] * 8
    batch = Batch([*sources], [*targets], lengths, sum(lengths) * rows.count, rows)
    source, target = random_bytes(30_000, 1), np.zeros(30_000, np.uint8)
    copy(source.ctypes.data, target.ctypes.data, batch)
    expected = np.zeros_like(target)
    flat = batch.flat()
    for s, t, n in zip(flat.source, flat.target, flat.nbytes, strict=True):
        expected[t : t + n] = source[s : s + n]
    np.testing.assert_array_equal(target, expected)
