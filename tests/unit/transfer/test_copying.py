"""Copies of runs of bytes, by each way that there is."""

from __future__ import annotations

import itertools
import math
import resource
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from pullfill.errors import TransferFailed
from pullfill.transfer import copying
from pullfill.transfer.runs import Batch, Rows
from tests.support.transfer_rigs import (
    random_bytes,
)


def _batch(count: int, size: int) -> Batch:
    order = np.random.default_rng(1).permutation(count) * size
    return Batch(list(range(0, count * size, size)), order.tolist(), [size] * count, count * size)


@pytest.fixture(params=["plain", "watched", "switching", "vectored"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every way `copy_batch` can take. `switching`: at each look at the clock, a second has gone in
    which the thread slept twice."""
    assert copying.vectored_works(), "this machine should be able to copy by iovec"
    monkeypatch.setattr(copying, "vectored_works", lambda: request.param != "plain")
    until = math.inf if request.param == "vectored" else 0.0
    monkeypatch.setattr(copying, "_vectored_until", until)
    looks = itertools.count(step=1 if request.param == "switching" else 0)

    def usage(_: int) -> SimpleNamespace:
        return SimpleNamespace(ru_nvcsw=2 * next(looks), ru_utime=0.0, ru_stime=0.0)

    monkeypatch.setattr(time, "perf_counter", lambda: float(next(looks)))
    monkeypatch.setattr(resource, "getrusage", usage)
    return request.param


@pytest.mark.parametrize(("count", "size"), [(64, 48), (3, 300_000), (1, 5), (1000, 4096)])
def test_copy_batch(count: int, size: int, way: str) -> None:
    source, target = random_bytes(count * size, 1), np.zeros(count * size, np.uint8)
    batch = _batch(count, size)
    copying.copy_batch(source.ctypes.data, target.ctypes.data, batch)
    expected = np.empty_like(source).reshape(count, size)
    expected[np.array(batch.target) // size] = source.reshape(count, size)
    np.testing.assert_array_equal(target, expected.ravel())
    switched = way == "switching" and count > 8
    assert switched == (copying._vectored_until not in (0.0, math.inf))


@pytest.mark.parametrize("largest", [copying._LARGEST, 0])
@pytest.mark.parametrize("lengths", [[48, 16, 7] * 8, [41] * 24], ids=["unlike", "alike"])
@pytest.mark.parametrize("counts", [(3,), (2, 3), (1, 1)])
def test_copy_batch_with_rows(
    counts: tuple[int, ...],
    lengths: list[int],
    largest: int,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs of several lengths or one, apart by other strides on either side; too far from each
    other for one array (`largest`)."""
    monkeypatch.setattr(copying, "_LARGEST", largest)
    rows = Rows(counts, (9000, 2500)[-len(counts) :], (7000, 2000)[-len(counts) :])
    sources, targets = range(0, 24 * 60, 60), range(23 * 50, -1, -50)
    batch = Batch([*sources], [*targets], lengths, sum(lengths) * rows.count, rows)
    source, target = random_bytes(30_000, 1), np.zeros(30_000, np.uint8)
    copying.copy_batch(source.ctypes.data, target.ctypes.data, batch)
    expected = np.zeros_like(target)
    flat = batch.flat()
    for s, t, n in zip(flat.source, flat.target, flat.nbytes, strict=True):
        expected[t : t + n] = source[s : s + n]
    np.testing.assert_array_equal(target, expected)


def test_a_contended_gil_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_vectored_until", 0.0)
    source, target = random_bytes(1 << 20, 1), np.zeros(1 << 20, np.uint8)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while copying._vectored_until == 0.0 and time.monotonic() < deadline:
            copying.copy_batch(source.ctypes.data, target.ctypes.data, _batch(1024, 1024))
    finally:
        stop.set()
        thread.join()
    assert copying._vectored_until > 0.0


def test_short_vectored_copy_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_vectored_until", math.inf)
    data = np.zeros(1 << 16, np.uint8)
    batch = _batch(8, 64)
    with pytest.raises(TransferFailed, match="of 512 bytes"):
        copying.copy_batch(data.ctypes.data, 4096, batch)  # page 1 is never mapped
