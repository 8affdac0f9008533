"""`router.policy = cost` against every static threshold, in simulated time: `make sim`.

The production code decides where each prompt is computed (sim_sides.py). A request is good if its
first token and each of its later ones come within their targets. Goodput is the share of good
requests, because every system is asked the same at the same times.

    chat        short prompts, many streams
    documents   long prompts, short answers
    bursts      chat, and four long prompts at once every few seconds
    changing    chat, then documents, and a prefill worker that slows to a third
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks import command
from benchmarks.report import Row, percentile, row, versus
from benchmarks.sim_sides import Cluster, Machine, Options, Request, World
from pullfill.decode_worker.cost import CostModel, Queue, Targets
from pullfill.rate import FORGET_S
from pullfill.worker.step_meter import Step

NAME = "sim-local-or-remote"
THRESHOLDS = (0, 64, 128, 256, 512, 1024, 2048, 4096)
CHUNKS = (0, 64, 128, 256)
"""`--long-prefill-token-threshold` of the plain servers. 0: vLLM's default."""
SECONDS = 120.0
ITL_S = 0.05
MACHINE = Machine(
    0.0065, 0.00025, 0.0, 0.00028, 9.1e-8, jitter=0.05, work_jitter=0.0, pause_share=0.0
)
"""Step times of a CPU core, as `make bench-paths` measured them. A prompt of 256 tokens takes
76 ms, one of 4096 tokens 2.8 s, and a step with four streams 7.5 ms."""
SEATS = 32
COST = Options("cost", seats=SEATS)
ONE_EACH, PLAIN = ("decode", "prefill"), ("decode", "decode")


@dataclass(frozen=True, slots=True)
class Workload:
    """asks: makes the requests from a seed.
    slow: from half of the time on, the last machine takes this many times as long for prompts. It
    is that of a prefill worker, or of a plain server."""

    name: str
    asks: Callable[[random.Random], list[Request]]
    slow: float = 1.0


def chat(rng: random.Random, since: float, until: float, rate: float) -> list[Request]:
    found, at = [], since
    while (at := at + rng.expovariate(rate)) < until:
        tokens = int(min(1200, max(16, rng.lognormvariate(4.6, 0.8))))
        found.append(_ask(at, tokens, rng.randint(32, 160), 0.5))
    return found


def documents(rng: random.Random, since: float, until: float, rate: float) -> list[Request]:
    found, at = [], since
    while (at := at + rng.expovariate(rate)) < until:
        found.append(_ask(at, rng.randint(800, 3500), rng.randint(8, 48), 3.0))
    return found


def bursts(rng: random.Random, since: float, until: float, every_s: float) -> list[Request]:
    found, at = [], since + 1.0
    while at < until:
        found += [_ask(at, rng.randint(1200, 2400), rng.randint(8, 32), 3.0) for _ in range(4)]
        at += every_s
    return found


def _ask(at: float, tokens: int, output: int, ttft_s: float) -> Request:
    return Request("", at, tokens, output, ttft_s=ttft_s, itl_s=ITL_S)


def _changing(rng: random.Random) -> list[Request]:
    half = SECONDS / 2
    return (
        chat(rng, 0, half, 4.0) + chat(rng, half, SECONDS, 0.5) + documents(rng, half, SECONDS, 0.8)
    )


