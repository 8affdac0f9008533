"""A trace against pullfill with today's policy, with the policy cost, and against two vLLM servers.

    make bench-trace ARGS="--trace FILE --speeds 2 4 --rounds 2"

Two cores for each system: one decode and one prefill worker, or two plain vLLM servers that get
requests in turn. Each round starts each system once, and the order changes from round to round.
Both policies run on one cluster, and take turns. Within targets is a request whose first token
comes within `router.ttft_ms` and the 99th percentile of whose gaps is at most `router.itl_ms`. The
control is the same trace without its long prompts. --strict runs the policy cost once more with a
lower `router.itl_ms`: it shows what shorter gaps cost the first tokens.

A trace has a JSON object a line, in the format of the Mooncake project: `timestamp` (ms),
`input_length`, `output_length` (tokens), `hash_ids` (equal numbers: equal blocks of tokens).
Writes results/trace.json and .md.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import command, machine
from benchmarks.report import Row, percentile, row, versus
from benchmarks.serving import model, stats, workloads
from benchmarks.serving.campaign import rotated
from benchmarks.serving.contract import Answer, Ask, Kind, Name, Running
from benchmarks.serving.systems import SYSTEMS
from benchmarks.serving.window import Window, explain, measure
from benchmarks.serving.workloads import Prompts, Workload
from pullfill.wire import RouterConfig

DEFAULT = Path(__file__).parent / "traces" / "mini_synthetic.jsonl"
POLICIES = ("conditional", "cost")
PLAIN = Name.ROUND_ROBIN
LONG = 512
"""Longer prompts, in tokens, are left out of the control."""
CONFIG = RouterConfig()
SLO = stats.Slo(CONFIG.ttft_ms / 1e3, CONFIG.itl_ms / 1e3)


def asks_of(file: Path, speed: float, block: int, vocabulary: range, most: int) -> list[Ask]:
    """The requests of a trace, `speed` times as fast. Equal blocks get equal tokens.

    block: tokens of one block. most: longest prompt with its answer, in tokens."""
    found = []
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    begin = min(line["timestamp"] for line in lines)
    for number, line in enumerate(lines):
        wanted = max(1, min(line["input_length"], most - line["output_length"]))
        prompt: list[int] = []
        for name in line["hash_ids"]:
            rng = random.Random(f"block/{name}")
            prompt += rng.choices(vocabulary, k=block)
        # What no block names is told by nobody: it is the request's own.
        rest = random.Random(f"rest/{number}")
        prompt += rest.choices(vocabulary, k=max(0, wanted - len(prompt)))
        at_s = (line["timestamp"] - begin) / 1e3 / speed
        output = max(1, line["output_length"])
        found.append(Ask(Kind.SHORT, tuple(prompt[:wanted]), output, f"trace-{number}", at_s))
    return found


class Campaign:
    """Windows of all systems. quiet: watches for what else uses the machine."""

    def __init__(self, options: argparse.Namespace, base: Path) -> None:
        self._options, self._base = options, base
        self._vocabulary = model.plain_tokens()
        self.windows: list[Window] = []
        self.quiet = machine.OtherLoad()

    def run(self) -> None:
        """All rounds."""
        systems = [SYSTEMS[Name.PULLFILL], SYSTEMS[PLAIN]]
        for number in range(self._options.rounds):
            for system in rotated(systems, number):
                folder = self._base / f"{number}-{system.name}"
                folder.mkdir()
                self.quiet.look(2.0)
                with system.launch(folder) as running:
                    warm = Prompts(self._vocabulary, "trace", number, system.name)
                    measure(
                        running, "trace", "warm-up", number, workloads.warm_up(warm, (512, 2048))
                    )
                    self._windows(running, number)

    def _windows(self, running: Running, number: int) -> None:
        policies: tuple[str, ...] = ("",)
        if running.set_policy is not None:
            policies = (*POLICIES, *map(strict, self._options.strict))
        for place, speed in enumerate(self._options.speeds):
            ordered = policies[:: -1 if (number + place) % 2 else 1]
            for policy in ordered:
                if running.set_policy is not None:
                    name, _, itl_ms = policy.partition(" at ")
                    running.set_policy(name, itl_ms=float(itl_ms or CONFIG.itl_ms))
                self._window(running, policy, f"{speed:g}x", number, speed, long=True)
                if policy == "cost":
                    self._window(running, policy, f"{speed:g}x control", number, speed, long=False)

    def _window(
        self, running: Running, policy: str, label: str, number: int, speed: float, *, long: bool
    ) -> None:
        options = self._options
        asks = asks_of(options.trace, speed, options.block, self._vocabulary, options.most)
        if not long:
            asks = [ask for ask in asks if len(ask.prompt) <= LONG]
        # Each window has tokens of its own, so none finds what another one left in a cache.
        salt = Prompts(self._vocabulary, "salt", policy, label, number, running.name)(16)
        asks = [Ask(a.kind, salt + a.prompt, a.max_tokens, a.lane, a.at_s) for a in asks]
        window = measure(running, "trace", label, number, Workload(tuple(asks)))
        window.system = policy or running.name
        if policy:
            explain(window, running.urls[Kind.SHORT])
        self.windows.append(window)
        self.quiet.others.append(window.others)
        print(f"{number} {label} {window.system}: {told(window.answers)}", flush=True)

    def answers(self, system: str, label: str) -> list[Answer]:
        return [
            a for w in self.windows if (w.system, w.label) == (system, label) for a in w.answers
        ]


def strict(itl_ms: float) -> str:
    """The name of the policy cost with another target for gaps."""
    return f"cost at {itl_ms:g}"


def told(answers: Sequence[Answer]) -> str:
    """One window in one line."""
    failed = len(stats.failed(answers))
    return (
        f"{100 * within(answers):.0f} % of {len(answers)} within targets, {failed} failed; "
        f"TTFT p90 {1e3 * percentile(stats.ttfts(answers), 0.9):.0f} ms, "
        f"ITL p99 {1e3 * percentile(stats.gaps(answers), 0.99):.1f} ms"
    )


def within(answers: Sequence[Answer]) -> float:
    """The share that keeps both targets."""
    return stats.goodput(answers, 1.0, SLO)[1]


def strict_rows(campaign: Campaign, label: str, targets: Sequence[float]) -> list[Row]:
    """What lower targets for gaps give and cost."""
    rows: list[Row] = []
    plain, control = campaign.answers(PLAIN, label), campaign.answers("cost", f"{label} control")
    for itl_ms in targets:
        name, answers = (
            f"{label}, router.itl_ms {itl_ms:g}",
            campaign.answers(strict(itl_ms), label),
        )
        rows += [
            row(f"{name}: within targets", 100 * within(answers), "%"),
            versus(f"{name}: TTFT p90", 1e3 * percentile(stats.ttfts(answers), 0.9), "ms",
                   "two vLLM servers in turn", 1e3 * percentile(stats.ttfts(plain), 0.9)),
            versus(f"{name}: ITL p99", 1e3 * percentile(stats.gaps(answers), 0.99), "ms",
                   f"no prompt above {LONG} tokens", 1e3 * percentile(stats.gaps(control), 0.99)),
        ]  # fmt: skip
    return rows


def rows_of(campaign: Campaign, labels: Sequence[str], targets: Sequence[float]) -> list[Row]:
    """What is held against targets, and how well first tokens were predicted."""
    rows: list[Row] = []
    for label in labels:
        cost, today, plain = (campaign.answers(s, label) for s in ("cost", "conditional", PLAIN))
        control = campaign.answers("cost", f"{label} control")
        good, p90 = within(cost), percentile(stats.ttfts(cost), 0.9)
        itl = percentile(stats.gaps(cost), 0.99)
        rows += [
            versus(f"{label}: within targets", 100 * good, "%", "conditional",
                   100 * within(today), at_least=1.0),
            versus(f"{label}: within targets", 100 * good, "%", "two vLLM servers in turn",
                   100 * within(plain)),
            versus(f"{label}: TTFT p90", 1e3 * p90, "ms", "two vLLM servers in turn",
                   1e3 * percentile(stats.ttfts(plain), 0.9), at_most=1.0),
            versus(f"{label}: TTFT p90", 1e3 * p90, "ms", "conditional",
                   1e3 * percentile(stats.ttfts(today), 0.9)),
            versus(f"{label}: ITL p99", 1e3 * itl, "ms", f"no prompt above {LONG} tokens",
                   1e3 * percentile(stats.gaps(control), 0.99), at_most=1.1),
            versus(f"{label}: ITL p99", 1e3 * itl, "ms", "two vLLM servers in turn",
                   1e3 * percentile(stats.gaps(plain), 0.99)),
            *strict_rows(campaign, label, targets),
        ]  # fmt: skip
    errors = [error for w in campaign.windows if w.system == "cost" for error in errors_of(w)]
    if errors:
        rows.append(row("error of predictions, median", 100 * percentile(errors, 0.5), "%", 20))
        rows.append(row("error of predictions, p90", 100 * percentile(errors, 0.9), "%", 60))
    return rows


def errors_of(window: Window) -> list[float]:
    """|prediction / outcome - 1| of each request that was predicted."""
    found = []
    for one in window.explained.values():
        expected = (one["predicted_ms"] or {}).get(one["choice"] or "")
        if expected and one["outcome_ms"] and one["regret_ms"] is not None:
            found.append(abs(expected / one["outcome_ms"] - 1))
    return found


def run(options: argparse.Namespace, base: Path) -> tuple[list[Row], machine.OtherLoad]:
    campaign = Campaign(options, base)
    campaign.run()
    labels = [f"{speed:g}x" for speed in options.speeds]
    return rows_of(campaign, labels, options.strict), campaign.quiet


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--trace", type=Path, default=DEFAULT, help="JSON lines")
    parser.add_argument("--block", type=int, default=16, help="tokens of a block of the trace")
    parser.add_argument("--most", type=int, default=8000, help="longest prompt with its answer")
    parser.add_argument("--speeds", type=float, nargs="+", default=[2.0, 4.0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--strict", type=float, nargs="*", default=[], help="lower targets for gaps, in ms"
    )
    options = parser.parse_args(argv)
    title = "A trace: the policies conditional and cost, and two vLLM servers in turn"
    return command.main("trace", title, options, run)


if __name__ == "__main__":
    sys.exit(main())
