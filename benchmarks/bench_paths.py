"""Where the time of a token and of a remote prefill goes: `make bench-paths`.

One decode and one prefill worker with a 24M-parameter model, each on a core of its own, started as
a user does. Printed:
  tokens   ITL and tokens/s of four short streams with and without a long prompt every two seconds,
           and TTFT of these prompts
  threads  CPU of every thread meanwhile, and how long it waited for a core
  hops     the stages of the long requests (`pullfill explain`)
  lengths  TTFT of one prompt on an idle cluster, remote less local, by its length
  bursts   TTFT of long prompts that come at once
Writes results/paths.md. Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import command, machine
from benchmarks.live import BenchError
from benchmarks.report import Row, median, percentile, row, versus
from benchmarks.serving import model, stats, workloads
from benchmarks.serving.contract import Answer, Ask, Kind, Running
from benchmarks.serving.systems_pullfill import cluster
from benchmarks.serving.verdict import itl_p50, itl_p99, long_ttft, tokens
from benchmarks.serving.window import Window, explain, measure
from benchmarks.serving.workloads import LONG_IN, LONG_OUT, Longs, Prompts, Workload

FLAGS = (
    f"--served-model-name={model.NAME}",
    f"--dtype={model.DTYPE}",
    "--max-model-len=8192",
    f"--kv-cache-memory-bytes={512 << 20}",
)
BURST = 3
LENGTHS = (256, 512, 1024, 2048, 4096)
HANDOFF_MS = 15.0
"""Target: how much longer a remote prompt may take than a local one, besides the copying."""
HOPS = ("queue", "claim", "tail", "commit")
"""Stages that only a remote prompt has, besides the computation."""
STAGES = ("route", "queue", "claim", "prefix_read", "prefill", "kv_write", "tail", "commit")


class Session:
    """One cluster, warm, and what is asked of it. url: its frontend."""

    def __init__(self, running: Running, seed: int) -> None:
        self._running, self._seed, self._windows = running, seed, 0
        self.url = running.url

    def measure(self, workload: Workload) -> Window:
        window = measure(self._running, "paths", "", 0, workload)
        if failed := stats.failed(window.answers):
            raise BenchError(f"{len(failed)} requests failed: {failed[0].error}")
        return window

    def prompts(self) -> Prompts:
        """Prompts that no window had before."""
        self._windows += 1
        return Prompts(model.plain_tokens(), "paths", self._seed, self._windows)

    def streams(self, seconds: float, longs: Longs | None) -> Window:
        return self.measure(workloads.interference(self.prompts(), seconds, longs))

    def watched(self, seconds: float) -> tuple[Window, list[machine.ThreadUse]]:
        """Streams and long prompts, and what each thread does meanwhile."""
        names = {**self._running.pids, os.getpid(): "load"}
        with ThreadPoolExecutor(1) as pool:
            uses = pool.submit(machine.thread_use, names, seconds)
            window = self.streams(seconds, Longs())
            return window, uses.result()

    def prompt(self, tokens: int, path: str) -> tuple[Answer, dict[str, Any]]:
        """One prompt, `local` or `remote`, after one that warms up. Returns its answer and record.

        Raises BenchError if it took another path."""
        assert self._running.set_policy is not None
        self._running.set_policy(f"always_{path}")
        prompts = self.prompts()
        asks = [Ask(Kind.LONG, prompts(n), LONG_OUT, "one") for n in (LENGTHS[0], tokens)]
        window = self.measure(Workload(tuple(asks)))
        explain(window, self.url)
        answer = window.answers[1]
        record = window.explained[answer.request_id]
        if record["path"] != path:
            raise BenchError(f"a {path} prefill was wanted, it was {record['path']}: {record}")
        return answer, record

    def burst(self) -> list[float]:
        """TTFT in s of `BURST` long prompts sent at once, the first one first."""
        prompts = self.prompts()
        asks = [Ask(Kind.LONG, prompts(LONG_IN), LONG_OUT, f"b{n}", 0.0) for n in range(BURST)]
        return sorted(stats.ttfts(self.measure(Workload(tuple(asks))).answers))


@dataclass(slots=True)
class Pair:
    """TTFT in ms of a local and a remote prompt, measured one after the other.

    prefill: the `prefill` stage of the remote prompt. hops: its HOPS."""

    local: float
    remote: float
    prefill: float
    hops: float


def measure_lengths(session: Session, turns: Sequence[int]) -> dict[int, list[Pair]]:
    """By length, one request at a time. Both of a pair within seconds, and each first in turn: from
    minute to minute the same prompt differs by more than the handoff takes."""
    found: dict[int, list[Pair]] = {}
    for number in turns:
        for length in LENGTHS:
            took, told = dict[str, float](), dict[str, dict[str, float]]()
            for path in ("local", "remote")[:: 1 if number % 2 else -1]:
                answer, record = session.prompt(length, path)
                took[path], told[path] = 1e3 * stats.ttft(answer), record["timings_ms"]
            stages = told["remote"]
            hops = sum(stages[hop] for hop in HOPS)
            pair = Pair(took["local"], took["remote"], stages["prefill"], hops)
            found.setdefault(length, []).append(pair)
    return found


def token_rows(control: Sequence[Window], busy: Sequence[Window], alone_ms: float) -> list[Row]:
    """ITL, throughput and TTFT of the long prompts, held against the targets."""
    rows = []
    for name, unit, what, limit in (
        ("ITL p50", "ms", itl_p50, None),
        ("ITL p99", "ms", itl_p99, 1.5),
        ("tokens/s", "tokens/s", tokens, None),
    ):
        stirred, calm = (median([what(w) for w in side]) for side in (busy, control))
        rows.append(versus(f"{name} with long prompts", stirred, unit, "none", calm, limit))
    ttft = median([long_ttft(w) for w in busy])
    return [*rows, versus("long TTFT p50", ttft, "ms", "alone, local", alone_ms, at_most=1.2)]


def hop_rows(records: Sequence[dict[str, Any]]) -> list[Row]:
    """Median of each stage of the long requests."""
    remote = [r for r in records if r["path"] == "remote"]
    rows = [row("long prompts prefilled remotely", len(remote), f"of {len(records)}")]
    for stage in STAGES:
        if known := [t for r in remote if (t := r["timings_ms"].get(stage)) is not None]:
            rows.append(row(f"stage {stage}, p50", median(known), "ms"))
            rows.append(row(f"stage {stage}, max", max(known), "ms"))
    return rows


def burst_rows(bursts: Sequence[Sequence[float]]) -> list[Row]:
    name = f"{BURST} long prompts at once, TTFT"
    return [
        row(f"{name} of the first", median([burst[0] for burst in bursts]), "s"),
        row(f"{name}, mean", median([sum(burst) / BURST for burst in bursts]), "s"),
    ]


def copy_ms(nbytes: int, repeats: int = 15) -> float:
    """Milliseconds of one `memmove` over two files in /dev/shm, all pages touched before; the
    fastest. One thread, one run from end to end: nothing that moves blocks is faster."""
    with (
        tempfile.TemporaryFile(dir="/dev/shm") as one,
        tempfile.TemporaryFile(dir="/dev/shm") as two,
    ):
        one.truncate(nbytes)
        two.truncate(nbytes)
        with mmap.mmap(one.fileno(), nbytes) as source, mmap.mmap(two.fileno(), nbytes) as target:
            source.write(b"\1" * nbytes)
            target.write(b"\2" * nbytes)
            ends = [ctypes.c_char.from_buffer(memory) for memory in (target, source)]
            to, from_ = map(ctypes.addressof, ends)
            times = []
            for _ in range(repeats):
                begin = time.perf_counter()
                ctypes.memmove(to, from_, nbytes)
                times.append(time.perf_counter() - begin)
            ends.clear()  # or the mappings cannot be closed
            return 1e3 * min(times)


def length_rows(found: dict[int, list[Pair]], copy_ms: dict[int, float]) -> list[Row]:
    """Return the rows of remote minus local TTFT, and its parts.

    copy_ms: copying the KV of each length. The time of a local prompt includes the frontend's
    share, that of a prefill stage does not."""
    rows = []
    for length, pairs in found.items():
        at, limit = f"TTFT of {length}", HANDOFF_MS + copy_ms[length]
        less = [p.remote - p.local for p in pairs]
        low, high = percentile(less, 0.25), percentile(less, 0.75)
        unit = f"ms, half of {len(pairs)} pairs within {low:.3g} ... {high:.3g}"
        rows.append(row(f"{at}, local", median([p.local for p in pairs]), "ms"))
        rows.append(row(f"{at}, remote less local", median(less), unit, limit))
        parts = {
            "the way there and back": [p.hops for p in pairs],
            "the last token, and the frontend": [p.remote - p.prefill - p.hops for p in pairs],
            "its prefill stage less a local TTFT": [p.prefill - p.local for p in pairs],
        }
        rows += [row(f"{at}, of it {what}", median(of), "ms") for what, of in parts.items()]
    return rows


def print_threads(uses: Sequence[machine.ThreadUse], seconds: float) -> None:
    print(f"\nthreads in a window of {seconds:g} s with long prompts:")
    for use in uses[:24]:
        cpu, waited = (100 * value / seconds for value in (use.cpu_s, use.waited_s))
        print(
            f"  {use.process:<12} {use.thread:<24} {cpu:6.2f} % of a core, "
            f"waited for one {waited:5.2f} %, {use.wakes / seconds:7.1f} wakes/s"
        )


def run(options: argparse.Namespace, base: Path) -> tuple[list[Row], machine.OtherLoad]:
    quiet, rows = machine.OtherLoad(), list[Row]()
    pairs: dict[int, list[Pair]] = {}
    starts = min(options.starts, options.repeats)
    ends = [options.repeats * n // starts for n in range(starts + 1)]
    # Several clusters, because processes differ in the placement of their memory.
    for number, (first, end) in enumerate(pairwise(ends)):
        folder = base / str(number)
        folder.mkdir()
        with cluster("paths", "conditional", 1, 1, [*FLAGS, *options.flags], folder) as running:
            session = Session(running, number)
            session.streams(4.0, Longs())  # warms up
            with quiet.window(running.pids):
                if not number:
                    rows = _token_path(session, options)
                for length, some in measure_lengths(session, range(first, end)).items():
                    pairs.setdefault(length, []).extend(some)
    copies = {length: copy_ms(length * model.kv_bytes_per_token()) for length in LENGTHS}
    return rows + length_rows(pairs, copies), quiet


def _token_path(session: Session, options: argparse.Namespace) -> list[Row]:
    control, busy = list[Window](), list[Window]()
    for _ in range(options.rounds):
        control.append(session.streams(options.seconds, None))
        window, uses = session.watched(options.seconds)
        busy.append(window)
    for window in busy:
        explain(window, session.url)
    long = [w.explained[a.request_id] for w in busy for a in w.answers if a.ask.kind is Kind.LONG]
    bursts = [session.burst() for _ in range(2)]
    alone = [session.prompt(LONG_IN, "local")[0] for _ in range(options.repeats)]
    print_threads(uses, options.seconds)
    local = 1e3 * median([stats.ttft(answer) for answer in alone])
    return token_rows(control, busy, local) + hop_rows(long) + burst_rows(bursts)


def main() -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="windows of each kind")
    parser.add_argument("--seconds", type=float, default=12.0, help="length of a window")
    parser.add_argument("--repeats", type=int, default=12, help="prompts of each length and path")
    parser.add_argument("--starts", type=int, default=4, help="clusters that have them, in turn")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="more flags for `pullfill up`")
    title = "Token path and remote-prefill path, one decode and one prefill worker"
    return command.main("paths", title, parser.parse_args(), run)


if __name__ == "__main__":
    sys.exit(main())
