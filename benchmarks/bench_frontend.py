"""Compares our frontend with vLLM's own API server: `make bench-frontend`.

Both run at the same time, each with an engine of its own: same model, same flags, same core for the
engine, same cores for the HTTP process, one compute thread. The same client sends the same load to
both in turns. The order changes from round to round.
  streams   many at once: CPU time per token of the HTTP process, without the engine
  requests  one at a time: latency, and CPU time per request (bench_frontend_requests)
Medians over the rounds. Writes results/frontend.json and .md. Exit status 1 when a target is
missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import bench_frontend_requests as requests
from benchmarks import command, machine
from benchmarks.live import BenchError, demo_flags, running
from benchmarks.report import Row, median, row, versus
from benchmarks.serving.systems_vllm import Cores, api_server
from pullfill.deploy import plan

PEER = "vLLM API server"
TARGET = 1.0
# Our frontend's default; the same work for both.
SAME_FLAGS = ("--enable-prompt-tokens-details",)
TEXT = "The quick brown fox jumps over the lazy dog, and number {} follows it home. "


@dataclass(slots=True)
class Server:
    """One HTTP process. `pid` is its own; `engine` that of its engine; `pids`: of all processes
    that serve, or of those that started them."""

    name: str
    url: str
    pid: int
    engine: int
    pids: list[int]


@contextmanager
def our_server(base: Path) -> Iterator[Server]:
    """A frontend over one decode worker."""
    with running(base / "cluster", "--prefill", "0", *SAME_FLAGS) as live:
        pids = list(live.pids())
        yield Server("pullfill", live.url, live.pid("frontend"), live.pid("decode"), pids)


@contextmanager
def vllm_server(base: Path, core: set[int], http: set[int]) -> Iterator[Server]:
    """vLLM's API server on the cores `http`, its engine core in another process on `core`."""
    cores = Cores(engine=tuple(sorted(core)), api=tuple(sorted(http)))
    flags = [*demo_flags(), *SAME_FLAGS]
    with api_server("vllm", plan.demo_directory(), base, flags, cores) as server:
        yield Server(PEER, server.url, server.pid, server.engine(), [server.pid])


def request_of(kind: str, stream: int, tokens: int) -> tuple[str, dict[str, Any]]:
    """(path, body) of one stream. Short prompts: it is streaming that is measured."""
    text = TEXT.format(stream)
    body: dict[str, Any] = {
        "model": "demo",
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if kind == "chat":
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}
    return "/v1/completions", {**body, "prompt": text}


async def load(url: str, kind: str, streams: int, tokens: int) -> int:
    """Run the streams at once and read them to their ends. Returns the tokens that came.

    Raises BenchError when a stream ended early.
    """
    timeout = aiohttp.ClientTimeout(total=300)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        counts = await asyncio.gather(
            *(_stream(session, url, *request_of(kind, n, tokens)) for n in range(streams))
        )
    if set(counts) != {tokens}:
        raise BenchError(f"{url}: streams of {sorted(set(counts))} tokens instead of {tokens}")
    return sum(counts)


async def _stream(session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]) -> int:
    tail = b""
    async with session.post(url + path, json=body) as answer:
        if answer.status != 200:
            raise BenchError(f"{url}{path}: {answer.status} {await answer.text()}")
        async for chunk in answer.content.iter_any():
            tail = (tail + chunk)[-2000:]
    return tokens_of(tail)


def tokens_of(tail: bytes) -> int:
    """Completion tokens by the usage in the last event of a stream."""
    if not tail.rstrip().endswith(b"data: [DONE]"):
        raise BenchError(f"a stream ended early: {tail[-300:]!r}")
    digits = tail.rpartition(b'"completion_tokens":')[2].lstrip()
    return int(digits[: len(digits) - len(digits.lstrip(b"0123456789"))] or b"0")


def measure(
    servers: list[Server], kind: str, options: argparse.Namespace, quiet: machine.OtherLoad
) -> dict[str, list[float]]:
    """Microseconds of CPU per token of each server's HTTP process, one value per round."""
    cost: dict[str, list[float]] = {server.name: [] for server in servers}
    rng = random.Random(3)
    pids = [pid for server in servers for pid in server.pids]
    for number in range(-1, options.rounds):  # the first one warms up
        order = rng.sample(servers, len(servers))
        for server in order:
            with quiet.window(pids):
                before = machine.cpu_seconds(server.pid)
                tokens = asyncio.run(load(server.url, kind, options.streams, options.tokens))
                used = machine.cpu_seconds(server.pid) - before
            if number >= 0:
                cost[server.name].append(1e6 * used / tokens)
    for name, values in cost.items():
        print(f"{kind:<11} {name:<16} " + " ".join(f"{v:.1f}" for v in values) + " us/token")
    return cost


def rows_of(kind: str, cost: dict[str, list[float]]) -> Row:
    """Medians against each other."""
    ours, theirs = median(cost["pullfill"]), median(cost[PEER])
    return versus(f"CPU per streamed token, {kind}", ours, "us", PEER, theirs, TARGET)


def one_by_one(servers: list[Server], groups: int, quiet: machine.OtherLoad) -> list[Row]:
    """The rows of `bench_frontend_requests`."""
    pids = [pid for server in servers for pid in server.pids]
    taken = asyncio.run(requests.measure(servers, groups, TEXT.format, lambda: quiet.window(pids)))
    return [
        found
        for kind, by_server in taken.items()
        for found in requests.rows_of(kind, by_server, "pullfill", PEER)
    ]


def run(options: argparse.Namespace, base: Path) -> tuple[list[Row], machine.OtherLoad]:
    quiet = machine.OtherLoad()
    quiet.look()
    with ExitStack() as stack:
        ours = stack.enter_context(our_server(base))
        core = os.sched_getaffinity(ours.engine)
        http = os.sched_getaffinity(ours.pid)
        theirs = stack.enter_context(vllm_server(base, core, http))
        rows = [
            rows_of(kind, measure([ours, theirs], kind, options, quiet))
            for kind in ("completions", "chat")
        ]
        rows += one_by_one([ours, theirs], options.groups, quiet)
        memory = [machine.memory(server.pid).rss / 1e9 for server in (ours, theirs)]
        rows.append(versus("memory of the HTTP process, RSS", memory[0], "GB", PEER, memory[1]))
        rows.append(row("streams at once", options.streams, ""))
        rows.append(row("tokens per stream", options.tokens, ""))
    return rows, quiet


def main() -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="loads per server and endpoint")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument(
        "--groups",
        type=int,
        default=6,
        help=f"groups of {requests.GROUP} requests per server and kind",
    )
    title = "The frontend against vLLM's API server"
    return command.main("frontend", title, parser.parse_args(), run)


if __name__ == "__main__":
    sys.exit(main())
