"""Prompts that come at once, with a prefill budget or one in each step: `make bench-concurrency`.

Two modes are compared: a prefill worker with its usual prefill budget, and one that is started with
`--concurrency 1`. Each mode has a cluster of its own, with a model of 24M parameters. The decode
worker has one core, and the prefill worker the other. The modes take turns.

Prompts are sent in bursts, and all of them are prefilled remotely. There are three kinds of bursts:
  short   a prompt fills only a part of a step, which has 1024 tokens
  long    a prompt needs several steps
  hits    as long, but the decode worker has half of each prompt in its cache
For each kind three times to first token are printed: that of the first answer of a burst, that of
the last one, and the mean. The mode with the budget is the peer.
Writes results/concurrency.json and .md.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks import command, machine
from benchmarks.bench_paths import FLAGS, Client
from benchmarks.live import BenchError, Live, running, wait_for
from benchmarks.report import Row, median, versus
from benchmarks.serving import model
from benchmarks.serving.systems_pullfill import set_policy

MODES: dict[str, tuple[str, ...]] = {"budget": (), "one": ("--concurrency", "1")}


@dataclass(frozen=True, slots=True)
class Burst:
    """Prompts that are sent at once.

    prompts: their number. tokens: length of each. hit: how many of these tokens are cached."""

    prompts: int
    tokens: int
    hit: int = 0


BURSTS = {"short": Burst(8, 300), "long": Burst(4, 2600), "hits": Burst(4, 2600, 1280)}


def prompts_of(burst: Burst, seed: int) -> Iterator[list[int]]:
    """Yield the prompts of a burst. No two prompts begin alike, in this or in any other burst."""
    rng = random.Random(f"{burst}/{seed}")
    for _ in range(burst.prompts):
        yield rng.choices(model.plain_tokens(), k=burst.tokens)


def measure_burst(live: Live, burst: Burst, seed: int) -> list[float]:
    """Return the times to first token of one burst, in seconds, the shortest first."""
    prompts = list(prompts_of(burst, seed))
    clients = [Client(live, seed + lane) for lane in range(burst.prompts)]
    if burst.hit:
        set_policy(live, "always_local")
        for prompt in prompts:
            clients[0].send(prompt[: burst.hit], 1)
        set_policy(live, "always_remote")
    with ThreadPoolExecutor(burst.prompts) as pool:
        sent = [
            pool.submit(client.send, prompt, 1)
            for client, prompt in zip(clients, prompts, strict=True)
        ]
        heard = [future.result() for future in sent]
    for client, one in zip(clients, heard, strict=True):
        client.close()
        path = live.get(f"/pullfill/requests/{one.request_id}")["path"]
        if path != "remote":
            raise BenchError(f"a prompt of {burst.tokens} tokens took the path {path}")
    return sorted(one.ttft for one in heard)


Found = dict[tuple[str, str], list[list[float]]]
"""Maps a mode and a kind of burst to the times to first token of each burst."""


def rows_of(found: Found) -> list[Row]:
    """Return a row for the first, the mean and the last of each kind of burst."""
    rows = []
    for kind, burst in BURSTS.items():
        name = f"{kind}: {burst.prompts} prompts of {burst.tokens} tokens"
        for which, pick in (
            ("of the first", lambda ttfts: ttfts[0]),
            ("mean", lambda ttfts: sum(ttfts) / len(ttfts)),
            ("of the last", lambda ttfts: ttfts[-1]),
        ):
            one, budget = (
                median([pick(ttfts) for ttfts in found[mode, kind]]) for mode in ("one", "budget")
            )
            rows.append(versus(f"{name}, TTFT {which}", one, "s", "budget", budget))
    return rows


def run(options: argparse.Namespace, base: Path) -> tuple[list[Row], machine.OtherLoad]:
    quiet, found = machine.OtherLoad(), Found()
    directory = str(model.model_directory())
    for turn in range(options.rounds):
        for mode in list(MODES)[:: 1 if turn % 2 else -1]:
            place = base / f"{mode}-{turn}"
            with running(place, "--model", directory, *FLAGS, *MODES[mode]) as live:
                wait_for(live.linked, 60.0, "the prefill worker pulls")
                set_policy(live, "always_remote")
                for kind, burst in BURSTS.items():
                    measure_burst(live, burst, 1000 * turn + 7)  # steps of these sizes, once
                    with quiet.window(live.pids()):
                        for number in range(options.repeats):
                            seed = 1000 * turn + 100 * number + 50
                            ttfts = measure_burst(live, burst, seed)
                            found.setdefault((mode, kind), []).append(ttfts)
    return rows_of(found), quiet


def main() -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="clusters of each mode")
    parser.add_argument("--repeats", type=int, default=5, help="bursts of each kind in a cluster")
    title = "Prompts that come at once: one in each step, beside a prefill budget"
    return command.main("concurrency", title, parser.parse_args(), run)


if __name__ == "__main__":
    sys.exit(main())
