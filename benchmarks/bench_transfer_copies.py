"""Rows about copying on one host: shm writes, the fence, plans.

Each shm row moves the same bytes between the same two mappings in three ways, interleaved, and
compares medians: our fenced write; a plain loop of `memmove` over the same runs (no plan, no
fence, no batches); one `memmove` of all bytes at once. Beside a busy Python thread (`busy`) giving
up the GIL costs: up to a switch interval each time, which is 0.5 ms as in a worker.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.report import Row, row, versus
from pullfill.transfer.contract import PeerSession
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.runs import plan
from pullfill.transfer.session import MappedSession
from pullfill.transfer.shm.fence import ShmHold
from pullfill.wire import FenceToken
from tests.support.transfer_rigs import Local, Region, Rig

LAYERS = 4
SWITCH_INTERVAL_S = 0.0005

Clock = Callable[[], float]


@dataclass(frozen=True)
class Sizes:
    """moved: bytes per write. pages: run sizes, one head and layer of a block each."""

    moved: int = 64 << 20
    pages: tuple[int, ...] = (16 << 10, 64 << 10, 256 << 10, 1 << 20)


@dataclass(frozen=True)
class Case:
    """One run size. Scattered ones are drawn from a region twice as large as what is moved. The
    others fill theirs but for a block, so that one memcpy copies the same pages: which ones it
    meets makes a tenth of its speed."""

    name: str
    page: int
    source: list[int]
    target: list[int]
    blocks: int

    @property
    def contiguous(self) -> bool:
        return self.name.endswith("contiguous")


def cases(sizes: Sizes) -> Iterator[Case]:
    """Scattered runs of every size, contiguous ones of the smallest and the largest."""
    rng = np.random.default_rng(1)
    for page in sizes.pages:
        count = sizes.moved // page // LAYERS
        blocks = 2 * count
        source, target = (rng.permutation(blocks)[:count].tolist() for _ in range(2))
        yield Case(f"{page >> 10} KiB scattered", page, source, target, blocks)
        if page in (sizes.pages[0], sizes.pages[-1]):
            run = list(range(count))
            yield Case(f"{page >> 10} KiB contiguous", page, run, [b + 1 for b in run], count + 1)


def interleaved(
    ways: dict[str, Callable[[], object]], rounds: int, clock: Clock = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each way."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    order, rng = list(ways.items()), random.Random(1)
    for _ in range(rounds):
        rng.shuffle(order)  # who comes after whom matters: the second finds the bytes in the cache
        for name, way in order:
            started = clock()
            way()
            times[name].append(clock() - started)
    return {name: statistics.median(values) for name, values in times.items()}


@contextmanager
def session_of(rig: Rig, region: Region, local: Local) -> Iterator[tuple[PeerSession, FenceToken]]:
    session = rig.connect(local, region)
    token = region.owner.fences.open(range(region.memory.layout.num_blocks))
    try:
        yield session, token
    finally:
        session.close()
        assert region.owner.fences.try_revoke(token)


def pairs_of(case: Case) -> list[tuple[int, int]]:
    """Offsets of every run in the source and in the target."""
    layout = dense_layout(LAYERS, case.blocks, 1, case.page)
    return [
        (s * layout.block_stride + shift, t * layout.block_stride + shift)
        for shift in range(0, LAYERS * layout.layer_stride, layout.layer_stride)
        for s, t in zip(case.source, case.target, strict=True)
    ]


def plain_ways(
    case: Case, source: int, target: int, moved: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A loop of `memmove` over the case's runs, between memories at these addresses; one `memmove`
    of as many bytes."""
    pairs, page = pairs_of(case), case.page

    def loop() -> None:
        for s, t in pairs:
            ctypes.memmove(target + t, source + s, page)

    def once() -> None:
        ctypes.memmove(target, source, moved)

    return loop, once


def write_rows(
    rig: Rig, sizes: Sizes, rounds: int, clock: Clock, suffix: str = "", targets: bool = True
) -> list[Row]:
    """GB/s of each case, with the ratios to both plain ways."""
    rows = []
    for case in cases(sizes):
        layout = dense_layout(LAYERS, case.blocks, 1, case.page)
        region, local = rig.region(layout, instance_id="bench"), rig.local(layout)
        loop, once = plain_ways(case, local.memory.address, region.memory.address, sizes.moved)
        with session_of(rig, region, local) as (session, token):
            write = partial(session.write_blocks, token, case.source, case.target)
            took = interleaved({"shm": write, "loop": loop, "once": once}, rounds, clock)
            write()
        np.testing.assert_array_equal(
            region.pages[:, case.target], local.pages[:, case.source], err_msg=case.name
        )
        region.owner.close()
        speed = {name: sizes.moved / seconds / 1e9 for name, seconds in took.items()}
        name = f"shm write, {case.name}{suffix}"
        for peer, label, floor in (
            ("loop", "memmove per run", 0.9),
            ("once", "one memcpy", 0.9 if case.contiguous else None),
        ):
            rows.append(
                versus(name, speed["shm"], "GB/s", label, speed[peer],
                       at_least=floor if targets else None)
            )  # fmt: skip
    return rows


def fence_rows(rig: Rig, rounds: int, clock: Clock) -> list[Row]:
    """Taking, checking and letting go of a fence, in percent of a 1 MiB copy."""
    layout = dense_layout(1, 64, 1, 1 << 20)
    region, local = rig.region(layout, instance_id="bench"), rig.local(layout)
    with session_of(rig, region, local) as (session, token):
        assert isinstance(session, MappedSession)
        hold = session._hold
        assert isinstance(hold, ShmHold)
        src, dst = local.memory.address, region.memory.address

        def fences() -> None:
            for _ in range(1000):
                hold.enter(token)
                hold.leave(token)

        def copies() -> None:
            for i in range(64):
                ctypes.memmove(dst + (i << 20), src + (i << 20), 1 << 20)

        took = interleaved({"fence": fences, "copy": copies}, rounds, clock)
    region.owner.close()
    fence, copy = took["fence"] / 1000, took["copy"] / 64
    share = 100 * fence / copy
    return [
        row("fence per batch", fence * 1e6, "us"),
        row("fence, share of a 1 MiB write", share, "%", at_most=3),
    ]


def plan_rows(rounds: int, clock: Clock) -> list[Row]:
    """Plan and merge 10,000 blocks of a 32-layer model."""
    layout = dense_layout(32, 40_000, 8, 8192)
    rng = np.random.default_rng(2)
    scattered = rng.permutation(40_000)[:10_000], rng.permutation(40_000)[:10_000]
    run = np.arange(10_000), np.arange(10_000) + 7
    mixed = (np.arange(10_000) + np.arange(10_000) // 16, np.arange(10_000))
    rows = []
    for name, (source, target) in {
        "scattered": scattered,
        "runs of 16": mixed,
        "one run": run,
    }.items():
        s, t = source.tolist(), target.tolist()
        ways: dict[str, Callable[[], object]] = {"plan": partial(plan, layout, layout, s, t)}
        took = interleaved(ways, rounds, clock)["plan"]
        rows.append(row(f"plan and merge 10,000 blocks, {name}", took * 1e3, "ms", at_most=5))
    return rows


@contextmanager
def busy_thread() -> Iterator[None]:
    """Something like an engine thread: Python in between native calls."""
    stop = threading.Event()
    matrix = np.random.default_rng(3).random((64, 64))

    def work() -> None:
        while not stop.is_set():
            for _ in range(200):
                _ * 3
            for _ in range(3):
                matrix @ matrix

    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)
