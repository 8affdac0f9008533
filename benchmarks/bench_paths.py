"""Where the time goes on the token path and the remote-prefill path: `make bench-paths`.

One decode and one prefill worker with a 24M-parameter model, each on a core of its own, started as
a user does. Four short streams run without a pause; in the *interfered* windows a long prompt comes
every two seconds as well, in the *control* windows none. Printed:
  tokens   ITL of the short streams in both, tokens/s, TTFT of the long prompts
  threads  CPU of every thread in an interfered window, and how long it waited for a core
  hops     the stages of the long requests (`pullfill explain`)
  lengths  TTFT of one prompt on an idle cluster, remote less local, by its length; several
           clusters, one after the other, have a part of them each
  bursts   TTFT of long prompts that come at once
Writes results/paths.json and .md. Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from benchmarks import command, machine
from benchmarks.live import BenchError, Live, running, wait_for
from benchmarks.report import Row, median, percentile, row, versus
from benchmarks.serving import model
from benchmarks.serving.bandwidth import copy_rate
from benchmarks.serving.model import DTYPE, NAME
from benchmarks.serving.systems_pullfill import set_policy
from benchmarks.serving.verdict import difference

FLAGS = (
    f"--served-model-name={NAME}",
    f"--dtype={DTYPE}",
    "--max-model-len=8192",
    f"--kv-cache-memory-bytes={512 << 20}",
)
STREAMS, STREAM_IN, STREAM_OUT = 4, 32, 64
LONG, LONG_OUT, LONG_EVERY_S = 3000, 4, 2.0
BURST = 3
LENGTHS = (256, 512, 1024, 2048, 4096)
HOPS = ("queue", "claim", "tail", "commit")
"""Stages that only a remote prompt has, besides the computation."""
STAGES = ("route", "queue", "claim", "prefix_read", "prefill", "kv_write", "tail", "commit")


@dataclass(slots=True)
class Heard:
    """What came of one request. at: when each chunk came, from the sending, seconds."""

    request_id: str = ""
    sent: float = 0.0
    at: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.at[0] - self.sent


@dataclass(slots=True)
class Window:
    """One window of load. short: streams that began in it; long: prompts that were sent in it."""

    seconds: float
    short: list[Heard] = field(default_factory=list)
    long: list[Heard] = field(default_factory=list)
    threads: list[machine.ThreadUse] = field(default_factory=list)

    @property
    def gaps_ms(self) -> list[float]:
        return [1e3 * (b - a) for heard in self.short for a, b in pairwise(heard.at)]

    @property
    def tokens_per_s(self) -> float:
        began = min(heard.sent for heard in self.short)
        last = began + self.seconds
        return sum(at <= last for h in self.short + self.long for at in h.at) / self.seconds


class Client:
    """One connection to the frontend: asks, and hears every chunk at the time it came."""

    def __init__(self, live: Live, seed: int) -> None:
        url = httpx.URL(live.url)
        self._http = http.client.HTTPConnection(url.host, url.port or 80, timeout=120.0)
        self._random = random.Random(seed)

    def ask(self, tokens: int, answer: int) -> Heard:
        """A fresh random prompt. Blocks until the answer is over."""
        return self.send(self._random.choices(model.plain_tokens(), k=tokens), answer)

    def send(self, prompt: list[int], answer: int) -> Heard:
        """Ask for so many tokens after the prompt. Blocks until the answer is over."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": answer}
        body |= {"stream": True, "ignore_eos": True, "temperature": 0.0}
        heard = Heard()
        encoded = json.dumps(body)
        heard.sent = time.monotonic()
        self._http.request("POST", "/v1/completions", encoded, {"content-type": "application/json"})
        answered = self._http.getresponse()
        while line := answered.readline():
            if line.startswith(b"data: {"):
                heard.at.append(time.monotonic())
                if not heard.request_id:
                    heard.request_id = json.loads(line[6:])["id"]
        return heard

    def close(self) -> None:
        self._http.close()


