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
  blocks      from the kill of a prefill worker until none of its blocks is in use or quarantine;
              besides, --kills writers are killed in the middle of a write, one after the other

Writes results/chaos-report.json and .md, and the table in benchmarks/README.md, with --save, after
each scenario; with --only the rows of the others stay as they are.
Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import chaos_release
from benchmarks.chaos_cluster import cluster_in
from benchmarks.chaos_load import Work, make_work
from benchmarks.chaos_scenarios import TOPOLOGIES, Run, Stage, Topology
from benchmarks.chaos_tables import merged, release_rows, report_rows, report_table, write_docs
from benchmarks.live import end_in_order
from benchmarks.machine import OtherLoad
from benchmarks.report import Row, finish, read_rows, write
from tests.support.checkpoint import tiny_checkpoint
from tests.support.oracle import Oracle

LENGTHS = (150, 1100, 700, 1900, 1500)
"""Tokens per prompt, in turn: four of five are longer than what is prefilled locally by default."""
MAX_TOKENS = 32
FREED = "freed"
NAME, TITLE = "chaos-report", "One process killed under load"


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


class Report:
    """Rows so far. With `save` every new group goes to the files at once, beside what is there
    from other runs: a run may cover a part, and one that is stopped keeps what it has measured."""

    def __init__(self, quiet: OtherLoad, save: bool) -> None:
        self._quiet, self._save = quiet, save
        self.rows: list[Row] = []

    def add(self, rows: list[Row]) -> None:
        self.rows += rows
        print(report_table(rows).splitlines()[-1], flush=True)
        if self._save:
            everything = merged(read_rows(NAME), self.rows)
            write(NAME, everything, quiet=self._quiet.quiet, title=TITLE)
            write_docs(NAME, report_table(everything))

    def finish(self) -> int:
        """Print what this run measured; 1 if a target was missed in it."""
        print(f"\n{report_table(self.rows)}")
        return finish(NAME, self.rows, quiet=self._quiet.quiet, save=False, title=TITLE)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(dict.fromkeys([*(s.key for t in TOPOLOGIES for s in t.scenarios), FREED]))
    parser.add_argument("--requests", type=int, default=100, help="of each client")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kills", type=int, default=60, help="of writers; 0: none")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help=f"a topology, a scenario or TOPOLOGY/SCENARIO; may be repeated. Scenarios: {names}",
    )
    parser.add_argument("--logs", type=Path, help="keep the processes' logs in this folder")
    parser.add_argument(
        "--save",
        action="store_true",
        help="write the results and the table in benchmarks/README.md",
    )
    options = parser.parse_args()
    topologies = chosen(options.only)
    freed = options.kills > 0 and (not options.only or FREED in options.only)
    if not topologies and not freed:
        parser.error(f"--only {options.only}: nothing has that name")
    end_in_order()
    quiet = OtherLoad()
    quiet.look()
    report = Report(quiet, options.save)
    with tempfile.TemporaryDirectory(prefix="pullfill-chaos-") as directory:
        base = options.logs or Path(directory)
        with Oracle(tiny_checkpoint()) as oracle:
            count = options.clients * options.requests
            print(f"asking one plain vLLM engine for {count} answers", flush=True)
            work = make_work(oracle, count, LENGTHS, MAX_TOKENS)
        for topology in topologies:
            for run in play(topology, work, options, base):
                report.add(report_rows(topology.name, run))
        if freed:
            seen = chaos_release.measure(work, options.kills, base, options.clients)
            report.add(release_rows(seen, options.kills))
    quiet.look()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
