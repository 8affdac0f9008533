"""One process killed under load, and what the clients noticed: `make chaos-report`.

The scenario of the published fault tests: 8 clients × 100 requests, one process killed (SIGKILL)
midway, with one prefill and one decode worker (1P1D) and with two of each (2P2D), two frontends in
front. Every process is real; the model is a small float32 one; every answer is compared, token for
token, with what one plain vLLM engine says.

  failed      requests without a complete answer; of a killed frontend: beyond its own open ones
  wrong       answers, or beginnings of failed ones, that differ from the plain engine's
  noticed     from the kill until every process that must act knew: decode workers no longer list a
              killed prefill worker; frontends logged the loss of a decode worker; a client's
              connection to a killed frontend broke
  back        from then until the first second with at least 80 % of the tokens per second that the
              processes left are able to do (measured in the same run, without a fault, with the
              same load), or of the rate before the kill where that is lower
  blocks      from the kill of a prefill worker until none of its blocks is in use or quarantine

Writes results/chaos-report.md. Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import command
from benchmarks.chaos_cluster import cluster_in
from benchmarks.chaos_load import Work, make_work
from benchmarks.chaos_scenarios import TOPOLOGIES, Run, Stage, Topology
from benchmarks.machine import OtherLoad
from benchmarks.report import Row, none_of, percentile, row, table
from tests.support.checkpoint import tiny_checkpoint
from tests.support.oracle import Oracle

LENGTHS = (150, 1100, 700, 1900, 1500)
"""Tokens per prompt, in turn: four of five are longer than what is prefilled locally by default."""
MAX_TOKENS = 32
BACK_LIMIT_S = 2.0
FREE_LIMIT_S = 1.0
ERROR_LIMIT_S = 5.0
PARTS = ("before", "during", "after")


def chosen(only: list[str]) -> list[Topology]:
    """Topologies with the scenarios that `only` names: "2P2D", "prefill-gone", "1P1D/none"."""
    if not only:
        return list(TOPOLOGIES)
    found = []
    for topology in TOPOLOGIES:
        kept = tuple(
            s
            for s in topology.scenarios
            if {topology.name, s.key, f"{topology.name}/{s.key}"} & set(only)
        )
        if kept:
            found.append(Topology(topology.name, topology.decode, topology.prefill, kept))
    return found


def play(topology: Topology, work: Work, options: argparse.Namespace, base: Path) -> Iterator[Run]:
    """All its scenarios on one cluster."""
    counts = {"decode": topology.decode, "prefill": topology.prefill, "frontends": 2}
    print(f"{topology.name}: starting", flush=True)
    with cluster_in(base / topology.name, tiny_checkpoint(), **counts) as cluster:
        stage = Stage(cluster, work, options.clients, options.requests)
        for scenario in topology.scenarios:
            run = stage.play(scenario)
            for ask in run.unexpected[:5] + run.wrong[:5]:
                print(f"  {ask.request_id} at {ask.url}, {len(ask.tokens)} tokens: {ask.error}")
            if run.left:
                print(f"  {run.left}")
            yield run


def report_rows(topology: str, run: Run) -> list[Row]:
    """Everything one scenario showed."""
    name, victim, total = f"{topology}, {run.scenario.title}", run.scenario.victim, len(run.asks)
    rows = [none_of(f"{name}: failed", len(run.unexpected), total)]
    if victim == "frontend":
        own = len(run.failed) - len(run.unexpected)
        rows.append(row(f"{name}: open there when it was killed", len(run.excused), "requests"))
        rows.append(row(f"{name}: of them failed", own, "requests"))
        rows.append(row(f"{name}: turned to the other", run.turned_away, "times"))
    rows.append(none_of(f"{name}: wrong answers", len(run.wrong), total))
    rows.append(none_of(f"{name}: blocks or jobs left behind", int(bool(run.left))))
    if run.scenario.outage:
        met = len(run.failed) - len(run.unexpected)
        rows.append(row(f"{name}: failed while there was none", met, f"of {total}"))
        rows.append(row(f"{name}: slowest error", run.slowest_error_s, "s", ERROR_LIMIT_S))
        if run.restarted_s is not None:
            rows.append(row(f"{name}: another one ready after", run.restarted_s, "s"))
    if run.noticed_s is not None:
        rows.append(row(f"{name}: noticed after", 1000 * run.noticed_s, "ms"))
    rows += _recovery_rows(name, run)
    for part in PARTS:
        rate = run.rate(part)
        if rate is not None and (part == "before" or victim):
            rows.append(row(f"{name}: {part}", rate, "tokens/s"))
    if victim and not run.scenario.outage:
        rows.append(row(f"{name}: what is left can do", run.wanted, "tokens/s"))
    if victim:
        rows.append(row(f"{name}: longest silence after the kill", run.gap_s, "s"))
        rows.append(row(f"{name}: prefilled remotely after it", 100 * run.remote_after, "%"))
        rows.append(row(f"{name}: continued at another decode worker", run.continued, "answers"))
    rows.append(row(f"{name}: prefilled remotely", 100 * run.remote_before, "%"))
    for kind, values in (("duration", run.durations), ("first token", run.first_tokens)):
        rows.append(row(f"{name}: {kind}, p50", 1000 * percentile(values, 0.5), "ms"))
        rows.append(row(f"{name}: {kind}, p99", 1000 * percentile(values, 0.99), "ms"))
    return rows


def _recovery_rows(name: str, run: Run) -> list[Row]:
    rows: list[Row] = []
    if not run.scenario.victim or run.scenario.outage:
        return rows
    back = run.back_s
    never = run.ended - (run.killed or 0.0)
    found = row(f"{name}: throughput back after", never if back is None else back, "s")
    found.target, found.ok = f"<= {BACK_LIMIT_S:g}", back is not None and back <= BACK_LIMIT_S
    rows.append(found)
    if run.scenario.victim == "prefill":
        freed = 10.0 if run.freed_s is None else run.freed_s
        rows.append(row(f"{name}: its blocks free after", freed, "s", FREE_LIMIT_S))
    elif run.freed_s is not None:
        rows.append(row(f"{name}: its requests aborted after", run.freed_s, "s"))
    return rows


def measure(options: argparse.Namespace, base: Path) -> tuple[list[Row], OtherLoad]:
    quiet, rows = OtherLoad(), list[Row]()
    quiet.look()
    with Oracle(tiny_checkpoint()) as oracle:
        count = options.clients * options.requests
        print(f"asking one plain vLLM engine for {count} answers", flush=True)
        work = make_work(oracle, count, LENGTHS, MAX_TOKENS)
    for topology in chosen(options.only):
        for run in play(topology, work, options, options.logs or base):
            found = report_rows(topology.name, run)
            print(f"\n{table(found)}", flush=True)
            rows += found
    quiet.look()
    return rows, quiet


def main() -> int:
    parser = command.parser(__doc__)
    names = ", ".join(dict.fromkeys(s.key for t in TOPOLOGIES for s in t.scenarios))
    parser.add_argument("--requests", type=int, default=100, help="of each client")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help=f"a topology, a scenario or TOPOLOGY/SCENARIO; may be repeated. Scenarios: {names}",
    )
    parser.add_argument("--logs", type=Path, help="keep the processes' logs in this folder")
    options = parser.parse_args()
    if not chosen(options.only):
        parser.error(f"--only {options.only}: nothing has that name")
    return command.main("chaos-report", "One process killed under load", options, measure)


if __name__ == "__main__":
    sys.exit(main())
