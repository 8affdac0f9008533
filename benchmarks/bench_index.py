"""The prefix index of a frontend: lookups, block events, memory, and a frontend that starts anew.

64 workers hold 1M different blocks, in prompts of 512 blocks. Every eighth prompt is at all
workers, like a system prompt. The others are at one or two. Everything runs in this process, on one
core. Messages of workers are encoded before the measurement. A call blocks the event loop until it
returns, so the longest call is a row.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from benchmarks import machine
from benchmarks.report import Row, finish, median, percentile, row
from pullfill.prefix.chain import HashArray, chain, root
from pullfill.prefix.index import PrefixIndex
from pullfill.prefix.replica import Replica, State
from pullfill.prefix.ring import Ring
from pullfill.wire.codec import decoder, encode
from pullfill.wire.prefix import MAX_EVENTS, Op, PrefixEvents, PrefixFollow, PrefixPage

PROMPT = 512
BLOCK_SIZE = 16
SHARED = 8
"""One prompt of so many is at all workers."""
SLICE_S = 0.001
"""Seconds that one call of `tidy` may take."""
SERVE_S = 0.001
"""Seconds between two lookups of a frontend that starts anew."""
CHANGING = 200_000
"""Blocks that `events` stores and removes."""
MIB = 2**20
_decode = decoder(PrefixEvents | PrefixPage)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of the measurement.

    prompts: number of prompts, of PROMPT blocks each.
    churned: number of blocks that `churn` stores.
    lookups: number of lookups."""

    prompts: int = 1_000_000 // PROMPT
    workers: int = 64
    churned: int = 10_000_000
    lookups: int = 20_000

    @property
    def blocks(self) -> int:
        return self.prompts * PROMPT


@dataclass(slots=True)
class Held:
    """How long calls took, in seconds.

    last: the last call. It excludes the time to read the CPU clock.
    longest: the longest call of each kind.
    cpu: the most CPU time that a call of each kind used."""

    last: float = 0.0
    longest: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)

    def time(self, kind: str, call: Callable[..., T], *args: object) -> T:
        used, begin = time.thread_time(), time.perf_counter()
        found = call(*args)
        self.last = took = time.perf_counter() - begin
        used = time.thread_time() - used
        self.longest[kind] = max(took, self.longest.get(kind, 0.0))
        self.cpu[kind] = max(used, self.cpu.get(kind, 0.0))
        return found


class Plan:
    """The prompts, and the workers that hold them."""

    def __init__(self, scale: Scale, seed: int = 1) -> None:
        self.scale = scale
        rng = np.random.default_rng(seed)
        # Random numbers are as good as hashes of prompts that differ from their first block on.
        self.prompts = rng.integers(1, 2**64 - 1, (scale.prompts, PROMPT), np.uint64)
        self.homes = rng.integers(0, scale.workers, (scale.prompts, 2))

    def at(self, prompt: int) -> list[int]:
        """Return the workers that hold a prompt."""
        if prompt % SHARED == 0:
            return list(range(self.scale.workers))
        return sorted(set(self.homes[prompt].tolist()))

    def of(self, worker: int) -> HashArray:
        """Return the blocks that a worker holds."""
        return self.prompts[[worker in self.at(n) for n in range(len(self.prompts))]].ravel()


def pieces(hashes: HashArray) -> Iterator[HashArray]:
    for start in range(0, len(hashes), MAX_EVENTS):
        yield hashes[start : start + MAX_EVENTS]


def receive(replica: Replica, message: bytes) -> None:
    replica.take(_decode(message), 0.0)


def rss() -> int:
    gc.collect()
    return machine.memory(os.getpid()).rss


def hashing() -> Row:
    """Hash the blocks of a prompt of 8192 tokens."""
    tokens, seed, taken = os.urandom(4 * 8192), root("salt", "adapter", BLOCK_SIZE), []
    for _ in range(2000):
        begin = time.perf_counter()
        chain(seed, tokens, BLOCK_SIZE)
        taken.append(1e3 * (time.perf_counter() - begin))
    return row("hash a prompt of 8192 tokens, p50", median(taken), "ms", at_most=0.5)


