"""Simulates the choice of the decode worker: `make sim`.

The decisions are made by the code of the frontend, over the index of blocks that it uses. Workers,
network and time are simulated (worker.py, cluster.py). The same seed gives the same figures. Only
the time of a decision depends on the machine. 1,000 workers take minutes.

The speed of the engines is chosen for each workload: round robin keeps them busy for a share --load
of the time.
Writes results/sim.json and .md. Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Row, finish, row, versus
from benchmarks.sim import workloads
from benchmarks.sim.cluster import Net, Setup
from benchmarks.sim.measures import Outcome, computed_at, joiner_share, run, speed_for
from benchmarks.sim.requests import Workload
from benchmarks.sim.trace import load
from pullfill.wire import DecodePolicy

TRACE = Path(__file__).parents[1] / "traces" / "mini_synthetic.jsonl"
GROW = 32
"""Our trace has the lengths of the trace that it was made from, divided by this factor."""
RR = "round robin"
STALE_S = 0.5
"""How far frontends are behind in the runs with old figures: ten times `LOAD_S`."""
REFERENCE = "a choice that knows all work and moves no conversation"
OVER_REFERENCE = 1.1
"""Target: the imbalance is at most this many times that of the reference (`measures.stay`)."""
EACH = 100
"""Conversations per worker."""
CONVERSATIONS = 10_000
"""Most conversations of a run. With 1,000 workers, that is 10 per worker. More take many minutes.
"""
SHARED = 0.1
"""The target of TTFT holds if one cache would hit at least this share of the prompt tokens."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    rows: list[Row] = []
    for workload in _traces(options):
        rows += trace_rows(workload, options)
    if not options.only_traces:
        for workers in options.sizes:
            rows += size_rows(workers, options)
        rows += paced_rows(options) + join_rows(options) + burst_rows(options)
        rows += other_rows(options)
    return finish(
        options.name,
        rows,
        quiet=True,  # nothing but the time of a decision depends on the machine
        save=not options.no_save,
        title="The choice of the decode worker, simulated",
        more="Written by `make sim`. Hit, imbalance and TTFT are simulated; the seed decides.",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sim",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--trace", type=Path, action="append", help="a trace to simulate; may be repeated")
    add("--block", type=int, default=0, help="tokens per block of the traces (found if not given)")
    add("--grow", type=int, default=0, help="factor for lengths and blocks of the traces")
    add("--sample", type=float, default=1.0, help="share of the traces' sessions to keep")
    add("--only-traces", action="store_true", help="leave the generated workloads out")
    add("--sizes", type=int, nargs="*", default=[4, 64, 1000], help="clusters of so many workers")
    add("--blocks", type=int, default=20_000, help="KV blocks of each worker")
    add("--load", type=float, default=0.8, help="how busy round robin keeps the engines")
    add("--late", type=float, default=0.05, help="seconds until frontends know of KV events")
    add("--stale", type=float, default=0.05, help="seconds between load reports of a worker")
    add("--seed", type=int, default=1)
    add("--name", default="sim", help="write results/NAME.json and .md")
    add("--no-save", action="store_true", help="print only")
    return parser


def _traces(options: argparse.Namespace) -> list[Workload]:
    paths = options.trace or [TRACE]
    grow = options.grow or (1 if options.trace else GROW)
    return [
        load(path, block=options.block, grow=grow, sample=options.sample, seed=options.seed)
        for path in paths
    ]


def _setup(
    workload: Workload, options: argparse.Namespace, workers: int = 4, load: float | None = None
) -> Setup:
    speed = speed_for(workload, workers, options.blocks, options.load if load is None else load)
    net = Net(events=options.late, report=options.stale)
    return Setup(DecodePolicy.KV, speed, workers, options.blocks, net=net, seed=options.seed)


def _run(label: str, workload: Workload, setup: Setup) -> Outcome:
    found = run(workload, setup)
    print(
        f"{label:<44} {setup.policy:<12} hit {found.hit:.3f} imbalance {found.imbalance:.3f} "
        f"TTFT p50 {found.ttft_p50:.3f} p90 {found.ttft_p90:.3f} s",
        flush=True,
    )
    return found


def _compared(
    label: str, workload: Workload, setup: Setup, held: bool
) -> tuple[Outcome, Outcome, list[Row]]:
    """Compare the policy kv with one cache for all workers, and with round robin.

    The target of TTFT is only for prompts that share prefixes (SHARED). Other prompts can gain from
    shorter queues only.

    held: the rows have targets."""
    kv = _run(label, workload, setup)
    turns = _run(label, workload, replace(setup, policy=DecodePolicy.ROUND_ROBIN))
    hit = None
    if kv.pool:
        hit = versus(
            f"{label}: hit", kv.hit, "", "one cache", kv.pool, at_least=0.96 if held else None
        )
    rows = [
        *([hit] if hit else []),
        row(f"{label}: hit, {RR}", turns.hit, ""),
        row(f"{label}: imbalance", kv.imbalance, "", at_most=1.05 if held else None),
        row(f"{label}: imbalance, {RR}", turns.imbalance, ""),
        versus(
            f"{label}: TTFT p90",
            kv.ttft_p90,
            "s",
            RR,
            turns.ttft_p90,
            at_most=0.45 if held and kv.pool >= SHARED else None,
        ),
    ]
    return kv, turns, rows


