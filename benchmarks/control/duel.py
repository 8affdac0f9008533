"""The CPU of a remote prefill in two checkouts, side by side:

    python -m benchmarks.control.duel OLD NEW [--windows 12] [--seconds 3]

From one run to the next the same code differs by a third on a shared machine. So both clusters (one
mock worker of each kind, real NATS and etcd) are up at the same time, and windows of requests go to
one and the other in turns. Prints the median of each side and the median ratio of the pairs, for
each role and thread; `ours` is without what `probes` counts as vLLM's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

PACED_PER_S = 15.0
"""Conversations; each has two requests."""
CONVERSATIONS, AT_ONCE = 250, 32
"""Of a window of the closed loop."""
LEAST_MS = 0.02


def serve() -> None:
    """One side: answers each line of stdin, an order, with the CPU per request in ms."""
    from benchmarks.control.plant import Fleet, mock_flags, plant

    with tempfile.TemporaryDirectory(prefix="pullfill-duel-") as base, plant(Path(base)) as servers:
        fleet = Fleet(
            servers, "duel", 1, 1, decode_flags=mock_flags(), prefill_flags=mock_flags(), router={}
        )
        try:
            fleet.driver.do("load", conversations=200, at_once=AT_ONCE, seed=1)
            print(json.dumps({}), flush=True)
            for line in sys.stdin:
                with fleet.window() as used:
                    done = fleet.driver.do("load", **json.loads(line))
                print(json.dumps(_told(used, done["requests"])), flush=True)
        finally:
            fleet.close()


def _told(used: dict[str, Any], requests: int) -> dict[str, float]:
    each = 1e3 / requests
    told = {f"{role} ours": use.ours * each for role, use in used.items()}
    told["all ours"] = sum(told.values())
    told["all with vLLM"] = sum(use.total for use in used.values()) * each
    for role in ("decode", "prefill"):
        use = used[role]
        told |= {f"{role}: {name} thread": cpu * each for name, cpu in use.threads.items()}
        told[f"{role}: engine thread, ours"] = (use.threads["engine"] - use.engine) * each
        told[f"{role}: steps"] = use.steps / requests
    return told


class Side:
    """A cluster of one checkout. `ask` after the construction of both: they start side by side."""

    def __init__(self, tree: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).resolve()), "serve"],
            cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, **order: float) -> dict[str, float]:
        """One window; without an order, wait until it is ready."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if order:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line.startswith("{"):  # libraries print
                return dict(json.loads(line))
        raise SystemExit("a side ended: its error is above")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def compare(sides: tuple[Side, Side], windows: int, **order: float) -> None:
    """Print the medians of `windows` windows on each side."""
    found: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    for number in range(windows):
        for which in (0, 1) if number % 2 else (1, 0):
            found[which].append(sides[which].ask(**order, seed=1000 + number))
    for name in sorted({name for window in (*found[0], *found[1]) for name in window}):
        old, new = ([window.get(name, 0.0) for window in side] for side in found)
        if max(median(old), median(new)) > LEAST_MS:
            ratio = median(b / a for a, b in zip(old, new, strict=True)) if min(old) else 0.0
            print(f"  {name:32} {median(old):7.3f} -> {median(new):7.3f}  ratio {ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a paced window")
    options = parser.parse_args()
    sides = Side(options.old.resolve()), Side(options.new.resolve())
    try:
        for side in sides:
            side.ask()
        print(f"ms per request at {2 * PACED_PER_S:g} requests/s")
        count = round(PACED_PER_S * options.seconds)
        compare(sides, options.windows, conversations=count, at_once=10_000, rate=PACED_PER_S)
        print("ms per request in a closed loop")
        compare(sides, max(4, options.windows // 2), conversations=CONVERSATIONS, at_once=AT_ONCE)
    finally:
        for side in sides:
            side.end()


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        main()
