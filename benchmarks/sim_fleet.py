"""Fleets of GPU workers with both sides beside every static split: `make sim-fleet`.

Workers with both sides answer requests beside n decode and m prefill workers, for each m of a
sweep and with each policy, and beside plain servers that get requests by the policy `kv`. A request
is good if its first token comes within 1 s, and the 99th percentile of its gaps is at most 50 ms:
the defaults of `router.ttft_ms` and `router.itl_ms`.

Step times are published figures of Llama 3.3 70B, FP8, on two H100 with tensor parallelism:
NVIDIA's tables for NIM 1.8.0 (docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance). With one
client the first token comes after 407 ms, and then one each 18.6 ms, with 5000 tokens in and 500
out; 47.8 and 18.9 ms with 500 in and 2000 out. From its 920 tokens/s with 200 clients follows what
KV costs. What it gives with 25 and 50 clients was not used, and is compared with what comes out.

Numbers of clients and rates are for each worker. Prompts and answers of `conversations` are four
times as long as on CPUs: answers of 340 tokens, as in the public trace.

8 workers run every split. 64 workers run the best of these splits and its two neighbours. 1,000
workers run one load for 8 s: an answer begins and ends in that time. All clients begin together. So
loads with clients are measured only when each client has had several answers.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace

from benchmarks import command
from benchmarks.report import Row, versus
from benchmarks.sim_sides import Cluster, Machine, Options, Request, World
from benchmarks.sim_splits import System, conversations, started
from pullfill.wire import DecodePolicy

NAME = "sim-fleet"
MACHINE = Machine(
    0.0184, 0.0, 1.5e-8, 5.66e-5, 8.4e-9,
    jitter=0.02, work_jitter=0.05, pause_share=0.005, pause_s=0.005,
)  # fmt: skip
SEATS = 256
PUBLISHED = ((25, 623.4), (50, 814.4))
"""With 5000/500: clients, and tokens a second."""


@dataclass(frozen=True, slots=True)
class Load:
    """What clients ask, and for how long: `warm_s` until it is measured, then `seconds`.

    phases: lengths of prompts and answers, and requests that come in a second. They take equal
    parts of the time. clients: that ask again at once. Then no rate counts.
    length: of conversations, beside those on CPUs."""

    name: str
    phases: tuple[tuple[int, int, float], ...]
    warm_s: float
    seconds: float
    clients: int = 0
    length: int = 0

    @property
    def unit(self) -> str:
        return "tokens/s" if self.clients else "good/s"

    def asks(self, workers: int, seed: int) -> Iterable[Request]:
        end, rng, at = self.warm_s + self.seconds, random.Random(seed), 0.0
        while True:
            prompt, output, rate = self.phases[int(at / end * len(self.phases))]
            at += rng.expovariate(rate * workers)
            if at >= end:
                return
            yield Request("", at, prompt, output)


SATURATED = Load("", ((5000, 500, 0.0),), 60.0, 180.0)
HUGE = Load("1K/200, 6/s", ((1024, 200, 6.0),), 5.0, 12.0)
LOADS = (
    Load("4K/100 2.4/s, then 300/900 6/s", ((4096, 100, 2.4), (300, 900, 6.0)), 5.0, 45.0),
    Load("1K/1K, 128 clients", ((1024, 1024, 0.0),), 120.0, 60.0, clients=128),
    Load("1K/200, 128 clients", ((1024, 200, 0.0),), 60.0, 30.0, clients=128),
    Load("1K/1K, 3.5/s", ((1024, 1024, 3.5),), 20.0, 8.0),
    HUGE,
    Load("1K/200, 9/s", ((1024, 200, 9.0),), 5.0, 12.0),
    Load("conversations, 4/s", ((0, 0, 4.0),), 8.0, 15.0, length=4),
)


def both(workers: int, place: DecodePolicy = DecodePolicy.PACK) -> System:
    options = Options("cost", place, step_tokens=8192, seats=SEATS)
    return System(f"both sides, {place}", options, ("both",) * workers, MACHINE)


def split(workers: int, prefill: int, rule: str = "cost") -> System:
    sides = ("decode",) * (workers - prefill) + ("prefill",) * prefill
    options = Options(rule, DecodePolicy.KV, step_tokens=8192, seats=SEATS)
    name = f"{workers - prefill} decode + {prefill} prefill, {rule}"
    return System(name, options, sides, MACHINE)


def plain(workers: int, step_tokens: int = 8192) -> System:
    """step_tokens: `--max-num-batched-tokens`. With 256 a step keeps to 50 ms."""
    options = Options("plain", DecodePolicy.KV, step_tokens=step_tokens, seats=SEATS)
    return System(f"plain, {step_tokens} tokens a step", options, ("decode",) * workers, MACHINE)


def value(system: System, load: Load, seed: int = 1) -> float:
    """Return good requests or, with clients, tokens of answers in a second."""
    workers = len(system.sides)
    if load.clients:
        world = World(seed)
        cluster = Cluster(world, system.options, system.sides, system.machine)
        asks = cluster.ask_again(load.clients * workers, *load.phases[0][:2], within_s=5.0)
        world.run(load.warm_s)
        before = sum(one.made for one in asks)
        world.run(load.warm_s + load.seconds)
        return (sum(one.made for one in asks) - before) / load.seconds
    asks = [*(_talks(load, workers, seed) if load.length else load.asks(workers, seed))]
    started(system, asks, seed).run()
    return sum(one.good for one in asks if one.at >= load.warm_s) / load.seconds


def _talks(load: Load, workers: int, seed: int) -> Iterable[Request]:
    rate = load.phases[0][2] * workers
    for one in conversations(seed, rate, int(rate * (load.warm_s + load.seconds))):
        blocks = tuple(load.length * b + n for b in one.blocks for n in range(load.length))
        yield Request("", one.at, load.length * one.prompt, load.length * one.output, blocks)


def measure(jobs: int) -> list[Row]:
    rows: list[Row] = []
    with ProcessPoolExecutor(jobs) as pool:
        for clients, published in PUBLISHED:
            found = value(plain(1), replace(SATURATED, clients=clients))
            what = f"one server, {clients} clients, 5000/500"
            rows.append(versus(what, found, "tokens/s", "published", published))
        swept = [split(8, m) for m in range(1, 7)] + [split(8, m, "conditional") for m in (2, 3, 4)]
        others = [both(8, DecodePolicy.KV), plain(8), plain(8, 256)]
        for load in LOADS:
            found_rows, best = _beside(pool, load, 8, swept, others)
            rows += found_rows
            m, rule = best.sides.count("prefill"), best.options.rule
            near = [split(64, 8 * m + more, rule) for more in (-4, 0, 4)]
            rows += _beside(pool, load, 64, near, [plain(64)])[0]
            if load is HUGE:
                short = replace(load, warm_s=4.0, seconds=4.0)
                rows += _beside(pool, short, 1000, [split(1000, 125 * m, rule)], [plain(1000)])[0]
    return rows


def _beside(
    pool: Executor, load: Load, workers: int, splits: Sequence[System], others: Sequence[System]
) -> tuple[list[Row], System]:
    """Compare workers with both sides with the best of the splits, which is returned, too."""
    systems = [both(workers), *others, *splits]
    runs = pool.map(value, systems, [load] * len(systems))
    found = dict(zip(systems, runs, strict=True))
    own, best = found[systems[0]], max(splits, key=found.__getitem__)
    target, told = 1.10 if len(load.phases) > 1 else 1.0, f"{workers} workers, {load.name}"
    rows = [
        versus(
            told, own, load.unit, peer.name, max(found[peer], 1e-3),
            at_least=target if peer is best else None,
        )
        for peer in (best, *others)
    ]  # fmt: skip
    print(*(f"{told}: {one.name}: {found[one]:.5g} {load.unit}" for one in systems), sep="\n")
    return rows, best


def main() -> int:
    parser = command.described(__doc__)
    cores = os.cpu_count()
    parser.add_argument("--jobs", dest="count", type=int, default=cores, help="runs at a time")
    title = "Fleets of GPU workers with both sides beside every split, simulated"
    return command.simulate(NAME, title, parser, measure)


if __name__ == "__main__":
    raise SystemExit(main())
