"""What it saves to read a prefix from another decode worker: `make bench-fetch`.

A demo cluster has two decode workers, which get requests in turn, and no prefill worker. A
conversation is a prompt of 2,000 tokens, then a question. So the worker that gets the question has
not computed the prompt. Conversations come in pairs. In one, the worker reads the prefix from the
other worker (`router.min_fetch_tokens`). In the other, it computes the prefix again. The
conversation that comes first changes with each pair. The command writes results/fetch.md.
It exits with status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks import command, machine
from benchmarks.live import BenchError, Live, ask, demo_vocabulary, running, wait_for
from benchmarks.report import Row, median, row, versus

PREFIX, ANSWER = 2000, 16
QUESTION = 40
LEAST = 256
SETTLE_S = 0.5
"""Seconds within which settings and block events reach all processes."""
WITH, WITHOUT = "fetched", "computed"


@dataclass
class Seen:
    """Second turns of one kind, in order.

    ttft_ms: from the HTTP request to the first token.
    fetch_ms: the time of the fetch, which is a part of `ttft_ms`. 0: nothing was fetched.
    fetched, prefilled: prompt tokens that the worker has read, and has computed.
    held: prompt tokens of the first turn that the worker did not have. The other worker has them.
    """

    ttft_ms: list[float] = field(default_factory=list)
    fetch_ms: list[float] = field(default_factory=list)
    fetched: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    prefilled: list[int] = field(default_factory=list)


def note(seen: Seen, first: dict[str, Any], told: dict[str, Any]) -> None:
    """Note a second turn. Raises BenchError if it came to the worker of the first.

    first, told: explain records of both turns."""
    if told["decode_instance"] == first["decode_instance"]:
        raise BenchError("both turns of a conversation went to one worker")
    seen.ttft_ms.append(told["timings_ms"]["first_token"])
    seen.fetch_ms.append(told["timings_ms"]["fetch"] or 0.0)
    seen.fetched.append(told["fetched_tokens"])
    seen.held.append(first["prompt_tokens"] - told["prefix_hit_tokens"])
    seen.prefilled.append(
        told["prompt_tokens"] - told["prefix_hit_tokens"] - told["fetched_tokens"]
    )


def converse(live: Live, pairs: int) -> dict[str, Seen]:
    """Hold `pairs` conversations of each kind, one after the other."""
    rng, ids = random.Random(11), range(32, demo_vocabulary())
    seen = {WITH: Seen(), WITHOUT: Seen()}
    http = httpx.Client(base_url=live.url, timeout=120.0)
    for number in range(-1, pairs):  # the first pair warms up
        kinds = [WITH, WITHOUT] if number % 2 else [WITHOUT, WITH]
        for kind in kinds:
            live.configure(min_fetch_tokens=LEAST if kind == WITH else 0)
            time.sleep(SETTLE_S)
            prompt = [rng.choice(ids) for _ in range(PREFIX)]
            tokens, first = ask(http, prompt, ANSWER)
            time.sleep(SETTLE_S)
            asked = [*prompt, *tokens, *(rng.choice(ids) for _ in range(QUESTION))]
            _, told = ask(http, asked, ANSWER)
            if number >= 0:
                note(seen[kind], first, told)
        if number >= 0:
            print(f"pair {number + 1} of {pairs}: " + ", ".join(
                f"{kind} {seen[kind].ttft_ms[-1]:.0f} ms" for kind in (WITH, WITHOUT)
            ))  # fmt: skip
    return seen


def rows_of(seen: dict[str, Seen]) -> list[Row]:
    this, other = seen[WITH], seen[WITHOUT]
    ratios = [a / b for a, b in zip(this.ttft_ms, other.ttft_ms, strict=True)]
    return [
        versus("TTFT of moved turns, p50", median(this.ttft_ms), "ms", WITHOUT,
               median(other.ttft_ms), at_most=0.5),
        row("TTFT of moved turns, median of the pairs' ratios", median(ratios), "", at_most=0.5),
        row("fetched, of the prefix tokens that the other worker holds",
            sum(this.fetched) / sum(this.held), "", at_least=0.8),
        versus("prefilled tokens of moved turns", sum(this.prefilled), "tokens", WITHOUT,
               sum(other.prefilled)),
        row("fetch, p50: lease, copy, confirmation", median(this.fetch_ms), "ms"),
    ]  # fmt: skip


def run(options: argparse.Namespace, base: Path) -> tuple[list[Row], machine.OtherLoad]:
    quiet = machine.OtherLoad()
    quiet.look()
    with running(base / "state", "--decode", "2", "--prefill", "0") as live:
        live.configure(decode_policy="round_robin", policy="always_local")
        wait_for(lambda: len(live.workers("decode")) == 2, 30.0, "two decode workers")
        with quiet.window(live.pids()):
            seen = converse(live, options.pairs)
    return rows_of(seen), quiet


def main() -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=12, help="conversations of each kind")
    title = "Prompts that move between decode workers, with and without reading their prefix"
    return command.main("fetch", title, parser.parse_args(), run)


if __name__ == "__main__":
    sys.exit(main())