def run_window(live: Live, seconds: float, *, long: bool, seed: int, watch: bool = False) -> Window:
    """Four streams for so long, with long prompts or without; ends when all answers are over.
    watch: also what each thread does meanwhile."""
    window = Window(seconds)
    clients = [Client(live, seed * 100 + lane) for lane in range(STREAMS + 1)]
    begin = time.monotonic()

    def stream(client: Client) -> None:
        while time.monotonic() < begin + seconds:
            window.short.append(client.ask(STREAM_IN, STREAM_OUT))

    def prompts(client: Client) -> None:
        due = begin + LONG_EVERY_S / 2
        while due < begin + seconds:
            time.sleep(max(0.0, due - time.monotonic()))
            window.long.append(client.ask(LONG, LONG_OUT))
            due += LONG_EVERY_S

    work = [threading.Thread(target=stream, args=[c]) for c in clients[:STREAMS]]
    if long:
        work.append(threading.Thread(target=prompts, args=[clients[STREAMS]]))
    for thread in work:
        thread.start()
    if watch:
        names = {**live.pids(), os.getpid(): "load"}
        window.threads = machine.thread_use(names, seconds)
    for thread in work:
        thread.join()
    for client in clients:
        client.close()
    return window


def explained(live: Live, heard: Heard) -> dict[str, Any]:
    found: dict[str, Any] = wait_for(
        lambda: live.get(f"/pullfill/requests/{heard.request_id}"), 5.0, "a record of the request"
    )
    return found


def served(live: Live, heard: Heard, path: str) -> dict[str, Any]:
    """Return the record of a request. Raises BenchError if it did not take this path."""
    record = explained(live, heard)
    if record["path"] != path:
        raise BenchError(f"a {path} prefill was wanted, it was {record['path']}: {record}")
    return record


@dataclass(slots=True)
class Pair:
    """TTFT in ms of a local and a remote prompt, measured one after the other.

    prefill: the `prefill` stage of the remote prompt. hops: its HOPS."""

    local: float
    remote: float
    prefill: float
    hops: float


def measure_lengths(live: Live, turns: Sequence[int]) -> dict[int, list[Pair]]:
    """By length, one request at a time. Both of a pair within seconds, and each first in turn: from
    minute to minute the same prompt differs by more than the handoff takes."""
    client = Client(live, 77 + turns[0])
    found: dict[int, list[Pair]] = {}
    for number in turns:
        for length in LENGTHS:
            heard: dict[str, Heard] = {}
            for path in ("local", "remote")[:: 1 if number % 2 else -1]:
                set_policy(live, f"always_{path}")
                client.ask(LENGTHS[0], 2)
                heard[path] = client.ask(length, 2)
            served(live, heard["local"], "local")
            stages = served(live, heard["remote"], "remote")["timings_ms"]
            pair = Pair(
                1e3 * heard["local"].ttft, 1e3 * heard["remote"].ttft, stages["prefill"],
                sum(stages[hop] for hop in HOPS),
            )  # fmt: skip
            found.setdefault(length, []).append(pair)
    client.close()
    set_policy(live, "conditional")
    return found


def measure_bursts(live: Live, repeats: int) -> list[list[float]]:
    """TTFT in s of `BURST` long prompts sent at once, in the order of their ends."""
    clients = [Client(live, 500 + lane) for lane in range(BURST)]
    bursts = []
    for _ in range(repeats):
        with ThreadPoolExecutor(BURST) as pool:
            heard = list(pool.map(lambda client: client.ask(LONG, 2), clients))
        bursts.append(sorted(h.ttft for h in heard))
        for client in clients:
            client.close()  # the server may have closed it: the first has waited for the last
    return bursts


def burst_rows(bursts: Sequence[Sequence[float]]) -> list[Row]:
    name = f"{BURST} long prompts at once, TTFT"
    return [
        row(f"{name} of the first", median([burst[0] for burst in bursts]), "s"),
        row(f"{name}, mean", median([sum(burst) / BURST for burst in bursts]), "s"),
    ]


def token_rows(control: Sequence[Window], busy: Sequence[Window], alone_ms: float) -> list[Row]:
    """ITL, throughput and TTFT of the long prompts, held against the targets."""
    calm = [gap for window in control for gap in window.gaps_ms]
    stirred = [gap for window in busy for gap in window.gaps_ms]
    rows = []
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
        limit = 1.5 if name == "p99" else None
        pair = percentile(stirred, share), percentile(calm, share)
        rows.append(versus(f"ITL {name} with long prompts", pair[0], "ms", "none", pair[1], limit))
    rows.append(
        versus(
            "tokens/s with long prompts",
            median([w.tokens_per_s for w in busy]),
            "tokens/s",
            "none",
            median([w.tokens_per_s for w in control]),
        )
    )
    ttft = [1e3 * heard.ttft for window in busy for heard in window.long]
    rows.append(versus("long TTFT p50", median(ttft), "ms", "alone, local", alone_ms, at_most=1.2))
    rows.append(row("long TTFT max", max(ttft), "ms"))
    return rows


