"""The published tables of disaggregated serving, measured here: `make bench-published`.

Prompts of 1024 tokens, answers of 1024 (1K/1K) or 200 tokens (1K/200). One prefill and n decode
workers (1PnD) are compared with 1 + n plain vLLM servers that get requests in turn. Both sides have
the same number of engines, which count as devices, and the same two cores. n is 1 and 2. With
n = 2, the third engine shares the first core with another one, on both sides.

Each round starts each system once, and the order changes from round to round. There are two
windows for each length:
  saturated   always 8 requests under way for each device: tokens/s per device, from a third of
              the window on
  paced       the same requests per second for both systems, a share (--share) of what the plain
              servers answered in their first saturated window: TTFT, TPOT, ITL, E2E
A figure is the median of the rounds.

For n = 5 and 6 engines are simulated, with step times measured in the same run, and with step
times that follow from the published figures. The simulated rows are compared at the rates at which
E2E p99 is the same, as in the published tables.
Writes results/published.json and .md. --quick: one round, 1P1D only, one policy (5 minutes).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import command, machine, report
from benchmarks.live import BenchError, end_in_order
from benchmarks.published import commands, loads, simulated
from benchmarks.published.figures import (
    SHAPES,
    Case,
    Figures,
    Pair,
    figures_of,
    median_of,
    rate_of,
    rows_of,
    table,
)
from benchmarks.report import Row, median, missing, versus
from benchmarks.serving import model, stats, workloads
from benchmarks.serving.contract import Answer, Ask, Kind, Running
from benchmarks.serving.systems import FLAGS, two_cores
from benchmarks.serving.systems_pairs import round_robin
from benchmarks.serving.systems_pullfill import cluster
from benchmarks.serving.window import measure
from benchmarks.serving.workloads import Prompts, Workload
from benchmarks.sim.local_engine import Speed
from pullfill.wire import RouterPolicy

TITLE = "The published tables of disaggregated serving, measured here"
OURS, PLAIN = "pullfill", "plain"
LENGTHS = (256, 1024, 2048)
"""Of the prompts that tell how long a step takes."""
DIFFERS = """\
What differs from the published tables:

- Engines: here they run on a core of a CPU each, with a model of 24M parameters. There they ran on
  A800 GPUs. On a CPU, a prompt takes a larger share of a request's time.
- Cores: client, frontend, proxy and the engines share two cores. 1P2D has three engines on them.
- Rate: measured rows have the same rate on both sides, and tokens/s per device with the same number
  of requests under way. The published rows, and the simulated ones, have the same E2E p99.
