"""Serving, against what a user would pick instead: `make bench` (an hour), `make bench-quick`.

Starts each system fresh on the same model and the same cores, warms it up, and measures
  interference  ITL of four short streams with and without a 3000-token prompt every 2 s
  chat          conversations that grow: what of the prefix is still in the cache
Repeats go over all systems in turn, in an order that changes. Writes results/serving.md.
Exit status 1 when a target is missed, a system failed, or the machine was not quiet.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks import command, report
from benchmarks.live import end_in_order
from benchmarks.serving import model, parts, tables
from benchmarks.serving.campaign import Campaign, Measured
from benchmarks.serving.contract import System
from benchmarks.serving.systems import SYSTEMS
from benchmarks.serving.verdict import Verdict
from benchmarks.serving.workloads import Longs

TITLE = "Serving: pullfill against what a user would pick instead"


def chosen(names: str, known: list[str], what: str) -> list[str]:
    """The comma-separated names, all if empty. Raises SystemExit for unknown ones."""
    wanted = [name for name in names.split(",") if name] or known
    if wrong := [name for name in wanted if name not in known]:
        sys.exit(f"no {what} is called {', '.join(wrong)}; there are {', '.join(known)}")
    return wanted


def plan(options: argparse.Namespace) -> tuple[list[System], dict[str, tuple[str, ...]]]:
    """Systems that have anything to do, and the parts of each."""
    table = parts.QUICK_PARTS if options.quick else parts.FULL_PARTS
    wanted = chosen(options.workloads, list(parts.RUN), "workload")
    if options.workloads:  # asked for by name: as in a full run
        table = {**table, **{p: parts.FULL_PARTS[p] for p in wanted if p not in table}}
    table = {part: names for part, names in table.items() if part in wanted}
    listed = {name for names in table.values() for name in names}
    used = [name for name in SYSTEMS if name in listed]
    systems = chosen(options.systems, list(SYSTEMS), "system") if options.systems else used
    return [SYSTEMS[name] for name in systems], table


def is_quiet(measured: Measured) -> bool:
    """Nobody else in any window or before a start."""
    loud = [w for w in measured.windows if not w.quiet]
    for w in loud:
        print(f"not quiet: {w.system}, {w.part} {w.label}: others used {100 * w.others:.0f} %")
    return measured.quiet.quiet and not loud


def finish(measured: Measured, options: argparse.Namespace, quiet: bool) -> int:
    """Print and save everything. Returns the exit status."""
    text = tables.markdown(measured)
    rows = [*Verdict(measured).rows(), *tables.rows(measured)]
    save = options.save and not measured.cut and (quiet or options.even_if_busy)
    print(f"\n{text}")
    return report.finish(
        options.name,
        rows,
        quiet=quiet,
        save=save,
        title=f"{TITLE} (longs: {Longs()})",
        more=text,
        even_if_busy=options.even_if_busy,
    )


def parser() -> argparse.ArgumentParser:
    made = command.described(__doc__)
    made.add_argument("--quick", action="store_true", help="one repeat")
    made.add_argument("--systems", default="", metavar="A,B", help=", ".join(SYSTEMS))
    made.add_argument("--workloads", default="", metavar="A,B", help=", ".join(parts.RUN))
    made.add_argument("--repeats", type=int, help="starts per system (3, quick: 1)")
    made.add_argument("--even-if-busy", action="store_true", help="save what was not quiet, marked")
    made.add_argument("--logs", type=Path, help="keep the systems' logs here")
    made.add_argument("--name", default="serving", help="of the files in results/")
    made.add_argument("--save", action="store_true", help="write the files")
    return made


def main() -> int:
    options = parser().parse_args()
    end_in_order()
    systems, table = plan(options)
    scale = parts.QUICK if options.quick else parts.FULL
    repeats = options.repeats or (1 if options.quick else 3)
    with tempfile.TemporaryDirectory(prefix="pullfill-bench-") as directory:
        base = options.logs or Path(directory)
        model.model_directory()
        measured = Campaign(systems, scale, table, repeats, model.plain_tokens(), base).run()
    return finish(measured, options, is_quiet(measured))


if __name__ == "__main__":
    sys.exit(main())
