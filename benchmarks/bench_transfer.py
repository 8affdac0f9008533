"""shm block writes against plain memory copies: `python -m benchmarks.bench_transfer`.

Each row moves the same bytes between the same two mappings in three ways, interleaved, and
compares medians: our fenced write; a plain loop of `memmove` over the same runs (no plan, no
fence, no batches); one `memmove` of all bytes at once. `--busy` repeats it beside a thread that
runs Python and small matrix products, as an engine does: there, giving up the GIL per run costs.
Digests of the same blocks are held against the write: `full` all, `sample` as a grant draws them.
Writes benchmarks/results/transfer.json and .md with `--save`.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.machine import Quiet
from benchmarks.report import RESULTS, Row, finish, row, versus
from pullfill.transfer.digest import BlockDigester, sampled
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.runs import plan
from pullfill.transfer.session import MappedSession
from pullfill.transfer.shm.fence import ShmGate
from pullfill.wire import DigestMode, FenceToken
from tests.support.transfer_rigs import Local, Region, Rig, shm_rig

MOVED = 32 << 20
LAYERS = 4


@dataclass
class Case:
    """One run size: a region four times what is moved, so that scattered means scattered."""

    name: str
    page: int
    source: list[int]
    target: list[int]
    blocks: int


def cases() -> Iterator[Case]:
    rng = np.random.default_rng(1)
    for page in (16 << 10, 64 << 10, 256 << 10, 1 << 20):
        count = MOVED // page // LAYERS
        blocks = 2 * count
        scattered = [rng.permutation(blocks)[:count].tolist() for _ in range(2)]
        yield Case(f"{page >> 10} KiB scattered", page, *scattered, blocks)
        if page in (16 << 10, 1 << 20):
            run = list(range(count))
            yield Case(f"{page >> 10} KiB contiguous", page, run, [b + 1 for b in run], blocks)


def interleaved(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each way."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    order, rng = list(ways.items()), random.Random(1)
    for _ in range(rounds):
        rng.shuffle(order)  # who comes after whom matters: the second finds the bytes in the cache
        for name, way in order:
            started = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


@contextmanager
def session_of(
    rig: Rig, region: Region, local: Local
) -> Iterator[tuple[MappedSession, FenceToken]]:
    session = rig.connect(local, region)
    assert isinstance(session, MappedSession)
    token = region.owner.fences.open(range(region.memory.layout.num_blocks))
    try:
        yield session, token
    finally:
        session.close()
        assert region.owner.fences.try_revoke(token)


def bench_writes(rig: Rig, rounds: int, suffix: str = "") -> list[Row]:
    """GB/s of each case, with the ratios to both plain ways."""
    rows = []
    for case in cases():
        layout = dense_layout(LAYERS, case.blocks, 1, case.page)
        region = rig.region(layout, instance_id="bench")
        local = rig.local(layout)
        pairs = [
            (s * layout.block_stride + shift, t * layout.block_stride + shift)
            for shift in range(0, LAYERS * layout.layer_stride, layout.layer_stride)
            for s, t in zip(case.source, case.target, strict=True)
        ]
        src, dst, page = local.memory.address, region.memory.address, case.page

        def loop(pairs=pairs, src=src, dst=dst, page=page) -> None:
            for s, t in pairs:
                ctypes.memmove(dst + t, src + s, page)

        def once(src=src, dst=dst) -> None:
            ctypes.memmove(dst, src, MOVED)

        with session_of(rig, region, local) as (session, token):
            write = partial(session.write_blocks, token, case.source, case.target)
            took = interleaved({"shm": write, "loop": loop, "once": once}, rounds)
            write()
        np.testing.assert_array_equal(
            region.pages[0, case.target[0]], local.pages[0, case.source[0]]
        )
        region.owner.close()
        speed = {name: MOVED / seconds / 1e9 for name, seconds in took.items()}
        for peer, label in (("loop", "memmove per run"), ("once", "one memcpy")):
            rows.append(
                versus(f"shm write, {case.name}{suffix}", speed["shm"], "GB/s", label, speed[peer])
            )
    return rows


def bench_digests(rig: Rig, rounds: int, suffix: str = "") -> list[Row]:
    """What `--kv-digest` costs each end, against the write of the same blocks."""
    rows = []
    for case in (c for c in cases() if c.name.endswith("scattered")):
        layout = dense_layout(LAYERS, case.blocks, 1, case.page)
        region, local = rig.region(layout, instance_id="bench"), rig.local(layout)
        digester = BlockDigester(local.memory)
        drawn = sampled(DigestMode.SAMPLE, len(case.source), b"bench", 1)
        sample = [case.source[index] for index in drawn]
        with session_of(rig, region, local) as (session, token):
            ways: dict[str, Callable[[], object]] = {
                "write": partial(session.write_blocks, token, case.source, case.target),
                "full": partial(digester.digest, case.source),
                "sample": partial(digester.digest, sample),
            }
            took = interleaved(ways, rounds)
        region.owner.close()
        for mode, nbytes in (("full", MOVED), ("sample", MOVED * len(sample) // len(case.source))):
            name = f"digest {mode}, {case.name}{suffix}"
            rows.append(row(f"{name}: speed", nbytes / took[mode] / 1e9, "GB/s"))
            rows.append(
                versus(
                    f"{name}: time", took[mode] * 1e3, "ms", "shm write of all", took["write"] * 1e3
                )
            )
    return rows


def bench_fence(rig: Rig, rounds: int) -> list[Row]:
    """Taking, checking and letting go of a fence, in percent of a 1 MiB copy."""
    layout = dense_layout(1, 64, 1, 1 << 20)
    region, local = rig.region(layout, instance_id="bench"), rig.local(layout)
    with session_of(rig, region, local) as (session, token):
        gate = session._gate
        assert isinstance(gate, ShmGate)
        src, dst = local.memory.address, region.memory.address

        def fences() -> None:
            for _ in range(1000):
                gate.enter(token)
                gate.leave(token)

        def copies() -> None:
            for i in range(64):
                ctypes.memmove(dst + (i << 20), src + (i << 20), 1 << 20)

        took = interleaved({"fence": fences, "copy": copies}, rounds)
    region.owner.close()
    fence, copy = took["fence"] / 1000, took["copy"] / 64
    share = 100 * fence / copy
    return [
        row("fence per batch", fence * 1e6, "us"),
        row("fence, share of a 1 MiB write", share, "%", at_most=3),
    ]


def bench_plan(rounds: int) -> list[Row]:
    """Plan and merge 10,000 blocks of a 32-layer model, batches not expanded and expanded."""
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
        took = interleaved({"plan": lambda s=s, t=t: plan(layout, layout, s, t)}, rounds)["plan"]
        rows.append(row(f"plan 10,000 blocks, {name}", took * 1e3, "ms", at_most=5))
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

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def measure(options: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-") as directory:
        rig = shm_rig(Path(directory))
        rows = bench_writes(rig, options.rounds) + bench_digests(rig, options.rounds)
        if options.busy:
            few = max(3, options.rounds // 3)
            with busy_thread():
                rows += bench_writes(rig, few, ", busy thread")
                rows += bench_digests(rig, few, ", busy thread")
        rows += bench_fence(rig, options.rounds)
    return rows + bench_plan(options.rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--busy", action="store_true", help="also beside a busy Python thread")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS}/transfer.json")
    options = parser.parse_args()
    quiet = Quiet()
    with quiet.window([]):
        rows = measure(options)
    print(quiet)
    title = "Fenced block writes over shared memory"
    return finish("transfer", rows, quiet=quiet.quiet, save=options.save, title=title)


if __name__ == "__main__":
    sys.exit(main())