def hop_rows(live: Live, heard: Sequence[Heard]) -> list[Row]:
    """Median of each stage of the long requests."""
    records = [explained(live, h) for h in heard]
    remote = [r for r in records if r["path"] == "remote"]
    rows = [row("long prompts prefilled remotely", len(remote), f"of {len(records)}")]
    for stage in STAGES:
        took = [r["timings_ms"].get(stage) for r in remote]
        known = [t for t in took if t is not None]
        if known:
            rows.append(row(f"stage {stage}, p50", median(known), "ms"))
            rows.append(row(f"stage {stage}, max", max(known), "ms"))
    return rows


def copies() -> dict[int, float]:
    """Measure how long this machine copies the KV of each length from one shared memory to another.

    Returns ms by number of bytes."""
    sizes = [length * model.kv_bytes_per_token() for length in LENGTHS]
    return {size: 1e3 * size / copy_rate(size) for size in sizes}


def length_rows(found: dict[int, list[Pair]], copy_ms: dict[int, float]) -> list[Row]:
    """Return the rows of remote minus local TTFT, and its parts.

    The target allows 15 ms plus the copying of the KV bytes. The time of a local prompt includes
    the frontend's share, that of a prefill stage does not."""
    rows = []
    for length, pairs in found.items():
        at, limit = f"TTFT of {length}", 15.0 + copy_ms[length * model.kv_bytes_per_token()]
        far, near = [p.remote for p in pairs], [p.local for p in pairs]
        rows.append(row(f"{at}, local", median(near), "ms"))
        rows.append(difference(f"{at}, remote less local", far, near, limit))
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


@contextmanager
def cluster(base: Path, flags: Sequence[str]) -> Iterator[Live]:
    """One decode and one prefill worker, warm."""
    directory = str(model.model_directory())
    with running(base / "cluster", "--model", directory, *FLAGS, *flags) as live:
        wait_for(live.linked, 60.0, "the prefill worker pulls")
        for seed in (1, 2):
            run_window(live, 4.0, long=True, seed=seed)
        yield live


def run(options: argparse.Namespace, base: Path) -> tuple[list[Row], machine.OtherLoad]:
    quiet = machine.OtherLoad()
    control: list[Window] = []
    busy: list[Window] = []
    with cluster(base, options.flags) as live:
        print(f"ready after {live.ready_s:.1f} s")
        with quiet.window(live.pids()):
            for number in range(options.rounds):
                for long, windows in ((False, control), (True, busy)):
                    watch = long and number == 0
                    windows.append(
                        run_window(live, options.seconds, long=long, seed=10 + number, watch=watch)
                    )
            hops = hop_rows(live, [heard for window in busy for heard in window.long])
            bursts = measure_bursts(live, 2)
            set_policy(live, "always_local")
            alone = Client(live, 99)
            longs = [alone.ask(LONG, LONG_OUT) for _ in range(options.repeats)]
            local = median([1e3 * heard.ttft for heard in longs])
            served(live, longs[0], "local")
            served(live, longs[-1], "local")
            alone.close()
            starts = min(options.starts, options.repeats)
            ends = [options.repeats * n // starts for n in range(starts + 1)]
            turns = [range(first, end) for first, end in pairwise(ends)]
            pairs = measure_lengths(live, turns[0])
    for number, some in enumerate(turns[1:], 1):
        # Several clusters, because processes differ in the placement of their memory.
        with (
            cluster(base / f"again-{number}", options.flags) as live,
            quiet.window(live.pids()),
        ):
            for length, more in measure_lengths(live, some).items():
                pairs[length] += more
    print_threads(busy[0].threads, options.seconds)
    rows = token_rows(control, busy, local) + hops + burst_rows(bursts)
    return rows + length_rows(pairs, copies()), quiet


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
