"""Measures CPU per request, stage times and idle CPU, for n decode and n prefill workers.

Each size is a fleet of its own, one after the other on the same servers. Before a fleet starts,
`floor` measures what a job's messages alone cost at a low fixed rate. Each fleet has a warm-up
until nearly all pairs of workers have shared a job, an idle window, requests at that rate (for the
stages), and two closed loops (for the CPU). The first one is the same at each size, so the more
workers, the fewer requests has each of them. The second one grows with the workers.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from benchmarks import machine
from benchmarks.control import floor
from benchmarks.control.plant import THREADS, Fleet, Plant, Use, mock_flags, private_bytes
from benchmarks.report import Row, percentile, row, versus

STAGES = ("route", "queue", "claim", "prefix_read", "kv_write", "commit", "first_token")
ROLES = ("decode", "prefill", "front", "nats", "etcd")
PACED_PER_S = 15.0
"""Conversations; each has two requests."""
TARGET_MS = 2.0
TARGET_RATIO = 3.0
"""At the low rate, to the messages alone (docs/decisions.md 17)."""
PORTION = 500


@dataclass(slots=True)
class Size:
    """What was measured at one size.

    floor_ms: CPU ms of a job's messages alone.
    idle: share of a core by role.
    paced, use, full: CPU at the low rate, and in the first and second closed loop.
    loop_s: seconds of the first closed loop."""

    workers: int
    ready_s: float
    floor_ms: float
    idle: dict[str, float]
    stages: dict[str, list[float]]
    paced: dict[str, Use]
    paced_requests: int
    use: dict[str, Use]
    requests: int
    full: dict[str, Use]
    full_requests: int
    loop_s: float
    remote: int
    failed: int
    rss_mb: float

    @property
    def idle_ms(self) -> float:
        """The part of a request at the low rate that an idle fleet uses in the same time."""
        return sum(self.idle.values()) / (2 * PACED_PER_S) * 1e3


def each_ms(used: dict[str, Use], requests: int) -> float:
    """Return the CPU per request beside the engines."""
    return sum(use.ours for use in used.values()) / requests * 1e3


def warm_up(workers: int) -> list[int]:
    """Return numbers of conversations for the warm-up, in portions that end within the time limit.

    The first job between two workers costs more than others (descriptor, mapping, thread). Which
    worker prefills is chance: with three requests for each pair, one pair in twenty has no job."""
    wanted = 40 + 3 * workers**2 // 2
    return [min(PORTION, wanted - done) for done in range(0, wanted, PORTION)]


def measure(
    plant: Plant, workers: int, options: argparse.Namespace, quiet: machine.OtherLoad
) -> Size:
    """One size. Raises BenchError."""
    floor_ms = sum(floor.measure(plant.nats, plant.servers[0]).values())
    fleet = Fleet(
        plant, f"scale{workers}", workers, workers,
        decode_flags=mock_flags(), prefill_flags=mock_flags(), router={},
    )  # fmt: skip
    try:
        for number, count in enumerate(warm_up(workers)):
            fleet.driver.do("load", conversations=count, at_once=32, seed=100 + number)
        time.sleep(3.0)
        everybody = [fleet.front, *fleet.decode, *fleet.prefill, *plant.servers]
        rss = sum(private_bytes(pid) for pid in everybody) / 1e6
        with quiet.window(everybody), fleet.window() as idle:
            time.sleep(options.idle)
        count = round(PACED_PER_S * options.paced)
        one_of_each = [*fleet.decode[:1], *fleet.prefill[:1]]
        before = plant.profiles(one_of_each) if plant.profile else []
        with quiet.window(everybody), fleet.window() as paced:
            slow = fleet.driver.do(
                "load", conversations=count, at_once=10_000, rate=PACED_PER_S, seed=2
            )
        if plant.profile:
            print_profiles(before, plant.profiles(one_of_each), 2 * count // workers)
        with quiet.window(everybody), fleet.window() as use:
            fast = fleet.driver.do(
                "load", conversations=options.conversations, at_once=options.at_once, seed=3
            )
        many = options.at_once * workers
        with quiet.window(everybody), fleet.window() as full:
            crowd = fleet.driver.do(
                "load", conversations=max(options.conversations, 2 * many), at_once=many, seed=4
            )
    finally:
        fleet.close()
    local = sum((Counter(load["local"]) for load in (slow, fast, crowd)), Counter[str]())
    print(f"  prefilled locally: {dict(local)}")
    return Size(
        workers, fleet.ready_s, floor_ms,
        {role: u.total / options.idle for role, u in idle.items()},
        slow["stages"], paced, slow["requests"], use, fast["requests"], full,
        crowd["requests"], fast["seconds"], sum(load["remote"] for load in (slow, fast, crowd)),
        sum(load["failed"] for load in (slow, fast, crowd)), rss,
    )  # fmt: skip


def rows_of(size: Size) -> list[Row]:
    """Everything about one size."""
    at = f"{size.workers}+{size.workers} workers"
    wanted = size.requests + size.paced_requests + size.full_requests
    remote = row(f"{at}: requests prefilled remotely", size.remote, f"of {wanted}")
    remote.target, remote.ok = "all", size.remote == wanted
    ours_ms, full_ms = each_ms(size.use, size.requests), each_ms(size.full, size.full_requests)
    per_s, paced_ms = 2 * PACED_PER_S, each_ms(size.paced, size.paced_requests)
    rows = [
        remote,
        row(f"{at}: requests failed", size.failed, f"of {wanted}", 0),
        row(f"{at}: CPU per request beside engines", ours_ms, "ms", TARGET_MS),
        row(f"{at}: the same with as many requests for each worker", full_ms, "ms", TARGET_MS),
        row(f"{at}: the same at {per_s:g} requests/s", paced_ms, "ms", TARGET_MS),
        row(f"{at}: of it idling", size.idle_ms, "ms"),
        versus(
            f"{at}: the rest at {per_s:g} requests/s", paced_ms - size.idle_ms, "ms",
            "messages of a job alone", size.floor_ms, TARGET_RATIO,
        ),
        row(f"{at}: requests/s on this machine", size.requests / size.loop_s, "1/s"),
    ]  # fmt: skip
    for role in ROLES:
        ours = size.use[role].ours / size.requests * 1e3
        rows.append(row(f"{at}: of it {role}", ours, "ms"))
    engines = sum(size.use[role].engine for role in ("decode", "prefill"))
    rows.append(row(f"{at}: engines (not counted)", engines / size.requests * 1e3, "ms"))
    for role in ROLES:
        rows.append(row(f"{at}: idle CPU, {role}", 100 * size.idle[role], "% of one core"))
    for stage in STAGES:
        if values := size.stages.get(stage):
            rows.append(row(f"{at}: {stage} p50", percentile(values, 0.5), "ms"))
            rows.append(row(f"{at}: {stage} p99", percentile(values, 0.99), "ms"))
    rows.append(row(f"{at}: ready after", size.ready_s, "s"))
    rows.append(row(f"{at}: memory beside shared imports", size.rss_mb, "MB"))
    return rows


def print_profiles(
    before: list[dict[Any, Any]], after: list[dict[Any, Any]], requests: int, lines: int = 600
) -> None:
    """Print, per request, where one worker of each role used CPU between two profiles."""
    names = [f"{role} {thread}" for role in ("decode", "prefill") for thread in THREADS]
    for name, old, new in zip(names, before, after, strict=True):
        found = []
        for where, (_, calls, own, total, _) in new.items():
            _, calls0, own0, total0, _ = old.get(where, (0, 0, 0.0, 0.0, {}))
            if calls > calls0 or own > own0:
                spent = [(calls - calls0, 1), (own - own0, 1e6), (total - total0, 1e6)]
                found.append(([n * unit / requests for n, unit in spent], where))
        found.sort(key=lambda one: -one[0][1])
        calls, own = (sum(one[0][i] for one in found) for i in (0, 1))
        print(f"{name}: per request {calls:.0f} calls, {own:.0f} us:  calls, own us, all us")
        for (calls, own, total), (file, line, function) in found[:lines]:
            at = "/".join(file.split("/")[-2:])
            print(f"  {calls:8.2f} {own:8.1f} {total:8.1f}  {at}:{line} {function}")


def print_threads(size: Size) -> None:
    """Where the CPU of the closed loop goes, by thread."""
    for role in ("decode", "prefill"):
        use = size.use[role]
        parts = ", ".join(
            f"{name} {cpu / size.requests * 1e3:.3f}"
            for name, cpu in sorted(use.threads.items(), key=lambda item: -item[1])
            if cpu / size.requests > 5e-6
        )
        engine = use.engine / size.requests * 1e3
        print(f"  {role}: ms per request by thread: {parts}; engine {engine:.3f}")


def run(
    plant: Plant, workers: int, options: argparse.Namespace, quiet: machine.OtherLoad
) -> list[Row]:
    """One size, with its rows printed. Raises BenchError."""
    size = measure(plant, workers, options, quiet)
    rows = rows_of(size)
    for one in rows:
        print(f"  {one.metric:<60} {one.value:>10} {one.unit}", flush=True)
    print_threads(size)
    print_paced(size)
    return rows


def print_paced(size: Size) -> None:
    """Print the same for the paced window, for all roles."""
    for role in ROLES:
        use, each = size.paced[role], 1e3 / size.paced_requests
        parts = {name: round(cpu * each, 3) for name, cpu in use.threads.items()}
        parts = {name: ms for name, ms in parts.items() if ms > 0.005}
        print(
            f"  PACED {role}: ms per request: ours {use.ours * each:.3f}, "
            f"engine {use.engine * each:.3f}; by thread {parts}"
        )
