"""What commands have in common that measure a cluster of their own, or simulate one."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import machine
from benchmarks.live import end_in_order
from benchmarks.report import Row, finish

Measure = Callable[[argparse.Namespace, Path], tuple[list[Row], machine.OtherLoad]]


def described(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help keeps the lines of the description."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that all have which measure; add those of the one."""
    made = described(description)
    made.add_argument("--no-save", action="store_true", help="print only")
    made.add_argument("--even-if-busy", action="store_true", help="save what was not quiet, marked")
    return made


def main(name: str, title: str, options: argparse.Namespace, measure: Measure) -> int:
    """Measure in a temporary folder, print, and write results/NAME.md. Returns the exit
    status: 1 when a target is missed or the machine was not quiet."""
    end_in_order()
    with tempfile.TemporaryDirectory(prefix="pullfill-bench-") as directory:
        rows, quiet = measure(options, Path(directory))
    print(quiet)
    return finish(
        name,
        rows,
        quiet=quiet.quiet,
        save=not options.no_save,
        title=title,
        even_if_busy=options.even_if_busy,
    )


def simulate(
    name: str, title: str, parser: argparse.ArgumentParser, measure: Callable[[int], list[Row]]
) -> int:
    """Simulate, print, and write results/NAME.md with --save. Returns the exit status.

    parser: with an option `count`, which `measure` gets."""
    parser.add_argument("--save", action="store_true", help=f"write results/{name}.md")
    options = parser.parse_args()
    # Simulated figures do not depend on what else the machine does.
    return finish(name, measure(options.count), quiet=True, save=options.save, title=title)