def filled(plan: Plan, held: Held) -> tuple[PrefixIndex, list[Row]]:
    """Fill an index with the blocks of all prompts. Each prompt is stored once for each worker
    that holds it."""
    before, took, count = rss(), 0.0, 0
    index = PrefixIndex(plan.scale.blocks + CHANGING)
    for prompt, hashes in enumerate(plan.prompts):
        for worker in plan.at(prompt):
            refused = held.time("store", index.store, worker, hashes)
            took += held.last
            count += PROMPT
            assert refused == 0
    grown = (rss() - before) / len(index)
    return index, [
        row("resident memory per block", grown, "bytes", at_most=100),
        row("stored blocks, prompt by prompt", count / took, "1/s", at_least=1e6),
    ]


def lookups(plan: Plan, index: PrefixIndex, held: Held) -> list[Row]:
    """Look prompts up in random order. So the CPU's caches hold few of the blocks looked up."""
    rng = np.random.default_rng(2)
    taken: list[float] = []
    shared: list[float] = []
    for number in rng.integers(0, len(plan.prompts), plan.scale.lookups).tolist():
        prompt = plan.prompts[number]
        found = held.time("lookup", index.match, prompt)
        took = 1e6 * held.last
        assert found == dict.fromkeys(plan.at(number), PROMPT)
        (shared if number % SHARED == 0 else taken).append(took)
    both = taken + shared
    return [
        row("lookup of 512 blocks, p50", median(both), "us", at_most=25),
        row("lookup of 512 blocks, p99", percentile(both, 0.99), "us", at_most=300),
        row("lookup of 512 blocks at all 64 workers, p50", median(shared), "us"),
    ]


