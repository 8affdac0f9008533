"""The command line of the simulations that run each workload with several seeds."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from benchmarks.report import Row, finish


def main(name: str, title: str, description: str, measure: Callable[[int], list[Row]]) -> int:
    """Simulate and print. With `--save`, write results/NAME.json and .md.

    Returns the exit status: 1 if a target is missed.

    measure: simulates with a number of seeds, and returns the rows.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each workload")
    parser.add_argument("--save", action="store_true", help=f"write results/{name}.json and .md")
    options = parser.parse_args()
    # Simulated figures do not depend on what else the machine does.
    return finish(name, measure(options.seeds), quiet=True, save=options.save, title=title)
