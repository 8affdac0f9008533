"""Compares the CPU time of a remote prefill in two checkouts:

    python -m benchmarks.control.duel OLD NEW [--workers 1] [--windows 12] [--seconds 3]

On a shared machine two runs of the same code differ by a third. So one cluster of each checkout
(mock workers, real NATS and etcd) runs at the same time, and the load goes to the two in turns, one
window after the other. Prints the median of each side and the median ratio of the pairs, for each
role and thread. `ours` leaves out what `probes` counts as vLLM's. `wake-ups` counts how often a
thread of the role has gone to sleep.
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
"""Conversations started per second. Each has two requests."""
CONVERSATIONS, AT_ONCE = 250, 32
"""In a window of the closed loop: all conversations, and those under way at the same time."""
PORTION = 500
"""Conversations of one load: the driver limits its time."""
LEAST_MS = 0.02
"""Figures below this many ms per request are not printed."""


def warm_up(workers: int) -> list[int]:
    """Return numbers of conversations for the warm-up, in portions that end within the time limit.

    The first job between two workers costs more than others (descriptor, mapping, thread). Which
    worker prefills is chance: with three requests for each pair, one pair in twenty has no job."""
    wanted = 40 + 3 * workers**2 // 2
    return [min(PORTION, wanted - done) for done in range(0, wanted, PORTION)]


def wakeups(pids: list[int]) -> int:
    """Return how often the threads of these processes have gone to sleep so far."""
    return sum(
        int(status.read_text().split("\nvoluntary_ctxt_switches:")[1].split()[0])
        for pid in pids
        for status in Path(f"/proc/{pid}/task").glob("*/status")
    )


def serve(workers: int) -> None:
    """Run the cluster of one side, with so many workers of each kind.

    Prints one empty JSON object when it is ready. Then each line of stdin holds the arguments of
    one window of load, in JSON, and is answered with the CPU time per request, in ms."""
    # Of the checkout that is measured, which may be older than this file.
    from benchmarks.control.plant import Fleet, mock_flags, plant

    with tempfile.TemporaryDirectory(prefix="pullfill-duel-") as base, plant(Path(base)) as servers:
        fleet = Fleet(
            servers, "duel", workers, workers,
            decode_flags=mock_flags(), prefill_flags=mock_flags(), router={},
        )  # fmt: skip
        roles = {"decode": fleet.decode, "prefill": fleet.prefill, "front": [fleet.front]}
        try:
            for seed, count in enumerate(warm_up(workers)):
                fleet.driver.do("load", conversations=count, at_once=AT_ONCE, seed=seed)
            print(json.dumps({}), flush=True)
            for line in sys.stdin:
                before = {role: wakeups(pids) for role, pids in roles.items()}
                with fleet.window() as used:
                    done = fleet.driver.do("load", **json.loads(line))
                told = _told(used, done["requests"])
                for role, pids in roles.items():
                    woken = wakeups(pids) - before[role]
                    told[f"{role}: wake-ups"] = woken / done["requests"]
                print(json.dumps(told), flush=True)
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
    """The cluster of one checkout, in a child process.

    The constructor does not wait: construct both sides, then call `wait_ready` on each. So the two
    clusters start at the same time."""

    def __init__(self, tree: Path, workers: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).resolve()), "serve", str(workers)],
            cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def wait_ready(self) -> None:
        """Wait until the cluster takes requests."""
        self._answer()

    def ask(self, **order: float) -> dict[str, float]:
        """Run one window of load. Returns the CPU time per request in ms, by name.

        order: arguments of the driver's `load`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):  # other lines are printed by libraries
                return dict(json.loads(line))
        raise SystemExit("a side ended: its error is above")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def compare(sides: tuple[Side, Side], windows: int, **order: float) -> None:
    """Run `windows` windows on each side, and print the medians and their ratio."""
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
    parser.add_argument("old", type=Path, help="root of the first checkout")
    parser.add_argument("new", type=Path, help="root of the second checkout")
    parser.add_argument("--workers", type=int, default=1, help="workers of each kind")
    parser.add_argument(
        "--windows", type=int, default=12, help="windows of paced load on each side"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a paced window")
    options = parser.parse_args()
    trees = options.old.resolve(), options.new.resolve()
    sides = Side(trees[0], options.workers), Side(trees[1], options.workers)
    try:
        for side in sides:
            side.wait_ready()
        print(f"ms per request at {2 * PACED_PER_S:g} requests/s")
        count = round(PACED_PER_S * options.seconds)
        compare(sides, options.windows, conversations=count, at_once=10_000, rate=PACED_PER_S)
        print("ms per request in a closed loop")
        compare(sides, max(4, options.windows // 2), conversations=CONVERSATIONS, at_once=AT_ONCE)
    finally:
        for side in sides:
            side.end()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(int(sys.argv[2]))
    else:
        main()
