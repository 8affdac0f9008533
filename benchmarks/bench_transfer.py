"""KV block transfers against their physical limits: `make bench-transfer`.

  copies   shm writes against plain loops of memmove and one memcpy; the fence; plans
  busy     the shm writes again beside a thread that runs Python, as an engine does
  tcp      tcp writes into another process against a raw sendmsg/recv_into pair
  nixl     shm writes into another process against NIXL/UCX on the same lists (if installed)
  overlap  a real decode and prefill worker: from the last chunk computed to the commit

Medians of interleaved repeats; a ratio compares two medians of the same run. `--save` writes
benchmarks/results/transfer.json and .md. Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import bench_transfer_copies as copies
from benchmarks import bench_transfer_overlap as overlap
from benchmarks import bench_transfer_remote as remote
from benchmarks.live import end_in_order
from benchmarks.machine import OtherLoad
from benchmarks.report import RESULTS, Row, finish
from tests.support.transfer_rigs import Rig, shm_rig

PARTS = ("copies", "busy", "tcp", "nixl", "overlap")
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


def measure(options: argparse.Namespace, quiet: OtherLoad) -> list[Row]:
    rows: list[Row] = []
    sizes = copies.Sizes(moved=options.mib << 20)
    if "copies" in options.parts or "busy" in options.parts:
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-") as directory:
            with quiet.window([]):
                rows += copy_rows(options, sizes, shm_rig(Path(directory)))
    if "tcp" in options.parts or "nixl" in options.parts:
        with remote.other_process() as other:
            with quiet.window([]):
                if "tcp" in options.parts:
                    rows += remote.tcp_rows(other, sizes, options.rounds)
                if "nixl" in options.parts:
                    rows += remote.nixl_rows(other, sizes, max(3, options.rounds // 3))
    if "overlap" in options.parts:
        rows += overlap.rows(options.prompts, quiet)
    return rows


def copy_rows(options: argparse.Namespace, sizes: copies.Sizes, rig: Rig) -> list[Row]:
    rows: list[Row] = []
    rounds, few, clock = options.rounds, max(3, options.rounds // 3), CLOCKS[options.clock]
    if "copies" in options.parts:
        rows += copies.write_rows(rig, sizes, rounds, clock)
        rows += copies.fence_rows(rig, rounds, clock)
        rows += copies.plan_rows(rounds, clock)
    if "busy" in options.parts:
        with copies.busy_thread():  # on the wall clock: what it costs is waiting
            rows += copies.write_rows(
                rig, sizes, few, CLOCKS["wall"], ", busy thread", targets=False
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--mib", type=int, default=64, help="bytes of one write")
    parser.add_argument("--prompts", type=int, default=12, help="of the overlap part")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="of the copies part: cpu counts only the copying thread, where others use the machine",
    )
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS}/transfer.*")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    options.parts = options.parts or PARTS
    end_in_order()
    quiet = OtherLoad()
    rows = measure(options, quiet)
    print(quiet)
    title = "KV block transfers"
    if options.clock == "cpu":
        title += " (shm, fence and plan rows: CPU time of the copying thread)"
    return finish("transfer", rows, quiet=quiet.quiet, save=options.save, title=title)


if __name__ == "__main__":
    sys.exit(main())
