"""The Triton kernel and the copy engines against torch, on a device."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from pullfill.transfer.gpu.copies import BATCH_RUNS, GpuCopier, kernel_for
from pullfill.transfer.gpu.cuda import load, why_no_cuda
from pullfill.transfer.runs import Batch

pytestmark = pytest.mark.gpu
NBYTES = 16 << 20


def runs(length: int, count: int, unit: int) -> list[tuple[int, int, int]]:
    """(source, target, bytes): scattered, targets apart."""
    places = NBYTES // (length + unit) - 1
    rng = random.Random(length)
    sources, targets = rng.choices(range(places), k=count), rng.sample(range(places), count)
    return [
        (s * (length + unit), t * (length + unit), length)
        for s, t in zip(sources, targets, strict=True)
    ]


def test_the_driver_is_there() -> None:
    assert why_no_cuda() is None
    driver = load()
    assert driver.count() == torch.cuda.device_count()
    assert len(driver.uuid(0)) == 32
    assert driver.can_map(0, 0)


@pytest.mark.parametrize("way", ["kernel", "engines"])
@pytest.mark.parametrize(
    ("length", "unit"), [(16, 16), (2048, 16), (65_536, 16), (300_000, 16), (1, 1), (4097, 1)]
)
def test_every_byte_and_no_other(way: str, length: int, unit: int) -> None:
    driver = load()
    copier = GpuCopier(driver, 0, small_run=1 << 30 if way == "kernel" else 0)
    if way == "kernel":
        kernel = kernel_for(0, copier.stream)
        assert kernel is not None
        copier.use_kernel(kernel)
    source = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, device="cuda:0")
    target = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, device="cuda:0")
    expected = target.clone()
    todo = runs(length, min(BATCH_RUNS, 30), unit)
    for s, t, n in todo:
        expected[t : t + n] = source[s : s + n]
    torch.cuda.synchronize()
    columns = [np.array(column, np.int64) for column in zip(*todo, strict=True)]
    batch = Batch(*columns, total=int(columns[2].sum()))
    copier(source.data_ptr(), target.data_ptr(), batch)
    assert copier.settled
    assert torch.equal(target, expected)
    copier.close()


def test_as_many_runs_as_a_batch_can_hold() -> None:
    copier = GpuCopier(load(), 0)
    copier.use_kernel(kernel_for(0, copier.stream))
    source = torch.randint(0, 256, (BATCH_RUNS * 64,), dtype=torch.uint8, device="cuda:0")
    target = torch.zeros_like(source)
    at = np.arange(BATCH_RUNS, dtype=np.int64) * 64
    torch.cuda.synchronize()
    copier(
        source.data_ptr(),
        target.data_ptr(),
        Batch(at, at[::-1].copy(), np.full(BATCH_RUNS, 64, np.int64), BATCH_RUNS * 64),
    )
    assert torch.equal(target.view(-1, 64), source.view(-1, 64).flip(0))
    copier.close()


def test_to_host_memory() -> None:
    """As digests are taken."""
    copier = GpuCopier(load(), 0)
    source = torch.randint(0, 256, (4096,), dtype=torch.uint8, device="cuda:0")
    target = np.zeros(4096, np.uint8)
    torch.cuda.synchronize()
    one = np.zeros(1, np.int64)
    copier(source.data_ptr(), target.ctypes.data, Batch(one, one, one + 4096, 4096))
    assert (target == source.cpu().numpy()).all()
    copier.close()
