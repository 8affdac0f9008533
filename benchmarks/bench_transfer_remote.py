"""Rows about moving blocks into another process: tcp against a raw socket pair, shm against NIXL.

The other process (`python -m benchmarks.bench_transfer_remote DIRECTORY`) is a decode worker as
far as memory goes: it owns one region per case, receives over our tcp transport, over a plain
socket with `recv_into`, and, where the nixl package is installed, is the target of NIXL's writes.
It answers JSON lines and ends with its stdin. The raw pair has no plan, no fence, no scattered
target: its bytes land side by side.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_transfer_copies import (
    LAYERS,
    Case,
    Sizes,
    cases,
    interleaved,
    pairs_of,
    plain_ways,
)
from benchmarks.report import Row, missing, versus
from pullfill.transfer.contract import PeerSession, PeerTransport
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.session import MappedSession
from pullfill.transfer.shm.shm_transport import ShmTransport
from pullfill.transfer.stream.stream_peer import StreamTransport
from pullfill.transfer.stream.tcp_backend import TcpKind
from pullfill.wire import FenceToken, RegionDescriptor, decode, encode
from tests.support.transfer_rigs import Local, Region, extent, memory_over, random_bytes, shm_rig
from tests.support.transfer_rigs import tcp_rig as make_tcp_rig

_PIECE = 4 << 20
_VIEWS = 512  # of one sendmsg; the kernel takes 1024


def nixl_api() -> Any | None:
    """The nixl package's API, None if it is not installed."""
    try:
        import nixl._api as api
    except ImportError:
        return None
    return api


# ---------------------------------------------------------------------------- the other process


def serve(directory: Path) -> None:
    """Per line on stdin, the layout of a case: make its regions, say where they are."""
    raw = RawReceiver()
    held: list[Region] = []  # owners do not keep their memory alive
    for line in sys.stdin:
        while held:
            held.pop().owner.close()
        ask = json.loads(line)
        layout = dense_layout(LAYERS, ask["blocks"], 1, ask["page"])
        answer: dict[str, Any] = {"raw": raw.port}
        for name, rig in (("tcp", make_tcp_rig(directory)), ("shm", shm_rig(directory))):
            region = rig.region(layout, instance_id=f"bench-{name}")
            token = region.owner.fences.open(range(layout.num_blocks))
            answer[name] = {
                "descriptor": encode(region.descriptor).hex(),
                "token": [token.slot, token.epoch],
            }
            held.append(region)
        raw.target = region.data
        target = NixlTarget(region) if ask["nixl"] else None
        if target is not None:
            answer["nixl"] = {
                "metadata": target.metadata.hex(), "address": region.memory.address
            }  # fmt: skip
        print(json.dumps(answer), flush=True)


class RawReceiver:
    """Over and over on one connection at a time: a length, that many bytes, one byte back."""

    def __init__(self) -> None:
        self.target = np.zeros(1, np.uint8)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self._receive(connection)

    def _receive(self, connection: socket.socket) -> None:
        while head := connection.recv(8, socket.MSG_WAITALL):
            nbytes, view = int.from_bytes(head), memoryview(self.target)  # type: ignore[arg-type]
            done = 0
            while done < nbytes:
                done += connection.recv_into(view[done : min(nbytes, done + _PIECE)])
            connection.sendall(b"1")


class NixlTarget:
    """An agent over a region. It has no thread of its own: UCX over shared memory needs none."""

    def __init__(self, region: Region) -> None:
        self._agent = nixl_agent(f"target-{os.getpid()}-{time.monotonic_ns()}")
        memory = region.memory
        self._agent.register_memory([(memory.address, memory.nbytes, 0, "")], "DRAM")
        self.metadata: bytes = self._agent.get_agent_metadata()
        threading.Thread(target=self._progress, daemon=True).start()

    def _progress(self) -> None:
        while True:  # connections are set up only while somebody looks
            self._agent.get_new_notifs()
            time.sleep(0.001)


def nixl_agent(name: str) -> Any:
    api = nixl_api()
    assert api is not None
    affinity = os.sched_getaffinity(0)
    config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    agent = api.nixl_agent(name, config)
    os.sched_setaffinity(0, affinity)  # it may pin the thread that makes it
    return agent


# ---------------------------------------------------------------------------- this process


