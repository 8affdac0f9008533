"""A trace on two decode workers, with each choice of the decode worker: `make bench-decode-policy`.

    make bench-decode-policy ARGS="--trace FILE --speed 4 --rounds 2"

The policies `kv`, `least_loaded` and `round_robin` take turns on one cluster of two decode workers.
Beside it, one decode worker with the KV cache of both gets the same requests at half the speed. So
each worker has the same load in both clusters. Every prompt is prefilled where it decodes.

Hit is the share of the prompt tokens that the worker had in its prefix cache. Work is the prompt
tokens that a worker computed and the tokens that it generated. Imbalance is the work of the busier
worker, divided by the mean of both.

A trace has a JSON object a line, in the format of the Mooncake project: `timestamp` (ms),
`input_length`, `output_length` (tokens), `hash_ids` (equal numbers: equal blocks of 16 tokens).
Without --trace it is one of Mooncake's, shortened (traces/README.md).
Writes results/decode-policy.md.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks import command, machine
from benchmarks.bench_splits import figures
from benchmarks.report import Row, percentile, row, versus
from benchmarks.serving import model, stats, workloads
from benchmarks.serving.campaign import rotated
from benchmarks.serving.contract import Running
from benchmarks.serving.systems import FLAGS
from benchmarks.serving.systems_pullfill import cluster
from benchmarks.serving.window import Window, explain, measure
from benchmarks.serving.workloads import Prompts, Workload

DEFAULT = Path(__file__).parent / "traces" / "mini_synthetic.jsonl"
POLICIES = ("kv", "least_loaded", "round_robin")
ONE, TWO = "one worker", "two workers"
KV_FLAG = "--kv-cache-memory-bytes"
CACHE = 512 << 20
"""KV cache of each of the two workers, in bytes."""
MOCK = (
    "--distributed-executor-backend",
    "pullfill.testing.mock_executor.MockExecutor",
    "--additional-config",
    '{"mock": {"step_s": 0.02}}',
)


class Campaign:
    """Windows of both clusters. quiet: watches for what else uses the machine."""

    def __init__(self, options: argparse.Namespace, base: Path) -> None:
        self._options, self._base = options, base
        self._vocabulary = model.plain_tokens()
        self.windows: list[Window] = []
        self.quiet = machine.OtherLoad()

    def run(self) -> None:
        """All rounds. Each starts each cluster once, in another order."""
        for number in range(self._options.rounds):
            for name in rotated((TWO, ONE), number):
                workers = 2 if name == TWO else 1
                flags = [flag for flag in FLAGS if not flag.startswith(KV_FLAG)]
                flags.append(f"{KV_FLAG}={CACHE * 2 // workers}")
                flags += ["--frontends", str(self._options.frontends)]
                flags += MOCK if self._options.mock else ()
                self.quiet.look(2.0)
                folder = self._base / f"{number}-{workers}"
                folder.mkdir()
                with cluster(name, "always_local", workers, 0, flags, folder) as running:
                    warm = Prompts(self._vocabulary, "decode-policy", number, name)
                    measure(
                        running, "decode", "warm-up", number, workloads.warm_up(warm, (512, 2048))
                    )
                    policies = rotated(POLICIES, number) if name == TWO else [ONE]
                    for policy in policies:
                        self._window(running, policy, number)

    def _window(self, running: Running, policy: str, number: int) -> None:
        options = self._options
        speed = options.speed / 2 if policy == ONE else options.speed
        if policy != ONE:
            assert running.set_policy is not None
            running.set_policy("always_local", decode_policy=policy)
        # Each window has tokens of its own, so none finds what another one left in a cache.
        asks = workloads.trace(options.trace, speed, self._vocabulary, policy, number)
        window = measure(running, "decode", policy, number, Workload(tuple(asks)))
        window.system = policy
        explain(window, running.url)
        self.windows.append(window)
        self.quiet.others.append(window.others)
        print(
            f"{number} {policy} | hit {hit([window]):.3f} | imbalance {imbalance(window):.3f} | "
            f"{figures([window])}",
            flush=True,
        )

    def of(self, policy: str) -> list[Window]:
        return [window for window in self.windows if window.system == policy]


def hit(windows: Sequence[Window]) -> float:
    """The share of the prompt tokens that were in the prefix cache of the chosen worker."""
    records = [one for window in windows for one in window.explained.values()]
    tokens: int = sum(one["prompt_tokens"] for one in records)
    held: int = sum(one["prefix_hit_tokens"] for one in records)
    return held / max(1, tokens)


def imbalance(window: Window) -> float:
    """The work of the busiest worker, divided by the mean of all."""
    work: dict[str, float] = defaultdict(float)
    generated = {a.request_id: len(a.tokens) for a in window.answers}
    for request_id, one in window.explained.items():
        computed = one["prompt_tokens"] - one["prefix_hit_tokens"] - one["fetched_tokens"]
        work[one["decode_instance"]] += computed + generated[request_id]
    return max(work.values()) * len(work) / sum(work.values())


def gap(windows: Sequence[Window], share: float) -> float:
    """A percentile of all gaps, in milliseconds."""
    gaps = stats.gaps([answer for window in windows for answer in window.answers])
    return 1e3 * percentile(gaps, share)


def rows_of(campaign: Campaign) -> list[Row]:
    kv, one = campaign.of("kv"), campaign.of(ONE)
    rows = [
        versus("kv: hit", hit(kv), "", "one worker with both caches", hit(one), at_least=0.95),
        row("kv: imbalance, worst round", max(map(imbalance, kv)), "", at_most=1.10),
    ]
    for other in POLICIES[1:]:
        windows = campaign.of(other)
        rows += [
            versus("kv: hit", hit(kv), "", other, hit(windows)),
            row(f"{other}: imbalance, worst round", max(map(imbalance, windows)), ""),
            versus("kv: ITL p95", gap(kv, 0.95), "ms", other, gap(windows, 0.95),
                   at_most=1.0 if other == "least_loaded" else None),
            versus("kv: ITL p99", gap(kv, 0.99), "ms", other, gap(windows, 0.99)),
            versus("kv: TTFT p90", figures(kv).ttft_p90, "ms", other, figures(windows).ttft_p90),
        ]  # fmt: skip
    return rows


def run(options: argparse.Namespace, base: Path) -> tuple[list[Row], machine.OtherLoad]:
    campaign = Campaign(options, base)
    campaign.run()
    return rows_of(campaign), campaign.quiet


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--trace", type=Path, default=DEFAULT, help="JSON lines, Mooncake's format")
    parser.add_argument("--speed", type=float, default=4.0, help="times the trace's own")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--mock", action="store_true", help="compute nothing: no time is real then")
    parser.add_argument("--frontends", type=int, default=1, help="at one port, of both clusters")
    options = parser.parse_args(argv)
    if not options.trace.is_file():
        parser.error(f"there is no file {options.trace}: give the path of a trace with --trace")
    title = "A trace on two decode workers, by the choice of the decode worker"
    return command.main("decode-policy", title, options, run)


if __name__ == "__main__":
    sys.exit(main())
