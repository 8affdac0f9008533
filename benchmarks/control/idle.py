"""Measures the CPU, threads, sockets and memory of idle workers, in fleets of n of each kind.

Each size is a fleet of its own. First some requests make the workers open KV sessions and start
threads. Then there are no requests for `--rest` seconds, which is longer than KV sessions stay
open. After that one worker's share is measured.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine
from benchmarks.control.plant import Fleet, Plant, mock_flags, private_bytes
from benchmarks.report import Row, missing, row

KV_BYTES = 1 << 20
"""512 blocks of the mock's 2 KiB. Small, so that many workers fit into one machine."""
EACH_BYTES = 37_000_000
"""Memory for each worker. Most of it are pages that it no longer shares with its zygote."""

MOST_BUSY = 0.95
"""Share of the cores that an idle fleet may use. With more, the workers do not start in time."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What some processes use together."""

    threads: int
    sockets: int
    private_mb: float


def kept_by(pids: Sequence[int]) -> Kept:
    """Return what these processes use now."""
    return Kept(
        sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),
        sum(_sockets(pid) for pid in pids),
        sum(private_bytes(pid) for pid in pids) / 1e6,
    )


def wakeups(pids: Sequence[int]) -> int:
    """Return how often the threads of these processes have gone to sleep so far."""
    return sum(
        int(status.read_text().split("\nvoluntary_ctxt_switches:")[1].split()[0])
        for pid in pids
        for status in Path(f"/proc/{pid}/task").glob("*/status")
    )


def free_bytes() -> int:
    """Return the memory that is available without swapping."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10


def _sockets(pid: int) -> int:
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += os.readlink(entry).startswith("socket:")
        except FileNotFoundError:  # was closed meanwhile
            continue
    return found


def rows_of(at: str, role: str, kept: Kept, workers: int) -> list[Row]:
    """Return the rows for one worker of a role. They must not grow with the size of the fleet."""
    of = f"of one {role} worker"
    return [
        row(f"{at}: threads {of}", kept.threads / workers, ""),
        row(f"{at}: sockets {of}", kept.sockets / workers, ""),
        row(f"{at}: memory {of}", kept.private_mb / workers, "MB"),
    ]


def why_not(workers: int, smaller: Sequence[Row]) -> str:
    """Return why fleets of this size do not fit into this machine. Empty: they do.

    smaller: rows of smaller fleets, the largest one last."""
    needed, free = 2 * workers * EACH_BYTES, free_bytes()
    if needed > free:
        return f"they need {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free"
    shares = {one.metric.partition(": CPU of ")[2]: one.value for one in smaller}
    cores = workers * sum(shares[of] or 0.0 for of in shares if of) / 100
    if cores > MOST_BUSY * (there := os.cpu_count() or 1):
        return f"idle, they need {cores:.1f} cores, {there} are there"
    return ""


def run(
    plant: Plant,
    workers: int,
    options: argparse.Namespace,
    quiet: machine.OtherLoad,
    smaller: Sequence[Row] = (),
) -> list[Row]:
    """Measure one size and print its rows. If it does not fit here, the one row says so.

    smaller: see `why_not`. Raises BenchError."""
    if why := why_not(workers, smaller):
        print(f"  {workers}+{workers} idle workers: not measured, {why}", flush=True)
        return [missing(f"{workers}+{workers} idle workers", "", why)]
    flags = mock_flags(KV_BYTES)
    fleet = Fleet(
        plant, f"idle{workers}", workers, workers,
        decode_flags=flags, prefill_flags=flags, router={},
    )  # fmt: skip
    roles = {"decode": fleet.decode, "prefill": fleet.prefill}
    at, rows = f"{workers}+{workers} idle workers", list[Row]()
    try:
        if options.meet:
            fleet.driver.do("load", conversations=options.meet * workers, at_once=32, seed=7)
        for role, pids in roles.items():
            rows += rows_of(f"{workers}+{workers} workers just used", role, kept_by(pids), workers)
        time.sleep(options.rest)
        before = {role: wakeups(pids) for role, pids in roles.items()}
        with quiet.window([*fleet.decode, *fleet.prefill, *plant.servers]), fleet.window() as use:
            time.sleep(options.idle)
        woken = {role: wakeups(pids) - before[role] for role, pids in roles.items()}
        for role, pids in roles.items():
            rows += rows_of(at, role, kept_by(pids), workers)
            share = 100 * use[role].total / options.idle / workers
            rows.append(row(f"{at}: CPU of one {role} worker", share, "% of one core"))
            each_s = woken[role] / options.idle / workers
            rows.append(row(f"{at}: wake-ups of one {role} worker", each_s, "1/s"))
        for name in ("nats", "etcd"):
            share = 100 * use[name].total / options.idle / workers
            rows.append(row(f"{at}: CPU of {name}, per pair of workers", share, "% of one core"))
    finally:
        fleet.close()
    for one in rows:
        print(f"  {one.metric:<60} {one.value:>10} {one.unit}", flush=True)
    return rows
