"""The Triton kernel and the copy engines against torch, on a device."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch

from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.copying import read_pages
from pullfill.transfer.gpu.copies import BATCH_RUNS, BETWEEN, SAME, GpuCopier, Lane, lane_of
from pullfill.transfer.gpu.cuda import load
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.runs import Copies

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


@pytest.mark.parametrize("way", ["kernel", "engines"])
@pytest.mark.parametrize(
    ("length", "unit"), [(16, 16), (2048, 16), (65_536, 16), (300_000, 16), (4097, 1)]
)
def test_every_byte_and_no_other(way: str, length: int, unit: int) -> None:
    lane = lane_of(0) if way == "kernel" else Lane(load(), 0, lambda *_: None)
    assert lane.has_kernel == (way == "kernel")
    copier = GpuCopier(lane, SAME if way == "kernel" else BETWEEN)
    source = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, device="cuda:0")
    target = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, device="cuda:0")
    expected = target.clone()
    todo = runs(length, min(BATCH_RUNS, 30), unit)
    for s, t, n in todo:
        expected[t : t + n] = source[s : s + n]
    torch.cuda.synchronize()
    batch = Copies(*([*column] for column in zip(*todo, strict=True)))
    copier(source.data_ptr(), target.data_ptr(), batch)
    assert copier.settled
    assert torch.equal(target, expected)


def test_as_many_runs_as_a_batch_can_hold() -> None:
    copier = GpuCopier(lane_of(0))
    source = torch.randint(0, 256, (BATCH_RUNS * 64,), dtype=torch.uint8, device="cuda:0")
    target = torch.zeros_like(source)
    at = [*range(0, BATCH_RUNS * 64, 64)]
    torch.cuda.synchronize()
    copier(source.data_ptr(), target.data_ptr(), Copies(at, at[::-1], [64] * BATCH_RUNS))
    assert torch.equal(target.view(-1, 64), source.view(-1, 64).flip(0))


def test_runs_longer_than_a_row_of_the_table() -> None:
    """1 GiB in one run, and short ones beside it."""
    source = torch.randint(-128, 128, (1 << 30,), dtype=torch.int8, device="cuda:0")
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    lengths = [(1 << 30) - (1 << 20), 1 << 19, 1 << 19]
    at = [0, lengths[0], lengths[0] + lengths[1]]
    GpuCopier(lane_of(0))(source.data_ptr(), target.data_ptr(), Copies(at, at, lengths))
    assert torch.equal(target, source)


def test_blocks_cross_to_the_cpu() -> None:
    layout = dense_layout(3, 40, 2, 4096)
    nbytes = layout.num_layers * layout.layer_stride
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    memory = LocalMemory(source.data_ptr(), nbytes, layout, device=0)
    pages = source.cpu().numpy().reshape(3, 40, 2, 4096)
    for blocks in ([7, 3, 39], [0]):
        found = read_pages([memory], blocks).reshape(len(blocks), 3, 2, 4096)
        assert (found == pages[:, blocks].swapaxes(0, 1)).all()


def test_whoever_waits_for_a_copy_sleeps() -> None:
    """A gigabyte, many times over: the thread that waits uses a small part of a core."""
    source, target = (torch.zeros(1 << 30, dtype=torch.uint8, device="cuda:0") for _ in range(2))
    torch.cuda.synchronize()
    stream, one = load().stream(0), np.ones(1, np.uint64)
    columns = [one * np.uint64(n) for n in (target.data_ptr(), source.data_ptr(), 1 << 30)]
    for _ in range(100):
        stream.copy_batch(*columns)
    wall, cpu = time.perf_counter(), time.thread_time()
    stream.synchronize()
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    assert cpu < wall / 2, (cpu, wall)
    stream.close()
