"""Measures the cost of the control plane as work grows: `make bench-control`.

NATS, etcd, frontends and workers are real. Only the model is a mock (pullfill/testing/), so that
many workers fit on one machine. Each size, 1 to 16 decode and as many prefill workers, is a fleet
of its own: a warm-up until nearly all pairs of workers have shared a job, an idle window, requests
at a low fixed rate (for the stages), and two closed loops (for the CPU). The first loop is the same
at each size; the second one grows with the workers. CPU "beside engines" is that of all processes
without vLLM's scheduler and the mock. Writes results/control.md after each size. Exit status 1
when a request failed or was not prefilled remotely.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks import command, machine
from benchmarks.control.duel import warm_up
from benchmarks.control.plant import Fleet, Plant, Use, mock_flags, plant, private_bytes
from benchmarks.live import end_in_order
from benchmarks.report import Row, finish, percentile, row, write

NAME, TITLE = "control", "The control plane as work grows, with mock engines"
QUICK, FULL = "1,4,16", "1,2,4,8,16"
STAGES = ("route", "queue", "claim", "prefix_read", "kv_write", "commit", "first_token")
ROLES = ("decode", "prefill", "front", "nats", "etcd")
PACED_PER_S = 15.0
"""Conversations; each has two requests."""


@dataclass(slots=True)
class Size:
    """What was measured at one size.

    idle: share of a core by role.
    paced, use, full: CPU at the low rate, and in the first and second closed loop.
    loop_s: seconds of the first closed loop."""

    workers: int
    ready_s: float
    idle: dict[str, float]
    stages: dict[str, list[float]]
    paced: dict[str, Use]
    paced_requests: int
    use: dict[str, Use]
    requests: int
    full: dict[str, Use]
    full_requests: int
    loop_s: float
    remote: int
    failed: int
    rss_mb: float

    @property
    def idle_ms(self) -> float:
        """The part of a request at the low rate that an idle fleet uses in the same time."""
        return sum(self.idle.values()) / (2 * PACED_PER_S) * 1e3


def each_ms(used: dict[str, Use], requests: int) -> float:
    """Return the CPU per request beside the engines."""
    return sum(use.ours for use in used.values()) / requests * 1e3


def measure(
    plant: Plant, workers: int, options: argparse.Namespace, quiet: machine.OtherLoad
) -> Size:
    """One size. Raises BenchError."""
    fleet = Fleet(
        plant, f"scale{workers}", workers, workers,
        decode_flags=mock_flags(), prefill_flags=mock_flags(), router={},
    )  # fmt: skip
    try:
        for number, count in enumerate(warm_up(workers)):
            fleet.driver.do("load", conversations=count, at_once=32, seed=100 + number)
        time.sleep(3.0)
        everybody = [fleet.front, *fleet.decode, *fleet.prefill, *plant.servers]
        rss = sum(private_bytes(pid) for pid in everybody) / 1e6
        with quiet.window(everybody), fleet.window() as idle:
            time.sleep(options.idle)
        count = round(PACED_PER_S * options.paced)
        with quiet.window(everybody), fleet.window() as paced:
            slow = fleet.driver.do(
                "load", conversations=count, at_once=10_000, rate=PACED_PER_S, seed=2
            )
        with quiet.window(everybody), fleet.window() as use:
            fast = fleet.driver.do(
                "load", conversations=options.conversations, at_once=options.at_once, seed=3
            )
        many = options.at_once * workers
        with quiet.window(everybody), fleet.window() as full:
            crowd = fleet.driver.do(
                "load", conversations=max(options.conversations, 2 * many), at_once=many, seed=4
            )
    finally:
        fleet.close()
    local = sum((Counter(load["local"]) for load in (slow, fast, crowd)), Counter[str]())
    print(f"  prefilled locally: {dict(local)}")
    return Size(
        workers, fleet.ready_s,
        {role: u.total / options.idle for role, u in idle.items()},
        slow["stages"], paced, slow["requests"], use, fast["requests"], full,
        crowd["requests"], fast["seconds"], sum(load["remote"] for load in (slow, fast, crowd)),
        sum(load["failed"] for load in (slow, fast, crowd)), rss,
    )  # fmt: skip


def rows_of(size: Size) -> list[Row]:
    """Everything about one size."""
    at = f"{size.workers}+{size.workers} workers"
    wanted = size.requests + size.paced_requests + size.full_requests
    remote = row(f"{at}: requests prefilled remotely", size.remote, f"of {wanted}")
    remote.target, remote.ok = "all", size.remote == wanted
    ours_ms, full_ms = each_ms(size.use, size.requests), each_ms(size.full, size.full_requests)
    per_s, paced_ms = 2 * PACED_PER_S, each_ms(size.paced, size.paced_requests)
    rows = [
        remote,
        row(f"{at}: requests failed", size.failed, f"of {wanted}", 0),
        row(f"{at}: CPU per request beside engines", ours_ms, "ms"),
        row(f"{at}: the same with as many requests for each worker", full_ms, "ms"),
        row(f"{at}: the same at {per_s:g} requests/s", paced_ms, "ms"),
        row(f"{at}: of it idling", size.idle_ms, "ms"),
        row(f"{at}: requests/s on this machine", size.requests / size.loop_s, "1/s"),
    ]  # fmt: skip
    for role in ROLES:
        ours = size.use[role].ours / size.requests * 1e3
        rows.append(row(f"{at}: of it {role}", ours, "ms"))
    engines = sum(size.use[role].engine for role in ("decode", "prefill"))
    rows.append(row(f"{at}: engines (not counted)", engines / size.requests * 1e3, "ms"))
    for role in ROLES:
        rows.append(row(f"{at}: idle CPU, {role}", 100 * size.idle[role], "% of one core"))
    for stage in STAGES:
        if values := size.stages.get(stage):
            rows.append(row(f"{at}: {stage} p50", percentile(values, 0.5), "ms"))
            rows.append(row(f"{at}: {stage} p99", percentile(values, 0.99), "ms"))
    rows.append(row(f"{at}: ready after", size.ready_s, "s"))
    rows.append(row(f"{at}: memory beside shared imports", size.rss_mb, "MB"))
    return rows


def print_threads(what: str, used: dict[str, Use], requests: int) -> None:
    """Where the CPU goes, by role and thread."""
    each = 1e3 / requests
    for role, use in used.items():
        ordered = sorted(use.threads.items(), key=lambda item: -item[1])
        parts = [f"{name} {cpu * each:.3f}" for name, cpu in ordered if cpu * each > 0.005]
        print(
            f"  {what}, {role}: ms per request: ours {use.ours * each:.3f}, "
            f"engine {use.engine * each:.3f}; by thread: {', '.join(parts)}"
        )


def run(
    plant: Plant, workers: int, options: argparse.Namespace, quiet: machine.OtherLoad
) -> list[Row]:
    """One size, with its rows printed. Raises BenchError."""
    size = measure(plant, workers, options, quiet)
    rows = rows_of(size)
    for one in rows:
        print(f"  {one.metric:<60} {one.value:>10} {one.unit}", flush=True)
    print_threads("closed loop", size.use, size.requests)
    print_threads("paced", size.paced, size.paced_requests)
    return rows


def main() -> int:
    parser = command.described(__doc__)
    parser.add_argument("--quick", action="store_true", help=f"sizes {QUICK}")
    parser.add_argument("--sizes", help=f"workers of each role (default {FULL})")
    parser.add_argument("--conversations", type=int, default=400, help="in the closed loop")
    parser.add_argument("--at-once", type=int, default=32, help="of them together")
    parser.add_argument("--idle", type=float, default=4.0, metavar="S", help="idle window")
    parser.add_argument("--paced", type=float, default=8.0, metavar="S", help="paced window")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    sizes = sorted(int(n) for n in (options.sizes or (QUICK if options.quick else FULL)).split(","))
    end_in_order()
    quiet, rows = machine.OtherLoad(), list[Row]()
    quiet.look(1.0)
    with tempfile.TemporaryDirectory(prefix="pullfill-bench-") as directory:
        with plant(Path(directory)) as servers:
            for size in sizes:
                rows += run(servers, size, options, quiet)
                if not options.no_save and quiet.quiet:
                    write(NAME, rows, quiet=True, title=TITLE)
    print(quiet)
    return finish(NAME, rows, quiet=quiet.quiet, save=False, title=TITLE)


if __name__ == "__main__":
    sys.exit(main())