class Other:
    """The other process, and what this one needs to reach its memory."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def region(self, case: Case, nixl: bool) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        ask = {"blocks": case.blocks, "page": case.page, "nixl": nixl}
        print(json.dumps(ask), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        while line and not line.startswith("{"):  # a library that prints
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the other process ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def other_process() -> Iterator[Other]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-") as directory:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bench_transfer_remote", directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        try:
            yield Other(process)
        finally:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def connect(
    transport: PeerTransport, where: dict[str, Any], local: Local
) -> tuple[PeerSession, FenceToken]:
    slot, epoch = where["token"]
    descriptor = decode(bytes.fromhex(where["descriptor"]), RegionDescriptor)
    return transport.connect(local.memory, descriptor), FenceToken(slot=slot, epoch=epoch)


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


def tcp_rows(other: Other, sizes: Sizes, rounds: int) -> list[Row]:
    """tcp writes against the raw pair."""
    rows = []
    for case in cases(sizes):
        where = other.region(case, nixl=False)
        local = _local(case)
        session, token = connect(StreamTransport(TcpKind()), where["tcp"], local)
        raw = RawSender(where["raw"], local, case, sizes.moved)
        write = partial(session.write_blocks, token, case.source, case.target)
        took = interleaved({"tcp": write, "raw": raw}, rounds)
        session.close()
        raw.close()
        speed = {name: sizes.moved / seconds / 1e9 for name, seconds in took.items()}
        rows.append(
            versus(f"tcp write, {case.name}", speed["tcp"], "GB/s", "sendmsg/recv_into pair",
                   speed["raw"], at_least=0.8)
        )  # fmt: skip
    return rows


def nixl_rows(other: Other, sizes: Sizes, rounds: int) -> list[Row]:
    """shm writes against NIXL's over UCX, same lists, into another process; and what the plain ways
    reach against it: beyond them lies nothing that this machine's memory could do."""
    api = nixl_api()
    rows = []
    for case in cases(sizes):
        name = f"shm write, {case.name}"
        if api is None:
            rows.append(missing(name, "NIXL/UCX", "the nixl package is not installed"))
            continue
        where = other.region(case, nixl=True)
        local = _local(case)
        session, token = connect(ShmTransport(), where["shm"], local)
        assert isinstance(session, MappedSession)
        loop, once = plain_ways(case, local.memory.address, session._remote_address, sizes.moved)
        ways: dict[str, Callable[[], object]] = {
            "shm": partial(session.write_blocks, token, case.source, case.target),
            "nixl": NixlWriter(where["nixl"], local, case),
            "loop": loop,
            "once": once,
        }
        took = interleaved(ways, rounds)
        session.close()
        speed = {way: sizes.moved / seconds / 1e9 for way, seconds in took.items()}
        for label, way, floor in (
            (name, "shm", 3.0),
            (f"memmove per run, {case.name}", "loop", None),
            (f"one memcpy, {case.name}", "once", None),
        ):
            rows.append(
                versus(label, speed[way], "GB/s", "NIXL/UCX", speed["nixl"], at_least=floor)
            )
    return rows


class NixlWriter:
    """One WRITE of the whole list, descriptors made anew as for a new grant; looks without pause
    until it is done."""

    def __init__(self, where: dict[str, Any], local: Local, case: Case) -> None:
        self._agent = nixl_agent(f"source-{os.getpid()}-{time.monotonic_ns()}")
        memory = local.memory
        self._agent.register_memory([(memory.address, memory.nbytes, 0, "")], "DRAM")
        self._peer = self._agent.add_remote_agent(bytes.fromhex(where["metadata"]))
        runs = np.array(pairs_of(case), np.uint64)
        self._ours, self._theirs = np.zeros((2, len(runs), 3), np.uint64)
        self._ours[:, 0] = runs[:, 0] + np.uint64(memory.address)
        self._theirs[:, 0] = runs[:, 1] + np.uint64(where["address"])
        self._ours[:, 1] = self._theirs[:, 1] = case.page

    def __call__(self) -> None:
        agent = self._agent
        ours = agent.get_xfer_descs(self._ours, "DRAM")
        theirs = agent.get_xfer_descs(self._theirs, "DRAM")
        handle = agent.initialize_xfer("WRITE", ours, theirs, self._peer)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL says {state}")


def _local(case: Case) -> Local:
    layout = dense_layout(LAYERS, case.blocks, 1, case.page)
    data = random_bytes(extent(layout), 2)
    return Local(data, memory_over(data, layout))


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
