"""Measures the cost of the control plane as work grows: `make bench-control`.

NATS, etcd, frontends and workers are real. Only the model is a mock (pullfill/testing/), so
that many workers fit on one machine. Parts:
  depth    a decision with ten and with ten thousand jobs waiting, in turns
  tokens   CPU per request and per streamed token through the real frontend and both workers
  groups   a remote prefill of a model with four KV cache groups, and with one, in turns
  scale    1 … 16 decode and as many prefill workers: CPU per request, stages, idling
  idle     as many idle workers: CPU, threads, sockets, memory (only with --parts idle)
  links    the control connections of idle workers, in one process (only with --parts links)
  floor    only the messages of a job, between two empty processes (only with --parts floor)
CPU "beside engines" is the CPU time of all processes, including NATS, etcd and our part of a
frontend, without vLLM's scheduler and the mock. Writes results/control.json and .md after each part
and each size. A run of some parts writes results/control-PARTS.* instead. Exit status 1 when a
target is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import machine
from benchmarks.control import depth, floor, groups, idle, links, scale, tokens
from benchmarks.control.plant import plant
from benchmarks.live import end_in_order
from benchmarks.report import Row, finish, read_rows, write

NAME, TITLE = "control", "The control plane as work grows, with mock engines"
PARTS = ("depth", "tokens", "groups", "scale")
MORE = ("idle", "links", "floor")
QUICK, FULL = "1,4,16", "1,2,4,8,16"


def measure(
    options: argparse.Namespace, base: Path, quiet: machine.OtherLoad
) -> Iterator[list[Row]]:
    """The rows of one part, or one size, after the other."""
    quiet.look(1.0)
    sizes = sorted(int(size) for size in options.sizes.split(","))
    if "links" in options.parts:
        yield links.run(sizes, options, quiet)
    if options.parts == ["links"]:
        return
    with plant(base) as servers:
        servers.profile = options.profile
        if "depth" in options.parts:
            yield depth.run(servers, options.rounds, options.depth)
        if "tokens" in options.parts:
            yield tokens.run(servers, options.requests, options.rounds, quiet)
        if "groups" in options.parts:
            yield groups.run(servers, options.rounds, quiet)
        if "scale" in options.parts:
            for size in sizes:
                yield scale.run(servers, size, options, quiet)
        if "floor" in options.parts:
            yield floor.run(servers.nats, servers.servers[0], options.rounds)
        if "idle" in options.parts:
            rows = list[Row]()
            for size in sizes:
                rows += (found := idle.run(servers, size, options, quiet, rows))
                yield found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"sizes {QUICK}, fewer repeats")
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, *MORE), default=list(PARTS))
    parser.add_argument("--sizes", help=f"workers of each role (default {FULL})")
    parser.add_argument("--rounds", type=int, help="repeats of depth, tokens, groups")
    parser.add_argument("--depth", type=int, default=depth.MANY, help="jobs that wait")
    parser.add_argument("--requests", type=int, default=120, help="per round of tokens")
    parser.add_argument("--conversations", type=int, default=400, help="in the closed loop")
    parser.add_argument("--at-once", type=int, default=32, help="of them together")
    parser.add_argument("--idle", type=float, default=4.0, metavar="S", help="idle window")
    parser.add_argument("--rest", type=float, default=75.0, metavar="S", help="before idle is seen")
    parser.add_argument("--meet", type=int, default=10, help="conversations per worker before it")
    parser.add_argument("--paced", type=float, default=8.0, metavar="S", help="paced window")
    parser.add_argument(
        "--keep", action="store_true", help="keep rows of the last results not measured now"
    )
    parser.add_argument("--profile", action="store_true", help="print where the loops' time goes")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    options.sizes = options.sizes or (QUICK if options.quick else FULL)
    options.rounds = options.rounds or (3 if options.quick else 7)
    end_in_order()
    quiet, rows = machine.OtherLoad(), list[Row]()
    part = not options.keep and set(options.parts) != set(PARTS)
    name = "-".join([NAME, *options.parts]) if part else NAME
    kept = read_rows(name) if options.keep else []
    with tempfile.TemporaryDirectory(prefix="pullfill-bench-") as directory:
        for found in measure(options, Path(directory), quiet):
            rows += found
            new = {row.metric for row in rows}
            everything = [row for row in kept if row.metric not in new] + rows
            if not options.no_save and quiet.quiet:
                write(name, everything, quiet=True, title=TITLE)
    print(quiet)
    return finish(name, rows, quiet=quiet.quiet, save=False, title=TITLE)


if __name__ == "__main__":
    sys.exit(main())
