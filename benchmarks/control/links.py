"""Measures the control connections of n idle decode workers and n idle prefill workers.

Each worker is only its real `ControlServer` or `DecodeLinks`, over TCP. All of one size
share one process and one event loop, because 512 worker processes did not fit into memory. The
figures are shares of that process. The part `idle` measures whole workers.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from benchmarks import machine
from benchmarks.report import Row, row
from pullfill.config import STANDING_LINKS
from pullfill.prefill_worker.decode_links import LEAST, DecodeLinks
from pullfill.wire import Hello
from tests.support.control_rig import Decode, until
from tests.support.handoff_directory import FakeDirectory
from tests.support.transfer_rigs import COMPAT

START_S = 120.0


@dataclass(frozen=True, slots=True)
class Kept:
    """What all workers use together. cpu: share of one core."""

    connections: int
    fewest: int
    sockets: int
    tasks: int
    threads: int
    memory: int
    cpu: float


async def keep(workers: int, rest_s: float, idle_s: float) -> Kept:
    """Connect `workers` workers of each kind, let them idle, and measure."""
    directory: Any = FakeDirectory()
    gc.collect()
    before, memory = _sockets(), _memory()
    async with AsyncExitStack() as stack:
        decode = [Decode(name=f"decode-{n}") for n in range(workers)]
        names = [f"prefill-{n}" for n in range(workers)]
        for server in decode:
            await server.server.start("127.0.0.1")
            stack.push_async_callback(server.server.stop)
            directory.put(replace(server.record(), compat=COMPAT))
        for name in names:
            record = replace(decode[0].record(), instance_id=name, role="prefill", compat=COMPAT)
            directory.put(record)
        prefill = [_links(directory, name) for name in names]
        for links in prefill:
            stack.push_async_callback(links.close)
            links.start()
        wanted = sum(len(links.standing) for links in prefill)
        peers = [server.server.peers for server in decode]
        await until(lambda: sum(map(len, peers)) == wanted, START_S)
        await asyncio.sleep(rest_s)
        cpu = time.process_time()
        await asyncio.sleep(idle_s)
        return Kept(
            connections=sum(map(len, peers)),
            fewest=min(map(len, peers)),
            sockets=_sockets() - before,
            tasks=len(asyncio.all_tasks()),
            threads=threading.active_count(),
            memory=_memory() - memory,
            cpu=(time.process_time() - cpu) / idle_s,
        )


def _links(directory: Any, name: str) -> DecodeLinks:
    async def nothing(_: Any) -> Any:
        raise AssertionError("nothing is moved")

    hello = Hello(prefill_instance=name, compat=COMPAT.hash())
    return DecodeLinks(directory, hello, COMPAT, nothing, lambda *_: None, lambda *_: None)


def _sockets() -> int:
    return len(os.listdir("/proc/self/fd"))


def _memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(workers: int, rest_s: float, idle_s: float) -> Kept:
    """Run `keep` on an event loop of its own."""
    return asyncio.run(keep(workers, rest_s, idle_s))


def rows_of(workers: int, kept: Kept) -> list[Row]:
    """The table's rows. Figures are for one worker: the mean of decode and prefill workers."""
    at, each = f"{workers}+{workers} idle workers' control links", 2 * workers
    found = [
        row(
            f"{at}: connections for each pair of workers",
            kept.connections / workers,
            "",
            at_most=STANDING_LINKS + LEAST,
        ),
        row(
            f"{at}: fewest of one decode worker",
            kept.fewest,
            "",
            at_least=min(workers, STANDING_LINKS),
        ),
        row(f"{at}: sockets of one worker", kept.sockets / each, ""),
        row(f"{at}: asyncio tasks of one worker", kept.tasks / each, ""),
        row(f"{at}: threads of all", kept.threads, ""),
        row(f"{at}: memory of one worker", kept.memory / each / 1e3, "kB"),
        row(f"{at}: CPU of one worker", 100 * kept.cpu / each, "% of one core"),
    ]
    for one in found:
        print(f"  {one.metric:<72} {one.value:>10} {one.unit}", flush=True)
    return found


def run(sizes: Sequence[int], options: argparse.Namespace, quiet: machine.OtherLoad) -> list[Row]:
    """Measure all sizes, each in a process of its own."""
    found = list[Row]()
    for size in sizes:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context) as pool, quiet.window([os.getpid()]):
            # After this time unused links send Heartbeat less often (peer_link.py).
            kept = pool.submit(measure, size, 15.0, options.idle).result()
        found += rows_of(size, kept)
    return found
