"""One request at a time: what it waits for and what it costs. A part of `bench_frontend`.

The same requests, in the same order, go to our frontend and to vLLM's API server in turn, a few at
a time; nothing else is asked meanwhile. Short prompts, prefilled locally. What is measured is the
time that the client sees, and the CPU of the HTTP process and of all processes for each request.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from benchmarks import machine
from benchmarks.live import BenchError
from benchmarks.report import Row, median, row, versus

ADDED_MS = 3.0
"""What one request may wait longer than at a plain vLLM server, at the median."""
GROUP = 10
SETTLE_S = 0.03
"""What a server does after an answer has ended belongs to it."""


class Server(Protocol):
    """pid: the HTTP process; pids: all processes that serve, or those that started them."""

    name: str
    url: str
    pid: int
    pids: list[int]


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of request."""

    tokens: int
    stream: bool

    def __str__(self) -> str:
        count = f"{self.tokens} token" + "s" * (self.tokens > 1)
        return count + (", streamed" if self.stream else "")


KINDS = (Kind(1, True), Kind(16, True), Kind(1, False), Kind(16, False))


@dataclass(slots=True)
class Taken:
    """Of one server and kind. first, whole: milliseconds of each request until the first bytes of
    its answer and until its end; http, all: milliseconds of CPU for a request, one per group."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    http: list[float] = field(default_factory=list)
    all: list[float] = field(default_factory=list)


def body_of(kind: Kind, text: str) -> dict[str, Any]:
    """A completion of exactly so many tokens."""
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": text,
        "max_tokens": kind.tokens,
        "ignore_eos": True,
        "temperature": 0.0,
    }
    if kind.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


async def ask(
    session: aiohttp.ClientSession, url: str, kind: Kind, text: str
) -> tuple[float, float]:
    """(first, whole) of one request, milliseconds. Raises BenchError: the answer is not whole."""
    first, answer = 0.0, bytearray()
    begin = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body_of(kind, text)) as response:
        async for chunk in response.content.iter_any():
            first = first or time.perf_counter() - begin
            answer += chunk
        whole = time.perf_counter() - begin
        if response.status != 200 or counted(kind, bytes(answer)) != kind.tokens:
            raise BenchError(f"{url}: {response.status}, not {kind}: {bytes(answer[-300:])!r}")
    return 1e3 * first, 1e3 * whole


def counted(kind: Kind, answer: bytes) -> int:
    """Tokens by the usage of a whole answer; -1 if it is cut short or an error."""
    if kind.stream:
        head, end, rest = answer.rstrip().rpartition(b"data: [DONE]")
        if not end or rest:
            return -1
        answer = head.rstrip().rpartition(b"data: ")[2]
    try:
        return int(json.loads(answer)["usage"]["completion_tokens"])
    except (ValueError, KeyError, TypeError):
        return -1


async def group_of(
    session: aiohttp.ClientSession, server: Server, kind: Kind, texts: Sequence[str], taken: Taken
) -> None:
    """One request after the other, with their CPU."""
    http, everything = machine.cpu_seconds(server.pid), machine.total_cpu_seconds(server.pids)
    for text in texts:
        first, whole = await ask(session, server.url, kind, text)
        taken.first.append(first)
        taken.whole.append(whole)
    await asyncio.sleep(SETTLE_S)
    taken.http.append(1e3 * (machine.cpu_seconds(server.pid) - http) / len(texts))
    used = machine.total_cpu_seconds(server.pids) - everything
    taken.all.append(1e3 * used / len(texts))


async def measure(
    servers: Sequence[Server],
    groups: int,
    text_of: Callable[[int], str],
    window: Callable[[], AbstractContextManager[None]],
) -> dict[Kind, dict[str, Taken]]:
    """Every kind at every server, `groups` times GROUP requests each. window: open while a group
    is measured."""
    found = {kind: {server.name: Taken() for server in servers} for kind in KINDS}
    rng, number = random.Random(11), 0
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for turn in range(-1, groups):  # the first one warms up
            for kind in KINDS:
                texts = [text_of(number + n) for n in range(GROUP)]
                number += GROUP
                for server in rng.sample(servers, len(servers)):
                    taken = found[kind][server.name] if turn >= 0 else Taken()
                    with window():
                        await group_of(session, server, kind, texts, taken)
    return found


def rows_of(kind: Kind, taken: dict[str, Taken], ours: str, peer: str) -> list[Row]:
    """Medians of one kind against each other."""
    mine, theirs = taken[ours], taken[peer]
    rows = []
    if kind.stream:
        for what, a, b in (
            ("first token", mine.first, theirs.first),
            ("whole answer", mine.whole, theirs.whole),
        ):
            rows.append(versus(f"{what} of {kind}, p50", median(a), "ms", peer, median(b)))
            added = median(a) - median(b)
            rows.append(row(f"added to the {what} of {kind}, p50", added, "ms", ADDED_MS))
    for what, a, b in (
        ("the HTTP process", mine.http, theirs.http),
        ("all processes, engine and all,", mine.all, theirs.all),
    ):
        metric = f"CPU of {what} for a request of {kind}"
        rows.append(versus(metric, median(a), "ms", peer, median(b)))
    return rows
