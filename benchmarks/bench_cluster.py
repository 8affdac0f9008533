"""Start-up, handoff and idle cost of one cluster: `make bench-cluster`.

Starts the demo cluster (one decode, one prefill worker, one frontend) as a user does and measures
  start    seconds until `pullfill up` says ready; until a prefill worker started by hand pulls
  memory   resident memory of each role after the load below
  handoff  the stages of remote prefills on an otherwise idle cluster, from `pullfill explain`
  idle     CPU of all processes together while nothing is asked
Writes results/cluster.md. Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks import command, machine
from benchmarks.live import CLI, Live, ask, child, demo_vocabulary, running, wait_for
from benchmarks.report import Row, median, percentile, row

STAGES = {
    "queue": ("decide -> claimed by an idle prefill worker", 5.0),
    "commit": ("commit -> decode scheduled", 3.0),
    "route": ("route", None),
    "claim": ("claim (one round trip)", None),
    "prefix_read": ("prefix read, 1024 tokens", None),
    "prefill": ("prefill, 1024 tokens", None),
    "kv_write": ("KV write, 1024 tokens", None),
    "first_token": ("first token, HTTP request to first output", None),
}
PROMPT = 1024
"""Tokens that each request leaves to the prefill worker."""
BETWEEN_S = 0.1
SETTLE_S = 5.0


def measure_ready(repeats: int, base: Path, quiet: machine.OtherLoad) -> list[float]:
    """Seconds from `pullfill up` to ready, several times over fresh state directories."""
    times = list[float]()
    for number in range(repeats):
        quiet.look()
        with running(base / f"start-{number}") as live:
            times.append(live.ready_s)
        print(f"ready after {times[-1]:.1f} s")
    return times


def measure_by_hand(live: Live, log: Path) -> float:
    """Seconds until a second prefill worker, started by hand, pulls jobs of this cluster: the
    decode worker sees it connected, which is its last step before the first pull."""
    before = live.linked()
    begin = time.monotonic()
    with child([*CLI, "prefill", "--state-dir", str(live.state_dir)], log):
        wait_for(lambda: live.linked() - before, 120.0, "a second prefill worker pulls", 0.25)
        took = time.monotonic() - begin
    wait_for(lambda: live.linked() == before, 30.0, "the second prefill worker left")
    print(f"prefill worker pulls after {took:.1f} s")
    return took


def measure_handoff(live: Live, requests: int) -> list[dict[str, Any]]:
    """Remote prefills one at a time, in pairs: a new prompt, then one that has it as its prefix,
    so that the prefill worker must read. Returns the explain records."""
    ids = range(32, demo_vocabulary())
    rng = random.Random(7)
    records: list[dict[str, Any]] = []
    prompt: list[int] = []
    with httpx.Client(base_url=live.url, timeout=60.0) as http:
        for number in range(-4, requests):  # the first pairs warm up
            fresh = [rng.choice(ids) for _ in range(PROMPT)]
            prompt = fresh if number % 2 == 0 else prompt + fresh
            records.append(ask(http, prompt, 4)[1])
            time.sleep(BETWEEN_S)
    return records[4:]


def handoff_rows(records: list[dict[str, Any]]) -> list[Row]:
    """p50 (held against the target) and p99 of every stage, in ms."""
    remote = [r for r in records if r["path"] == "remote"]
    rows = [row("requests prefilled remotely", len(remote), f"of {len(records)}")]
    rows[0].target, rows[0].ok = "all", len(remote) == len(records)
    for stage, (name, limit) in STAGES.items():
        took = [
            r["timings_ms"][stage]
            for r in remote
            if r["timings_ms"][stage] is not None
            and (stage != "prefix_read" or r["prefix_hit_tokens"])
        ]
        if took:
            rows.append(row(f"{name}, p50", percentile(took, 0.5), "ms", limit))
            rows.append(row(f"{name}, p99", percentile(took, 0.99), "ms"))
    return rows


def measure_idle(live: Live, seconds: float, quiet: machine.OtherLoad) -> list[Row]:
    """CPU of every process while nothing is asked, in % of one core."""
    names = live.pids()
    time.sleep(SETTLE_S)
    with quiet.window(names):
        before = {pid: machine.total_cpu_seconds([pid]) for pid in names}
        begin = time.monotonic()
        time.sleep(seconds)
        used = {pid: machine.total_cpu_seconds([pid]) - before[pid] for pid in names}
        took = time.monotonic() - begin
    share = {names[pid]: 100 * cpu / took for pid, cpu in used.items()}
    rows = [row("idle CPU, all processes", sum(share.values()), "% of one core", 10.0)]
    return rows + [
        row(f"idle CPU, {name}", value, "% of one core") for name, value in share.items()
    ]


def memory_rows(live: Live, when: str) -> list[Row]:
    """Resident memory now. A prefill worker maps its own KV cache and each decode worker's."""
    rows = []
    for role in ("decode", "prefill", "frontend"):
        used, limit = machine.memory(live.pid(role)), None if role == "frontend" else 0.9
        rows.append(row(f"{role} memory {when}, RSS", used.rss / 1e9, "GB", limit))
        if used.shared > 1e6:
            rows.append(row(f"{role} memory {when}, shared KV in it", used.shared / 1e9, "GB"))
    return rows


def run(options: argparse.Namespace, base: Path) -> tuple[list[Row], machine.OtherLoad]:
    quiet = machine.OtherLoad()
    ready = measure_ready(options.starts - 1, base, quiet)
    quiet.look()
    with running(base / "cluster") as live:
        ready.append(live.ready_s)
        print(f"ready after {live.ready_s:.1f} s")
        rows = [row("ready after `pullfill up`", median(ready), "s", 60.0)]
        took = median(
            [measure_by_hand(live, base / f"hand-{i}.log") for i in range(options.starts)]
        )
        rows.append(row("`pullfill prefill` by hand pulls after", took, "s", 25.0))
        rows += memory_rows(live, "when ready")
        with quiet.window(live.pids()):
            records = measure_handoff(live, options.requests)
        rows += memory_rows(live, "after the load")
        rows += handoff_rows(records)
        rows += measure_idle(live, options.idle, quiet)
    return rows, quiet


def main() -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--starts", type=int, default=3, help="how often `up` is timed")
    parser.add_argument("--requests", type=int, default=100, help="remote prefills, at least 2")
    parser.add_argument(
        "--idle", type=float, default=30.0, metavar="S", help="length of the idle window"
    )
    title = "One demo cluster: start, memory, handoff, idle"
    return command.main("cluster", title, parser.parse_args(), run)


if __name__ == "__main__":
    sys.exit(main())