- Requests: a measured row has tens of them, so p99 of TTFT and E2E is nearly the longest.
- Peer: there one plain server on one GPU. Here as many plain servers as pullfill has engines.
- Simulated: each engine has a core to itself. *GPU*: the step times follow from the published
  figures of a plain server, and so do the rates. Only what pullfill makes of them is a result."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. Times in seconds, by the name of the shape.

    rounds: by the number of decode engines."""

    rounds: dict[int, int]
    saturated_s: dict[str, float]
    paced_s: dict[str, float]
    simulated_s: float
    simulated: tuple[int, ...]
    policies: tuple[RouterPolicy, ...]


FULL = Scale(
    {1: 2, 2: 1}, {"1K/1K": 30.0, "1K/200": 15.0}, {"1K/1K": 35.0, "1K/200": 25.0},
    simulated.SECONDS, (5, 6), simulated.POLICIES,
)  # fmt: skip
QUICK = Scale(
    {1: 1}, {"1K/1K": 15.0, "1K/200": 10.0}, {"1K/1K": 15.0, "1K/200": 12.0},
    60.0, (5,), simulated.POLICIES[:1],
)  # fmt: skip


def start(name: str, decode: int, base: Path) -> AbstractContextManager[Running]:
    """Start one side with 1 + `decode` engines."""
    if name == OURS:
        return cluster(name, "conditional", decode, 1, FLAGS, base)
    cores = two_cores()
    return round_robin(name, [cores[n % 2] for n in range(1 + decode)], FLAGS, base)


Key = tuple[str, int, str]
"""A system, the number of decode engines, and the name of a shape."""


@dataclass(slots=True)
class Measured:
    """What came of all windows.

    full: tokens/s per device of the saturated windows. paced: figures of the paced ones.
    asked: requests per second in the paced windows, by shape and number of decode engines.
    speed: step times of one plain server. failed: requests that failed."""

    full: dict[Key, list[float]] = field(default_factory=dict)
    paced: dict[Key, list[Figures]] = field(default_factory=dict)
    asked: dict[tuple[str, int], float] = field(default_factory=dict)
    speed: Speed | None = None
    failed: list[str] = field(default_factory=list)

    def pairs(self) -> Iterator[Pair]:
        """The rows that were measured."""
        for decode in sorted({key[1] for key in self.paced}):
            for shape in SHAPES:
                ours, plain = (OURS, decode, shape.name), (PLAIN, decode, shape.name)
                rate = self.asked[shape.name, decode]
                yield Pair(
                    Case(shape, decode),
                    median_of(self.paced[ours]),
                    median_of(self.paced[plain]),
                    (rate, rate),
                    (median(self.full[ours]), median(self.full[plain])),
                )


class Campaign:
    """All windows of one run. quiet: watches for what else uses the machine."""

    def __init__(self, scale: Scale, share: float, base: Path) -> None:
        self._scale, self._share, self._base = scale, share, base
        self.quiet = machine.OtherLoad()
        self.found = Measured()

    def run(self) -> Measured:
        """Measure everything. Raises BenchError."""
        for decode, rounds in self._scale.rounds.items():
            for number in range(rounds):
                # The plain servers come first in the first round: their rate is everybody's.
                for name in (PLAIN, OURS)[:: -1 if number % 2 else 1]:
                    folder = self._base / f"{decode}-{number}-{name}"
                    folder.mkdir()
                    self.quiet.look(2.0)
                    with start(name, decode, folder) as running:
                        self._windows(running, decode, number)
        return self.found

    def _windows(self, running: Running, decode: int, number: int) -> None:
        devices, name = 1 + decode, running.name
        prompts = Prompts(model.plain_tokens(), "published", name, decode, number)
        self._window(running, "warm-up", workloads.warm_up(prompts, LENGTHS))
        if name == PLAIN and self.found.speed is None:
            self.found.speed = self._speed(running, prompts, devices)
        for shape in SHAPES:
            seconds = self._scale.saturated_s[shape.name]
            work = loads.saturated(prompts, shape, seconds, loads.LANES * devices)
            answers = self._window(running, "saturated", work)
            full = rate_of(answers, seconds, devices, loads.SETTLES * seconds)
            if not full:
                raise BenchError(f"{name}, saturated: no token came from a third of it on")
            self.found.full.setdefault((name, decode, shape.name), []).append(full)
            rate = self.found.asked.setdefault(
                (shape.name, decode), self._share * full * devices / shape.answer
            )
            seconds = self._scale.paced_s[shape.name]
            work = loads.paced(prompts, shape, rate, seconds)
            answers = self._window(running, f"paced at {rate:.2f}/s", work)
            figures = figures_of(answers, seconds, devices)
            self.found.paced.setdefault((name, decode, shape.name), []).append(figures)
            ttft, itl = (1e3 * figures.times[f"{time} p99"] for time in ("TTFT", "ITL"))
            print(
                f"{name}, 1P{decode}D, {shape.name}: {full:.0f} tokens/s per device; at {rate:.2f} "
                f"requests/s, p99: TTFT {ttft:.0f} ms, ITL {itl:.0f} ms",
                flush=True,
            )

    def _speed(self, running: Running, prompts: Prompts, devices: int) -> Speed:
        """How long the steps of one server take."""
        alone = self._window(running, "solo", workloads.solo(prompts, LENGTHS, 2 * devices))
        ttft_s = {
            n: median([stats.ttft(a) for a in alone if len(a.ask.prompt) == n]) for n in LENGTHS
        }
        shape, step_s = SHAPES[-1], dict[int, float]()
        for each in (1, loads.LANES):
            asks = [
                Ask(Kind.SHORT, prompts(shape.prompt), shape.answer, f"lane-{lane}")
                for lane in range(each * devices)
            ]
            answers = self._window(running, f"{each} streams", Workload(tuple(asks)))
            step_s[each] = median(stats.gaps(answers))
        return simulated.speed_of(ttft_s, step_s)

    def _window(self, running: Running, label: str, work: Workload) -> Sequence[Answer]:
        """The answers of one window. Keeps the first failure. Raises BenchError without tokens."""
        window = measure(running, "published", label, 0, work)
        self.quiet.others.append(window.others)
        if bad := stats.failed(window.answers):
            what = f"{len(bad)} of {len(window.answers)} failed, first: {bad[0].error[:200]}"
            self.found.failed.append(f"{running.name}, {label}: {what}")
        if not stats.tokens_per_s(window.answers, window.length_s):
            raise BenchError(f"{running.name}, {label}: no token came in {window.length_s:g} s")
        return window.answers


def simulate(scale: Scale, speed: Speed, share: float) -> tuple[list[Pair], list[Row]]:
    """The simulated pairs, and rows that say which could not be had."""
    pairs, rows = list[Pair](), list[Row]()

    def add(case: Case, policy: RouterPolicy, at: Speed, rate: float) -> None:
        print(f"simulates {case.name}", flush=True)
        if pair := simulated.compare(case, policy, at, rate, scale.simulated_s):
            pairs.append(pair)
        else:
            rows.append(missing(f"{case.name}: tokens/s per device", case.peer, "E2E is longer"))

    for shape in SHAPES:
        for decode in scale.simulated:
            devices = 1 + decode
            full = simulated.saturated(
                simulated.plain(speed, devices), shape, devices, scale.simulated_s
            )
            for policy in scale.policies:
                case = Case(shape, decode, f"simulated, {policy.value}")
                add(case, policy, speed, share * full * devices / shape.answer)
    for (name, decode), each in simulated.GPU_RATES.items():
        shape = next(shape for shape in SHAPES if shape.name == name)
        case = Case(shape, decode, "simulated, conditional, GPU")
        add(case, RouterPolicy.CONDITIONAL, simulated.GPU, each * case.devices)
    return pairs, rows


def check_rows(found: Measured, speed: Speed, seconds: float) -> list[Row]:
    """How near the simulator comes to what was measured with 1P1D."""
    rows = []
    makes = {
        OURS: simulated.ours(RouterPolicy.CONDITIONAL, speed, 1),
        PLAIN: simulated.plain(speed, 2),
    }
    for shape in SHAPES:
        for name, make in makes.items():
            made = simulated.saturated(make, shape, 2, seconds)
            was = median(found.full[name, 1, shape.name])
            metric = f"{shape.name}, 1P1D, {name}, saturated: tokens/s per device, simulated"
            rows.append(versus(metric, made, "1/s", "measured", was))
    return rows


def commands_of(found: Measured, scale: Scale) -> str:
    """Markdown: how to repeat the measured rows of 1P1D with public load generators."""
    lines, directory = list[str](), model.model_directory()
    for number, shape in enumerate(SHAPES):
        seed = 3 * number
        rate, lanes = found.asked[shape.name, 1], loads.LANES * 2
        count = max(1, round(rate * scale.paced_s[shape.name]))
        vllm = "python -m benchmarks.published.commands"
        paced = commands.vllm_bench(shape, count, directory, model.NAME, seed=seed + 1, rate=rate)
        full = commands.vllm_bench(
            shape, 2 * lanes, directory, model.NAME, seed=seed + 2, lanes=lanes
        )
        guide = commands.guidellm(shape, count, directory, model.NAME, seed=seed + 3, rate=rate)
        lines += [
            f"# {shape.name}: paced, saturated, and paced with guidellm",
            commands.line([*vllm.split(), *paced]),
            commands.line([*vllm.split(), *full]),
            commands.line(["guidellm", *guide]),
        ]
    up = ["pullfill", "up", "--detach", "--model", str(directory), *FLAGS]
    text = "\n".join(
        ["# pullfill's side: 1P1D at http://127.0.0.1:8000", commands.line(up), *lines]
    )
    return (
        "The rows of 1P1D with public load generators. For URL, put the address of the frontend, "
        "or of the proxy in front of the plain servers, which have the same flags from --dtype on. "
        "`vllm bench` does not start with vLLM's package for CPUs, because it asks for the version "
        "of a package called `vllm`. `python -m benchmarks.published.commands` is the same command "
        "and starts. `make install-bench` installs guidellm. The first run of a benchmark makes "
        "the model. A second run needs other seeds: with the same ones, the prompts are in the "
        f"prefix cache.\n\n```bash\n{text}\n```"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="1P1D, one round (5 minutes)")
    parser.add_argument(
        "--share", type=float, default=0.6, help="rate of the paced windows, of the saturated rate"
    )
    options: argparse.Namespace = parser.parse_args(argv)
    end_in_order()
    scale = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(prefix="pullfill-bench-") as directory:
        campaign = Campaign(scale, options.share, Path(directory))
        found = campaign.run()
    assert found.speed is not None
    print(campaign.quiet, found.speed, *found.failed, sep="\n")
    made, rows = simulate(scale, found.speed, options.share)
    pairs = [*found.pairs(), *made]
    rows = [row for pair in pairs for row in rows_of(pair)] + rows
    rows += check_rows(found, found.speed, scale.simulated_s)
    more = f"{table(pairs)}\n\n{DIFFERS}\n\n{commands_of(found, scale)}"
    print(f"\n{more}")
    status = report.finish(
        "published", rows, quiet=campaign.quiet.quiet, save=not options.no_save, title=TITLE,
        more=more, even_if_busy=options.even_if_busy,
    )  # fmt: skip
    return status or int(bool(found.failed))


if __name__ == "__main__":
    sys.exit(main())
