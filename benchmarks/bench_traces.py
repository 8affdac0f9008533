"""What traces cost: `make bench-traces`.

Two demo clusters run at the same time, on the same cores. One has vLLM's `--otlp-traces-endpoint`,
and a receiver in this process takes its spans. The same client sends the same prompts to both in
turns, and all of them are prefilled remotely. The order changes from round to round. A round lasts
until the spans are sent. Compares the CPU time per request of the workers and the frontend: medians
over the rounds, without NATS, etcd and the receiver.
Writes results/traces.json and .md. Exit status 1 when tracing costs more than 2 %.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import command, machine
from benchmarks.live import BenchError, Live, demo_vocabulary, running
from benchmarks.report import Row, median, row, versus
from tests.support.otlp import Receiver

AT_MOST = 1.02
PEER = "without traces"
SEND_MS = 200
"""How often a process sends its spans. OpenTelemetry's default is 5 s."""
FLAGS = ("--set", "router.policy=always_remote")
WITHOUT_COUNTING = ("nats", "etcd")


async def load(url: str, prompts: list[list[int]], tokens: int) -> None:
    """Send all at once, and read the answers. Raises BenchError if one fails."""

    async def ask(session: aiohttp.ClientSession, prompt: list[int]) -> None:
        body: dict[str, Any] = {
            "model": "demo", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True,
            "temperature": 0.0,
        }  # fmt: skip
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise BenchError(f"{url}: {answer.status} {await answer.text()}")
            await answer.read()

    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.gather(*(ask(session, prompt) for prompt in prompts))


def counted(live: Live) -> list[int]:
    """The pids of the workers and the frontend."""
    return [pid for pid, name in live.pids().items() if name not in WITHOUT_COUNTING]


def measure(
    clusters: dict[str, Live], options: argparse.Namespace, quiet: machine.OtherLoad
) -> dict[str, list[float]]:
    """Milliseconds of CPU per request of each cluster, one value per round."""
    cost: dict[str, list[float]] = {name: [] for name in clusters}
    rng, vocabulary = random.Random(3), demo_vocabulary()
    every = [pid for live in clusters.values() for pid in live.pids()]
    for number in range(-1, options.rounds):  # the first one warms up
        prompts = [rng.choices(range(vocabulary), k=options.prompt) for _ in range(options.streams)]
        for name in rng.sample(list(clusters), len(clusters)):
            pids = counted(clusters[name])
            with quiet.window(every):
                before = machine.total_cpu_seconds(pids)
                asyncio.run(load(clusters[name].url, prompts, options.tokens))
                time.sleep(3 * SEND_MS / 1000)
                used = machine.total_cpu_seconds(pids) - before
            if number >= 0:
                cost[name].append(1000 * used / options.streams)
    for name, values in cost.items():
        print(f"{name:<15} " + " ".join(f"{value:.1f}" for value in values) + " ms/request")
    return cost


def rows_of(cost: dict[str, list[float]], spans: int, options: argparse.Namespace) -> list[Row]:
    """Medians against each other. spans: what the receiver has got.

    Raises BenchError if it got none: then nothing was compared."""
    requests = (options.rounds + 1) * options.streams
    if spans < requests:
        raise BenchError(f"{spans} spans came of {requests} requests: was tracing on?")
    ours, theirs = median(cost["with traces"]), median(cost[PEER])
    return [
        versus("CPU per request, with traces", ours, "ms", PEER, theirs, AT_MOST),
        row("spans per request", spans / requests, ""),
        row("prompt", options.prompt, "tokens"),
        row("answer", options.tokens, "tokens"),
    ]


def run(options: argparse.Namespace, base: Path) -> tuple[list[Row], machine.OtherLoad]:
    quiet = machine.OtherLoad()
    quiet.look()
    env = {"OTEL_BSP_SCHEDULE_DELAY": str(SEND_MS)}
    with ExitStack() as stack:
        receiver = stack.enter_context(Receiver())
        traced = ("--otlp-traces-endpoint", receiver.url)
        clusters = {
            PEER: stack.enter_context(running(base / "off", *FLAGS, env=env)),
            "with traces": stack.enter_context(running(base / "on", *FLAGS, *traced, env=env)),
        }
        cost = measure(clusters, options, quiet)
    return rows_of(cost, len(receiver.spans), options), quiet


def main() -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="loads per cluster")
    parser.add_argument("--streams", type=int, default=8, help="requests of a round, at once")
    parser.add_argument("--prompt", type=int, default=600, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of an answer")
    return command.main("traces", "What traces cost", parser.parse_args(), run)


if __name__ == "__main__":
    sys.exit(main())