def trace_rows(workload: Workload, options: argparse.Namespace) -> list[Row]:
    """Compare 4 workers with one cache and with round robin, then 8 frontends with one."""
    label = f"{workload.name}, 4 workers"
    setup = _setup(workload, options)
    one, _, rows = _compared(label, workload, setup, held=True)
    eight, peer = replace(setup, frontends=8), "1 frontend"
    stale = replace(eight, net=Net(events=STALE_S, report=STALE_S))
    for frontends, each in (("8 frontends", eight), (f"8 frontends, {STALE_S:g} s behind", stale)):
        name = f"{label}, {frontends}"
        many = _run(name, workload, each)
        if one.hit:
            rows.append(versus(f"{name}: hit", many.hit, "", peer, one.hit, at_least=0.97))
        p90 = many.ttft_p90
        rows.append(versus(f"{name}: TTFT p90", p90, "s", peer, one.ttft_p90, at_most=1.4))
    return rows


def size_rows(workers: int, options: argparse.Namespace) -> list[Row]:
    """Simulate EACH conversations per worker, but at most CONVERSATIONS in all.

    With few conversations per worker, a single long conversation makes its worker the busiest. When
    a conversation begins, nobody knows how long it will become. So the target compares the
    imbalance with that of a reference choice (`measures.stay`), not with 1.

    Against round robin, the work beyond the mean is compared in tokens, not as a share of the mean.
    Round robin computes prefixes again, so its mean is larger, and the same tokens would be a
    smaller share of it."""
    count = min(EACH * workers, CONVERSATIONS)
    workload = workloads.conversations(
        count, 300.0, seed=options.seed, prompts=max(20, workers), turns=4.0
    )
    setup = _setup(workload, options, workers)
    label = f"conversations, {workers} workers, {count / workers:g} each"
    kv, turns, rows = _compared(label, workload, setup, held=False)
    rows.append(
        versus(f"{label}: imbalance", kv.imbalance, "", REFERENCE, kv.stay, at_most=OVER_REFERENCE)
    )
    rows.append(
        versus(f"{label}: work beyond the mean", kv.excess, "tokens", RR, turns.excess, at_most=1.0)
    )
    rows.append(row(f"{label}: time of a decision, median", kv.decision_us, "us", at_most=100.0))
    return rows


def paced_rows(options: argparse.Namespace) -> list[Row]:
    """Simulate requests that share one system prompt and come one at a time."""
    rows = []
    for system, frontends in ((2048, 1), (8192, 1), (2048, 8)):
        workload = workloads.paced(400, seed=options.seed, system=system)
        setup = replace(_setup(workload, options, load=0.3), frontends=frontends)
        label = f"paced, {system} tokens shared, {frontends} frontend{'s' * (frontends > 1)}"
        rows.append(row(f"{label}: imbalance", _run(label, workload, setup).imbalance, "", 1.10))
    return rows


def join_rows(options: argparse.Namespace) -> list[Row]:
    """A fifth worker joins four.

    100 requests hold few new sessions, so the row is the mean over 8 seeds."""
    shares = []
    for seed in range(options.seed, options.seed + 8):
        workload = workloads.conversations(300, 300.0, seed=seed, turns=2.0)
        setup = replace(_setup(workload, options), joins=250)
        shares.append(joiner_share(run(workload, setup), 250, 5, 100))
    share = sum(shares) / len(shares)
    return [row("joining worker: share of new sessions in 100 requests", share, "", at_least=0.8)]


def burst_rows(options: argparse.Namespace) -> list[Row]:
    """Simulate bursts of requests that share a long prefix."""
    rows = []
    for groups, siblings in ((16, 4), (4, 16)):
        workload = workloads.bursts(groups, siblings, seed=options.seed)
        setup = _setup(workload, options)
        label = f"bursts, {groups} of {siblings} siblings"
        most = computed_at(_run(label, workload, setup), workloads.BURST_PREFIX // workload.block)
        rows.append(row(f"{label}: workers that computed one prefix", most, "", 2))
    return rows


def other_rows(options: argparse.Namespace) -> list[Row]:
    """Simulate workloads without targets, where the policy gains less."""
    rows: list[Row] = []
    for workload in (
        workloads.documents(1500, 300.0, seed=options.seed),
        workloads.storm(1500, 300.0, seed=options.seed),
    ):
        rows += _compared(
            f"{workload.name}, 4 workers", workload, _setup(workload, options), False
        )[2]
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
