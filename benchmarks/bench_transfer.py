"""KV block transfers against their physical limits: `make bench-transfer`.

  copies   shm writes against a loop of memmove and one memcpy; the fence; plans
  tcp      tcp writes into another process against a raw sendmsg/recv_into pair

The ways of a row move the same bytes between the same memories, interleaved. A ratio compares two
medians of one run. The raw pair has no plan, no fence and no scattered target. Writes
results/transfer.md. Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import command
from benchmarks.machine import OtherLoad
from benchmarks.report import Row, row, versus
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.runs import Planner
from pullfill.transfer.session import MappedSession
from pullfill.transfer.shm.fence import ShmHold
from pullfill.transfer.stream.stream_peer import StreamTransport
from pullfill.transfer.stream.tcp_backend import TcpKind
from pullfill.wire import FenceToken, RegionDescriptor, decode, encode
from tests.support.transfer_rigs import (
    Local,
    Region,
    Rig,
    extent,
    memory_over,
    random_bytes,
    shm_rig,
    tcp_rig,
)

LAYERS = 4
PARTS = ("copies", "tcp")
_PIECE = 4 << 20
_VIEWS = 512  # of one sendmsg; the kernel takes 1024


@dataclass(frozen=True)
class Sizes:
    """moved: bytes per write. pages: run sizes, one head and layer of a block each."""

    moved: int = 64 << 20
    pages: tuple[int, ...] = (16 << 10, 64 << 10, 256 << 10, 1 << 20)


@dataclass(frozen=True)
class Case:
    """One run size. Scattered ones are drawn from a region twice as large as what is moved. The
    others fill theirs but for a block, so that one memcpy copies the same pages: which ones it
    meets makes a tenth of its speed."""

    name: str
    page: int
    source: list[int]
    target: list[int]
    blocks: int

    @property
    def contiguous(self) -> bool:
        return self.name.endswith("contiguous")


def cases(sizes: Sizes) -> Iterator[Case]:
    """Scattered runs of every size, contiguous ones of the smallest and the largest."""
    rng = np.random.default_rng(1)
    for page in sizes.pages:
        count = sizes.moved // page // LAYERS
        blocks = 2 * count
        source, target = (rng.permutation(blocks)[:count].tolist() for _ in range(2))
        yield Case(f"{page >> 10} KiB scattered", page, source, target, blocks)
        if page in (sizes.pages[0], sizes.pages[-1]):
            run = list(range(count))
            yield Case(f"{page >> 10} KiB contiguous", page, run, [b + 1 for b in run], count + 1)


def interleaved(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each way."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    order, rng = list(ways.items()), random.Random(1)
    for _ in range(rounds):
        rng.shuffle(order)  # who comes after whom matters: the second finds the bytes in the cache
        for name, way in order:
            started = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def pairs_of(case: Case) -> list[tuple[int, int]]:
    """Offsets of every run in the source and in the target."""
    layout = dense_layout(LAYERS, case.blocks, 1, case.page)
    return [
        (s * layout.block_stride + shift, t * layout.block_stride + shift)
        for shift in range(0, LAYERS * layout.layer_stride, layout.layer_stride)
        for s, t in zip(case.source, case.target, strict=True)
    ]


def write_rows(rig: Rig, sizes: Sizes, rounds: int) -> list[Row]:
    """GB/s of each case, with the ratios to a loop of memmove over its runs, and to one memcpy."""
    rows = []
    for case in cases(sizes):
        layout = dense_layout(LAYERS, case.blocks, 1, case.page)
        region, local = rig.region(layout, instance_id="bench"), rig.local(layout)
        pairs, page = pairs_of(case), case.page
        source, target = local.memory.address, region.memory.address
        session = rig.connect(local, region)
        token = region.owner.fences.open(range(layout.num_blocks))

        def loop() -> None:
            for s, t in pairs:  # noqa: B023
                ctypes.memmove(target + t, source + s, page)  # noqa: B023

        write = partial(session.move, "write", token, case.source, case.target)
        once = partial(ctypes.memmove, target, source, sizes.moved)
        took = interleaved({"shm": write, "loop": loop, "once": once}, rounds)
        write()
        np.testing.assert_array_equal(
            region.pages[:, case.target], local.pages[:, case.source], err_msg=case.name
        )
        session.close()
        assert region.owner.fences.try_revoke(token)
        region.owner.close()
        speed = {name: sizes.moved / seconds / 1e9 for name, seconds in took.items()}
        for peer, label, floor in (
            ("loop", "memmove per run", 0.9),
            ("once", "one memcpy", 0.9 if case.contiguous else None),
        ):
            rows.append(
                versus(f"shm write, {case.name}", speed["shm"], "GB/s", label, speed[peer],
                       at_least=floor)
            )  # fmt: skip
    return rows


def fence_rows(rig: Rig, rounds: int) -> list[Row]:
    """Taking, checking and letting go of a fence, in percent of a 1 MiB copy."""
    layout = dense_layout(1, 64, 1, 1 << 20)
    region, local = rig.region(layout, instance_id="bench"), rig.local(layout)
    session = rig.connect(local, region)
    token = region.owner.fences.open(range(layout.num_blocks))
    assert isinstance(session, MappedSession)
    hold = session.hold
    assert isinstance(hold, ShmHold)
    src, dst = local.memory.address, region.memory.address

    def fences() -> None:
        for _ in range(1000):
            hold.enter(token)
            hold.leave(token)

    def copies() -> None:
        for i in range(64):
            ctypes.memmove(dst + (i << 20), src + (i << 20), 1 << 20)

    took = interleaved({"fence": fences, "copy": copies}, rounds)
    session.close()
    region.owner.close()
    fence, copy = took["fence"] / 1000, took["copy"] / 64
    return [
        row("fence per batch", fence * 1e6, "us"),
        row("fence, share of a 1 MiB write", 100 * fence / copy, "%", at_most=3),
    ]


def plan_rows(rounds: int) -> list[Row]:
    """Plan and merge 10,000 blocks of a 32-layer model."""
    layout = dense_layout(32, 40_000, 8, 8192)
    rng, first = np.random.default_rng(2), np.arange(10_000)
    rows = []
    for name, source, target in (
        ("scattered", rng.permutation(40_000)[:10_000], rng.permutation(40_000)[:10_000]),
        ("runs of 16", first + first // 16, first),
        ("one run", first, first + 7),
    ):
        plan = partial(Planner(layout, layout).plan, source.tolist(), target.tolist())
        took = interleaved({"plan": plan}, rounds)["plan"]
        rows.append(row(f"plan and merge 10,000 blocks, {name}", took * 1e3, "ms", at_most=5))
    return rows


def serve(directory: Path) -> None:
    """For each line on stdin, the layout of a case: make its region, say where it is."""
    held: list[Region] = []  # owners do not keep their memory alive
    raw = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=receive_raw, args=(raw, held), daemon=True).start()
    for line in sys.stdin:
        while held:
            held.pop().owner.close()
        ask = json.loads(line)
        layout = dense_layout(LAYERS, ask["blocks"], 1, ask["page"])
        region = tcp_rig(directory).region(layout, instance_id="bench")
        token = region.owner.fences.open(range(layout.num_blocks))
        held.append(region)
        told = encode(region.descriptor).hex(), token.slot, token.epoch, raw.getsockname()[1]
        print(json.dumps(told), flush=True)


def receive_raw(listener: socket.socket, held: list[Region]) -> None:
    """Over and over: a length, that many bytes into the region that is held, one byte back."""
    while True:
        connection, _ = listener.accept()
        with connection:
            while head := connection.recv(8, socket.MSG_WAITALL):
                nbytes, view = int.from_bytes(head), memoryview(held[-1].data)  # type: ignore[arg-type]
                done = 0
                while done < nbytes:
                    done += connection.recv_into(view[done : min(nbytes, done + _PIECE)])
                connection.sendall(b"1")


@contextmanager
def other_process() -> Iterator[subprocess.Popen[str]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-") as directory:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bench_transfer", "serve", directory],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).parents[1],
        )  # fmt: skip
        try:
            yield process
        finally:
            process.communicate()  # it ends with its stdin


class RawSender:
    """`sendmsg` of a case's runs (one view, when they are contiguous), then one byte back."""

    def __init__(self, port: int, local: Local, case: Case, moved: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = moved.to_bytes(8)
        data = memoryview(local.data)  # type: ignore[arg-type]
        if case.contiguous:
            self._views = [data[at : min(at + _PIECE, moved)] for at in range(0, moved, _PIECE)]
        else:
            self._views = [data[s : s + case.page] for s, _ in pairs_of(case)]

    def __call__(self) -> None:
        self._socket.sendall(self._head)
        for first in range(0, len(self._views), _VIEWS):
            views = self._views[first : first + _VIEWS]
            total = sum(map(len, views))
            if (sent := self._socket.sendmsg(views)) < total:
                self._socket.sendall(b"".join(views)[sent:])
        assert self._socket.recv(1) == b"1"

    def close(self) -> None:
        self._socket.close()


def tcp_rows(sizes: Sizes, rounds: int) -> list[Row]:
    """tcp writes against the raw pair."""
    rows = []
    with other_process() as other:
        assert other.stdin is not None
        assert other.stdout is not None
        for case in cases(sizes):
            ask = {"blocks": case.blocks, "page": case.page}
            print(json.dumps(ask), file=other.stdin, flush=True)
            told, slot, epoch, port = json.loads(other.stdout.readline())
            descriptor = decode(bytes.fromhex(told), RegionDescriptor)
            local = local_of(case)
            session = StreamTransport(TcpKind()).connect(local.memory, descriptor)
            raw = RawSender(port, local, case, sizes.moved)
            token = FenceToken(slot=slot, epoch=epoch)
            write = partial(session.move, "write", token, case.source, case.target)
            took = interleaved({"tcp": write, "raw": raw}, rounds)
            session.close()
            raw.close()
            speed = {name: sizes.moved / seconds / 1e9 for name, seconds in took.items()}
            rows.append(
                versus(f"tcp write, {case.name}", speed["tcp"], "GB/s", "sendmsg/recv_into pair",
                       speed["raw"], at_least=0.8)
            )  # fmt: skip
    return rows


def local_of(case: Case) -> Local:
    layout = dense_layout(LAYERS, case.blocks, 1, case.page)
    data = random_bytes(extent(layout), 2)
    return Local(data, memory_over(data, layout))


def measure(options: argparse.Namespace, _base: Path) -> tuple[list[Row], OtherLoad]:
    quiet, rows, sizes = OtherLoad(), list[Row](), Sizes(moved=options.mib << 20)
    with quiet.window([]):
        if "copies" in options.parts:
            with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-") as directory:
                rig = shm_rig(Path(directory))
                rows += write_rows(rig, sizes, options.rounds)
                rows += fence_rows(rig, options.rounds)
            rows += plan_rows(options.rounds)
        if "tcp" in options.parts:
            rows += tcp_rows(sizes, options.rounds)
    return rows, quiet


def main() -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--mib", type=int, default=64, help="bytes of one write")
    return command.main("transfer", "KV block transfers", parser.parse_args(), measure)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]))
    else:
        sys.exit(main())
