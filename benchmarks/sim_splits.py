"""Workers with both sides beside every split, in simulated time: `make sim-splits`.

The loads are like those that were measured on two cores (`conversations`, in the lengths of the
public conversation trace of Mooncake), and clients that ask again at once. A request is good if its
first token comes within 1 s, and the 99th percentile of its gaps is at most 50 ms.

    calibration   what does not plan steps, beside what was measured with it
    splits        policy `cost` on two and four workers, beside static splits and plain vLLM
    recovery      twice what the workers can do, for ten seconds
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks import command
from benchmarks.report import Row, percentile, row, versus
from benchmarks.sim_sides import BLOCK, Cluster, Machine, Options, Request, World
from pullfill.wire import DecodePolicy

NAME = "sim-splits"
MACHINE = Machine()
BOTH_CORES = MACHINE.times(0.57, 0.95)
"""One server on two cores: prompts are 1.75 times as fast, streams hardly."""
# Median, in tokens, of what a turn adds, and the deviation of its logarithm. Then how often a
# session begins, and goes on, with a long prompt.
SHORT, LONG = (105, 0.45), (1000, 0.5)
LONG_SHARE = (0.38, 0.17)
COUNT = 223
CAPACITY_PER_S = 7.4
"""Requests that one worker answers in a second, about."""


def conversations(seed: int, rate: float, count: int = COUNT) -> list[Request]:
    """Whole sessions, `rate` requests a second: answers of 84 tokens on average, and half of the
    prompt tokens found in the cache of the worker that had the session before."""
    rng = random.Random(f"conversations/{seed}")
    found: list[tuple[float, int, int, tuple[int, ...]]] = []
    spread_s, block = count / 2.2, 0
    while len(found) < count:
        at, blocks, length = rng.uniform(0.0, spread_s), list[int](), _added(rng, LONG_SHARE[0])
        while True:
            output = int(min(480, max(1, rng.lognormvariate(math.log(62), 0.8))))
            length = min(length, 3900 - output)
            more = max(0, length // BLOCK - len(blocks))
            blocks += range(block, block + more)
            block += more
            found.append((at, length, output, tuple(blocks)))
            at += rng.expovariate(1 / 14.0)
            if rng.random() < 0.42 or at > spread_s or length > 3300:
                break
            length += output + _added(rng, LONG_SHARE[1])
    found = sorted(found)[:count]
    begin, took_s = found[0][0], found[-1][0] - found[0][0]
    scale = rate * took_s / count
    return [
        Request("", (at - begin) / scale, length, output, blocks)
        for at, length, output, blocks in found
    ]


def _added(rng: random.Random, share: float) -> int:
    median, deviation = LONG if rng.random() < share else SHORT
    return int(max(8, rng.lognormvariate(math.log(median), deviation)))


@dataclass(frozen=True, slots=True)
class System:
    name: str
    options: Options
    sides: tuple[str, ...] = ("both", "both")
    machine: Machine = MACHINE


@dataclass(frozen=True, slots=True)
class Result:
    """good: share of the requests. ttft_p50, ttft_p90, itl_p99: seconds.
    good_s, tokens_s: good requests and tokens of answers in a second."""

    good: float
    ttft_p50: float
    ttft_p90: float
    itl_p99: float
    good_s: float
    tokens_s: float


def run(system: System, asks: Sequence[Request], seed: int, until: float = math.inf) -> Result:
    """Run requests. until: what counts is what is done by then."""
    started(system, asks, seed).run(until)
    return _result(asks, min(until, max(ask.last for ask in asks)))


def started(system: System, asks: Sequence[Request], seed: int) -> World:
    """Return a world in which these requests come."""
    world = World(seed)
    Cluster(world, system.options, system.sides, system.machine).expect(asks)
    return world


def closed(
    system: System, clients: int, prompt: int, output: int, seed: int, warm_s: float, end_s: float
) -> Result:
    """Run clients that ask again at once, and count what is done from `warm_s` on."""
    world = World(seed)
    cluster = Cluster(world, system.options, system.sides, system.machine)
    asks = cluster.ask_again(clients, prompt, output, 0.01 * clients)
    world.run(warm_s)
    before = sum(one.made for one in asks)
    world.run(end_s)
    tokens = sum(one.made for one in asks) - before
    return replace(_result(asks, end_s), tokens_s=tokens / (end_s - warm_s))


def _result(asks: Sequence[Request], seconds: float) -> Result:
    begun = [one.first - one.at for one in asks if one.made]
    over = [one for one in asks if one.made == one.output]
    gaps = [gap for one in asks for gap in one.gaps]
    good = sum(one.good for one in over)
    return Result(
        good / max(1, len(over)),
        percentile(begun, 0.5),
        percentile(begun, 0.9),
        percentile(gaps, 0.99),
        good / seconds,
        sum(one.made for one in asks) / seconds,
    )


def recovery(system: System, seed: int) -> tuple[float, float, float]:
    """Half of what the workers can do, and for ten seconds twice as much as they can.

    Returns seconds from the end of these on until one of ten prompts is late at most, the longest
    TTFT, and tokens/s until five seconds after them."""
    rate = CAPACITY_PER_S * len(system.sides)
    asks = conversations(seed, rate / 2, int(30 * rate))
    storm = [one for one in conversations(-seed, 2 * rate, int(30 * rate)) if one.at < 10.0]
    for one in storm:
        one.at += 10.0
        one.blocks = tuple(-1 - block for block in one.blocks)
    asks = sorted([*asks, *storm], key=lambda one: one.at)
    world = started(system, asks, seed)
    world.run(25.0)
    tokens = sum(one.made for one in asks)
    world.run()
    late = [one.first - one.at > one.ttft_s for one in asks]
    ends = [
        one.at - 20.0
        for number, one in enumerate(asks)
        if sum(late[max(0, number - 9) : number + 1]) > 1
    ]
    return max(0.0, *ends), max(one.first - one.at for one in asks), tokens / 25.0


STEP = Options("cost", DecodePolicy.PACK)
PLAIN = Options("plain", DecodePolicy.KV)
ONE_EACH = ("decode", "prefill")
MEASURED = (
    (System("1 decode + 1 prefill, conditional", Options("conditional"), ONE_EACH), 0.987, 0.897),
    (
        System("2 with both sides, conditional", Options("conditional", DecodePolicy.KV)),
        0.655,
        0.430,
    ),
    (System("2 vLLM servers in turn", Options("plain", step_tokens=2048)), 0.753, 0.430),
    (
        System(
            "1 vLLM server on both cores", Options("plain", step_tokens=2048), ("both",), BOTH_CORES
        ),
        0.789,
        0.274,
    ),
)
"""What was measured on two cores at 4.4 and 8.8 requests a second: shares of good requests."""


def splits(workers: int) -> list[System]:
    """Workers with both sides first, then what they must not be worse than."""
    half = ("decode",) * (workers // 2) + ("prefill",) * (workers - workers // 2)
    return [
        System("both sides", STEP, ("both",) * workers),
        System("half of each, cost", Options("cost", DecodePolicy.KV), half),
        System("plain, kv", PLAIN, ("decode",) * workers),
    ]


def measure(seeds: int) -> list[Row]:
    """Return the rows of all parts."""
    rows: list[Row] = []
    every = range(1, seeds + 1)

    def mean(name: str, results: Sequence[Result]) -> float:
        return float(statistics.mean(getattr(one, name) for one in results))

    for system, *measured in MEASURED:
        for rate, was in zip((4.4, 8.8), measured, strict=True):
            found = [run(system, conversations(seed, rate), seed) for seed in every]
            rows.append(
                versus(f"{system.name}, {rate}/s: good", mean("good", found), "", "measured", was)
            )
    for rate in (4.4, 8.8):
        for system in splits(2):
            found = [run(system, conversations(seed, rate), seed) for seed in every]
            told = f"{system.name}, 2 workers, {rate}/s"
            good = mean("good", found)
            rows.append(
                row(f"{told}: good", good, "", at_least=0.99 if system.options == STEP else None)
            )
            for name in ("ttft_p50", "ttft_p90", "itl_p99"):
                rows.append(row(f"{told}: {name}", 1e3 * mean(name, found), "ms"))
    for workers in (2, 4):
        for share in (0.5, 0.75, 1.0, 1.5, 2.0):
            rate, count = CAPACITY_PER_S * workers * share, 450 * workers
            until = 0.95 * count / rate
            what = f"{workers} workers, {share:g} of what they can do"
            rows += _beside(
                what, "tokens_s" if share > 1 else "good_s", splits(workers),
                lambda one, rate=rate, count=count, until=until: [  # type: ignore[misc]
                    run(one, conversations(seed, rate, count), seed, until) for seed in every
                ],
            )  # fmt: skip
    for prompt, output in ((1024, 1024), (1024, 200)):
        for clients in (16, 32, 64):
            rows += _beside(
                f"{clients} clients, {prompt}/{output}", "tokens_s", splits(2),
                lambda one, clients=clients, prompt=prompt, output=output: [  # type: ignore[misc]
                    closed(one, clients, prompt, output, seed, 20.0, 60.0) for seed in every
                ],
            )  # fmt: skip
    ends = {one.name: [recovery(one, seed) for seed in range(1, 21)] for one in splits(2)}
    (_, own), *_, (plain, peers) = ends.items()
    for place, what in enumerate(("s until prompts are in time", "s, longest TTFT", "tokens/s")):
        values = [statistics.median(end[place] for end in part) for part in (own, peers)]
        at_least = 0.95 if what == "tokens/s" else None
        told = "ten seconds of twice the load, 20 seeds, median"
        rows.append(versus(told, values[0], what, plain, values[1], at_least=at_least))
    return rows


def _beside(
    what: str, name: str, systems: Sequence[System], runs: Callable[[System], list[Result]]
) -> list[Row]:
    """Compare the first system with the best of the others."""
    unit = {"good_s": "good/s", "tokens_s": "tokens/s"}[name]
    values = {
        one.name: statistics.mean(getattr(found, name) for found in runs(one)) for one in systems
    }
    (_, value), *others = values.items()
    peer, best = max(others, key=lambda one: one[1])
    return [versus(what, value, unit, peer, best, at_least=0.99 if name == "good_s" else 0.97)]


def main() -> int:
    parser = command.described(__doc__)
    parser.add_argument("--seeds", dest="count", type=int, default=4, help="runs of each load")
    title = "Workers with both sides beside every split, simulated"
    return command.simulate(NAME, title, parser, measure)


if __name__ == "__main__":
    raise SystemExit(main())