WORKLOADS = (
    Workload("chat", lambda rng: chat(rng, 0, SECONDS, 4.5)),
    Workload("documents", lambda rng: documents(rng, 0, SECONDS, 1.0)),
    Workload("bursts", lambda rng: chat(rng, 0, SECONDS, 2.0) + bursts(rng, 0, SECONDS, 6.0)),
    Workload("changing", _changing, slow=3.0),
)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one run.

    good: share of good requests. ttft_p90: seconds.
    errors: time and |prediction / outcome - 1| of each prediction."""

    good: float
    ttft_p90: float
    errors: Sequence[tuple[float, float]]


def run(workload: Workload, options: Options, seed: int, sides: Sequence[str] = ONE_EACH) -> Result:
    """Run one workload. sides: of each engine. With PLAIN, requests go to the two in turn."""
    world = World(seed)
    asks = sorted(workload.asks(random.Random(seed)), key=lambda ask: ask.at)
    cluster = Cluster(world, options, sides, MACHINE)
    cluster.expect(asks)
    last, slowed = cluster.engines[-1], MACHINE.times(workload.slow, 1.0)
    world.at(SECONDS / 2, lambda: setattr(last, "machine", slowed))
    world.run()
    good = sum(_good(ask) for ask in asks) / len(asks)
    p90 = percentile([ask.first - ask.at for ask in asks], 0.9)
    return Result(good, p90, cluster.errors)


def _good(ask: Request) -> bool:
    """Whether both targets are kept. An answer has few gaps here, so the longest one counts."""
    return ask.first - ask.at <= ask.ttft_s and max(ask.gaps, default=0.0) <= ask.itl_s


def measure(seeds: int) -> list[Row]:
    """Return the rows of all workloads."""
    rows: list[Row] = []
    errors: list[float] = []
    learned: list[float] = []
    for workload in WORKLOADS:

        def mean(
            options: Options, sides: Sequence[str] = ONE_EACH, workload: Workload = workload
        ) -> float:
            return statistics.mean(run(workload, options, s, sides).good for s in range(seeds))

        costs = [run(workload, COST, s) for s in range(seeds)]
        cost = statistics.mean(r.good for r in costs)
        errors += [error for r in costs for _, error in r.errors]
        if workload.slow > 1:
            late = SECONDS / 2 + FORGET_S
            learned += [error for r in costs for at, error in r.errors if at > late]
        swept = {t: mean(Options("conditional", threshold=t, seats=SEATS)) for t in THRESHOLDS}
        plain = {c: mean(Options("plain", chunk=c, seats=SEATS), PLAIN) for c in CHUNKS}
        best = max(swept, key=lambda t: swept[t])
        changes = workload.name == "changing"
        rows.append(
            versus(
                f"{workload.name}: goodput",
                100 * cost,
                "%",
                f"best threshold, {best} tokens",
                100 * swept[best],
                at_least=1.10 if changes else 0.98,
            )
        )
        chunk = max(plain, key=lambda c: plain[c])
        rows += [
            versus(
                f"{workload.name}: goodput", 100 * cost, "%", "two vLLM servers in turn",
                100 * plain[0], at_least=1.10 if changes else 0.98,
            ),
            versus(
                f"{workload.name}: goodput", 100 * cost, "%",
                f"two vLLM servers in turn, best chunk, {chunk or 1024} tokens", 100 * plain[chunk],
            ),
        ]  # fmt: skip
    rows.append(row("error of predictions, median", 100 * percentile(errors, 0.5), "%", 20))
    rows.append(row("error of predictions, p90", 100 * percentile(errors, 0.9), "%", 60))
    what = f"the same from {FORGET_S:g} s after the prefill worker slowed down on, median"
    rows.append(row(what, 100 * percentile(learned, 0.5), "%", 20))
    rows.append(row("one decision, p50", decision_us(), "us", 100))
    return rows


def decision_us() -> float:
    """Median time of one decision at a busy worker: 32 streams, and 16 prompts under way."""
    world = World(0)
    model = CostModel(1024, clock=world)
    queue, targets, took = Queue(1, 8, 8000, 10e3), Targets(1.0, ITL_S), list[float]()
    for number in range(2000):
        name, tokens = f"r{number}", 500 + number
        begin = time.perf_counter()
        costs = model.predict(queue, targets, 0, tokens)
        sent = costs.remote is not None and costs.remote.cost < costs.local.cost
        took.append(time.perf_counter() - begin)
        if number >= 48:
            continue
        model.admitted(name, costs, number < 8 or (number < 16 and sent))
        if number >= 16:
            model.stepped(Step(0, 0, ((0, tokens),), {name: tokens}), 0.1)
    return statistics.median(took[48:]) * 1e6


def main() -> int:
    parser = command.described(__doc__)
    parser.add_argument("--seeds", dest="count", type=int, default=3, help="runs of each workload")
    title = "The policy cost against static thresholds, simulated"
    return command.simulate(NAME, title, parser, measure)


if __name__ == "__main__":
    raise SystemExit(main())