def events(plan: Plan, index: PrefixIndex, held: Held) -> list[Row]:
    """Receive the block events of one more worker, and apply them to the index.

    Each message stores new blocks, and removes the blocks that the previous message stored."""
    rows, worker = [], plan.scale.workers
    some = np.random.default_rng(4).integers(1, 2**64 - 1, CHANGING, np.uint64)
    for size in (MAX_EVENTS, 64):
        ring, replica, messages = Ring(size, CHANGING), Replica(index, worker, 0.0), []
        old = some[:0]
        for start in range(0, len(some), size // 2):
            first, new = ring.next, some[start : start + size // 2]
            ring.append(Op.STORE, new)
            ring.append(Op.REMOVE, old)
            old = new
            messages += [encode(one) for one in ring.since(ring.epoch, first) or ()]
        begin = time.perf_counter()
        for message in messages:
            held.time("events", receive, replica, message)
        took = time.perf_counter() - begin
        assert (replica.state, replica.healing.gaps) == (State.WARM, 0)
        target = 1e6 if size == MAX_EVENTS else None
        rows.append(row(f"block events, {size} a message", ring.next / took, "1/s", None, target))
        replica.forget(0.0)
    return rows


def churn(plan: Plan, index: PrefixIndex, held: Held) -> Row:
    """Replace the blocks of a worker by new ones, and measure how much memory the index gains.

    Some blocks are replaced before the measurement begins. These first replacements split nearly
    full segments of the index. A split costs memory, but only once.
    """
    rng, turn = np.random.default_rng(3), 0
    part = list(pieces(plan.of(0)))
    before, peak, settle = 0, 0, plan.scale.churned // 5
    while turn * MAX_EVENTS < plan.scale.churned + settle:
        if not before and turn * MAX_EVENTS >= settle:
            before = rss()
        old = part[turn % len(part)]
        new = rng.integers(1, 2**64 - 1, len(old), np.uint64)
        held.time("remove", index.remove, 0, old)
        held.time("store", index.store, 0, new)
        part[turn % len(part)] = new
        turn += 1
        if turn % 100 == 0:
            peak = max(peak, rss())
    name = f"resident memory gained over {plan.scale.churned / 1e6:g}M churned blocks"
    return row(name, (max(peak, rss()) - before) / MIB, "MiB", at_most=2)


def forgetting(plan: Plan, index: PrefixIndex, held: Held) -> list[Row]:
    """Forget a worker that has died."""
    begin = time.perf_counter()
    held.time("forget", index.forget, 1)
    unseen = time.perf_counter() - begin
    assert 1 not in index.match(plan.prompts[0])
    while not held.time("tidy", index.tidy, SLICE_S):
        pass
    took = 1e3 * (time.perf_counter() - begin)
    return [
        row("a dead worker is out of lookups after", 1e3 * unseen, "ms"),
        row("a dead worker is out of memory after", took, "ms", at_most=100),
    ]


async def starting(plan: Plan, held: Held) -> list[Row]:
    """A frontend starts anew: every worker sends a snapshot, while the frontend looks up prompts.

    Snapshots are encoded before the measurement, because that is the work of the workers."""
    scale, messages, index = plan.scale, [], PrefixIndex(plan.scale.blocks)
    replicas = [Replica(index, worker, 0.0) for worker in range(scale.workers)]
    for worker in range(scale.workers):
        ring = Ring(1, scale.blocks)
        for part in pieces(plan.of(worker)):
            ring.append(Op.STORE, part)
        messages.append([encode(one) for one in ring.answer(PrefixFollow())])
    waited: list[float] = []

    async def serve() -> None:
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(SERVE_S)
            index.match(plan.prompts[len(waited) % scale.prompts])
            waited.append(1e3 * (time.perf_counter() - begin - SERVE_S))

    serving = asyncio.create_task(serve())
    await asyncio.sleep(0)
    begin = time.perf_counter()
    for turn in range(max(map(len, messages))):
        for replica, coming in zip(replicas, messages, strict=True):
            if turn < len(coming):
                held.time("snapshot", receive, replica, coming[turn])
                await asyncio.sleep(0)
    took = time.perf_counter() - begin
    serving.cancel()
    assert all(one.state is State.WARM for one in replicas)
    assert index.match(plan.prompts[0]) == dict.fromkeys(range(scale.workers), PROMPT)
    return [
        row("a frontend that starts is warm after", took, "s", at_most=3),
        row("a lookup waits meanwhile, p99", percentile(waited, 0.99), "ms"),
    ]


def importing() -> Row:
    """Import the index in a new process. Its compiled functions come from numba's cache."""
    code = "import numpy, numba, time; t = time.perf_counter(); import pullfill.prefix.index"
    command = [sys.executable, "-c", f"{code}; print(time.perf_counter() - t)"]
    took = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return row("import with compiled functions in the cache", took, "s")


def measure(scale: Scale) -> tuple[list[Row], machine.OtherLoad]:
    plan, held, quiet = Plan(scale), Held(), machine.OtherLoad()
    with quiet.window([]):
        rows = [hashing()]
        index, more = filled(plan, held)
        rows += [*more, *lookups(plan, index, held), *events(plan, index, held)]
    with quiet.window([]):
        rows += [churn(plan, index, held), *forgetting(plan, index, held)]
        del index
        rows += asyncio.run(starting(plan, held))
    rows.append(importing())
    for name, longest in (("longest call", held.longest), ("longest call, own CPU", held.cpu)):
        print(f"{name}:", {kind: f"{1e3 * s:.3f} ms" for kind, s in longest.items()})
        rows.append(row(name, 1e3 * max(longest.values()), "ms", at_most=2))
    return rows, quiet


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/index.*")
    options = parser.parse_args()
    rows, quiet = measure(Scale())
    print(quiet)
    title = "The prefix index: 1M blocks at 64 workers"
    return finish("index", rows, quiet=quiet.quiet, save=options.save, title=title)


if __name__ == "__main__":
    sys.exit(main())
