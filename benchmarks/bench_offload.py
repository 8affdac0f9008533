"""What KV offloading saves when conversations outgrow the KV cache: `make bench-offload`.

Two demo clusters, one with `--kv-offloading-size`, hold the same conversations. The conversations
have more tokens than a KV cache holds, so the KV of each is evicted before its next turn. Each turn
is sent to both clusters, one after the other. The cluster that comes first changes with each turn.
The command writes results/offload.json and .md. It exits with status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks import command, machine
from benchmarks.live import Live, demo_vocabulary, running, wait_for
from benchmarks.report import Row, median, row, versus

KV_MIB = 24
"""Size of each worker's KV cache. It holds 6144 tokens of the demo model."""
OFFLOADED_GIB = 0.25
TURN = 400
"""Tokens that a user adds in each turn."""
ANSWER = 16
WITH, WITHOUT = "with offloading", "without"


@dataclass
class Turns:
    """What one cluster did. A list has an entry for each later turn, in order.

    ttft_ms: from the HTTP request to the first token. first_ms: the same of first turns.
    prefilled: tokens that some worker computed. offloaded: tokens that were loaded.
    equal: answers that equal those of the other cluster. Rounding may change one."""

    ttft_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    prefilled: list[int] = field(default_factory=list)
    offloaded: list[int] = field(default_factory=list)
    equal: int = 0


def ask(http: httpx.Client, prompt: list[int]) -> tuple[list[int], dict[str, Any]]:
    """Return the answer's tokens, and the explain record."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True,
            "temperature": 0, "return_token_ids": True}  # fmt: skip
    answer = http.post("/v1/completions", json=body).raise_for_status().json()
    told: dict[str, Any] = wait_for(
        lambda: http.get(f"/pullfill/requests/{answer['id']}").raise_for_status().json(),
        5.0, "a record of the request", 0.02,
    )  # fmt: skip
    return answer["choices"][0]["token_ids"], told


def note(turns: Turns, told: dict[str, Any], *, first: bool) -> None:
    took = told["timings_ms"]["first_token"]
    if first:
        turns.first_ms.append(took)
        return
    turns.ttft_ms.append(took)
    turns.prefilled.append(told["prompt_tokens"] - told["prefix_hit_tokens"])
    turns.offloaded.append(told["offloaded_tokens"])


def converse(lives: dict[str, Live], talks: int, turns: int) -> dict[str, Turns]:
    """Hold all conversations, one turn of each after the other."""
    rng, ids = random.Random(7), range(32, demo_vocabulary())
    made = {name: Turns() for name in lives}
    histories: list[list[int]] = [[] for _ in range(talks)]
    clients = {name: httpx.Client(base_url=live.url, timeout=120.0) for name, live in lives.items()}
    for http in clients.values():
        ask(http, [rng.choice(ids) for _ in range(TURN)])  # warms up
    for turn in range(turns):
        for number, history in enumerate(histories):
            history += [rng.choice(ids) for _ in range(TURN)]
            order = list(clients.items())
            answers = []
            for name, http in order if (turn + number) % 2 else reversed(order):
                tokens, told = ask(http, history)
                note(made[name], told, first=turn == 0)
                answers.append(tokens)
            made[WITH].equal += answers[0] == answers[1]
            history += answers[0]
        print(f"turn {turn + 1} of {turns}: {talks} conversations")
    return made


def rows_of(made: dict[str, Turns], talks: int, turns: int) -> list[Row]:
    this, other = made[WITH], made[WITHOUT]
    pairs = [a / b for a, b in zip(this.ttft_ms, other.ttft_ms, strict=True)]
    firsts = [a / b for a, b in zip(this.first_ms, other.first_ms, strict=True)]
    tokens = talks * (turns * (TURN + ANSWER))
    return [
        row("tokens of all conversations at their end", tokens, f"cache: {KV_MIB * 256}"),
        versus("prefilled tokens, later turns", sum(this.prefilled), "tokens", WITHOUT,
               sum(other.prefilled), at_most=0.75),
        row("equal answers", this.equal, f"of {talks * turns}", at_least=0.95 * talks * turns),
        row("loaded tokens, later turns", sum(this.offloaded), "tokens", at_least=1),
        versus("TTFT of later turns, p50", median(this.ttft_ms), "ms", WITHOUT,
               median(other.ttft_ms), at_most=1.0),
        row("TTFT of later turns, median of the pairs' ratios", median(pairs), "", at_most=1.0),
        versus("TTFT of first turns, p50", median(this.first_ms), "ms", WITHOUT,
               median(other.first_ms)),
        row("TTFT of first turns, median of the pairs' ratios", median(firsts), ""),
    ]  # fmt: skip


def run(options: argparse.Namespace, base: Path) -> tuple[list[Row], machine.OtherLoad]:
    quiet, cache = machine.OtherLoad(), f"--kv-cache-memory-bytes={KV_MIB << 20}"
    quiet.look()
    offloading = f"--kv-offloading-size={OFFLOADED_GIB}"
    with (
        running(base / "with", cache, offloading) as this,
        running(base / "without", cache) as other,
    ):
        with quiet.window(this.pids() | other.pids()):
            made = converse({WITH: this, WITHOUT: other}, options.talks, options.turns)
    return rows_of(made, options.talks, options.turns), quiet


def main() -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--talks", type=int, default=8, help="conversations")
    parser.add_argument("--turns", type=int, default=5, help="turns of each")
    title = "Conversations that outgrow the KV cache, with and without vLLM's KV offloading"
    return command.main("offload", title, parser.parse_args(), run)


if __name__ == "__main__":
    sys.exit(main())
