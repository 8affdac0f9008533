"""Workers of any ranks connected over shared memory and tcp: the choice of a transport, parts,
roles, and failures."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from pullfill.config import TRANSPORTS
from pullfill.errors import BadMessage, ConfigError, Fenced, IncompatibleError, PeerUnavailable
from pullfill.options import WorkerOptions
from pullfill.transfer.connect import (
    backends,
    choose,
    connect,
    peer_transports,
    why_absent,
    why_not_better,
)
from pullfill.transfer.contract import LocalMemory, PeerSession, PeerTransport, Rect
from pullfill.transfer.copying import copies_of, read_pages
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.nixl import agent, nixl_backend
from pullfill.transfer.owners import MappedRank, Owner
from pullfill.transfer.session import MappedSession
from pullfill.transfer.shm.files import RegionFiles, create_kv
from pullfill.transfer.shm.shm_transport import ShmTransport
from pullfill.transfer.stream.stream_peer import StreamTransport
from pullfill.transfer.stream.tcp_backend import TcpKind
from pullfill.wire import Commit, RegionDescriptor, StageTimings, encode
from pullfill.wire import decode as decode_message
from pullfill.worker.context import WorkerContext
from pullfill.worker.memory import open_to_peers
from tests.support.transfer_rigs import memory_over, pages, shm_rig

PAGE, LAYERS, BLOCKS, HEADS = 64, 3, 8, 4

WHOLE = [Rect(0, 4, 0, LAYERS)]
HALVES = [Rect(0, 2, 0, LAYERS), Rect(2, 2, 0, LAYERS)]
REPLICAS = [Rect(h, 1, 0, LAYERS) for h in (0, 0, 1, 1, 2, 2, 3, 3)]
STAGES = [Rect(0, 4, 0, 1), Rect(0, 4, 1, LAYERS - 1)]
"""Ways to split a model of HEADS KV heads and LAYERS layers over ranks."""


class RankedWorker:
    """The KV memories of the ranks of one worker, with the same content however it is split."""

    def __init__(self, rects: Sequence[Rect], seed: int) -> None:
        self.rects = list(rects)
        self.data: list[NDArray[np.uint8]] = []
        self.memories: list[LocalMemory] = []
        random = np.random.default_rng(seed)
        model = random.integers(0, 255, (LAYERS, BLOCKS, HEADS, PAGE), np.uint8)
        for rect in rects:
            layout = dense_layout(rect.layers, BLOCKS, rect.heads, PAGE)
            # Ranks that share a head hold the same, as after a real prefill.
            data = model[rect.first_layer : rect.end_layer, :, rect.first_head : rect.end_head]
            self.data.append(np.ascontiguousarray(data).reshape(-1))
            memory = memory_over(self.data[-1], layout)
            self.memories.append(
                replace(memory, first_head=rect.first_head, first_layer=rect.first_layer)
            )

    def block(self, block: int) -> dict[tuple[int, int], set[bytes]]:
        """(layer, head) of the model → what the ranks that have it hold there."""
        found: dict[tuple[int, int], set[bytes]] = {}
        for rect, data, memory in zip(self.rects, self.data, self.memories, strict=True):
            held = pages(data, memory.layout)[:, block]
            for layer, head in product(range(rect.layers), range(rect.heads)):
                where = (rect.first_layer + layer, rect.first_head + head)
                found.setdefault(where, set()).add(held[layer, head].tobytes())
        return found


SPLITS = {"whole": WHOLE, "halves": HALVES, "replicas": REPLICAS, "stages": STAGES}


class DecodeWorker(RankedWorker):
    """The memory of its ranks is in files, behind one fence."""

    def __init__(self, directory: Path, rects: Sequence[Rect]) -> None:
        super().__init__(rects, seed=2)
        files, ranks = RegionFiles("decode-1", directory), []
        for rank, memory in enumerate(self.memories):
            path = create_kv(directory, "decode-1", rank, memory.nbytes)
            shared = np.asarray(np.memmap(path, np.uint8, "r+"))
            shared[:] = self.data[rank]
            self.data[rank] = shared
            self.memories[rank] = replace(memory, address=shared.ctypes.data)
            ranks.append(MappedRank(self.memories[rank], str(path)))
        kinds = {"tcp": TcpKind()}
        self.owner = Owner(files, ranks, "i1", instance_id="decode-1", kinds=kinds)


@pytest.fixture(autouse=True)
def nothing_stays_open(tmp_path: Path) -> Iterator[None]:
    """A session that is not closed still has the fence."""
    yield
    fence = str(tmp_path / "pullfill-decode-1.fence")
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed by now, as that of the listed folder is
            assert not os.readlink(f"/proc/self/fd/{fd}").startswith(fence)


@pytest.mark.parametrize(
    ("here", "there", "transport"),
    [(*pair, ShmTransport()) for pair in product(SPLITS, SPLITS)]
    + [
        ("halves", "whole", StreamTransport(TcpKind())),
        ("stages", "replicas", StreamTransport(TcpKind())),
    ],
)
def test_blocks_reach_every_rank_and_come_back(
    tmp_path: Path, here: str, there: str, transport: PeerTransport
) -> None:
    prefill, decode = RankedWorker(SPLITS[here], seed=1), DecodeWorker(tmp_path, SPLITS[there])
    decode.owner.listen("127.0.0.1")
    session = connect(prefill.memories, decode.owner.describe(), [transport])
    assert session.transport == transport.name
    token = decode.owner.fences.open([5, 3, 2])
    before = decode.block(2)
    session.move("write", token, [0, 1], [5, 3])
    assert decode.block(5) == prefill.block(0)
    assert decode.block(3) == prefill.block(1)
    assert decode.block(2) == before
    session.move("read", token, [2], [7])
    assert prefill.block(7) == before
    assert all(len(copies) == 1 for copies in prefill.block(7).values())
    assert decode.owner.fences.try_revoke(token)
    with pytest.raises(Fenced):
        session.move("write", token, [0], [5])
    session.close()
    decode.owner.close()


class BreaksAtRank1(ShmTransport):
    """The file is there when asked for and gone when it is mapped."""

    def connect(
        self, local: LocalMemory, descriptor: RegionDescriptor, part: Rect | None = None
    ) -> PeerSession:
        if descriptor.rank == 1:
            raise PeerUnavailable("gone")
        return super().connect(local, descriptor, part)


def test_a_rank_out_of_reach_leaves_nothing_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = RankedWorker(WHOLE, seed=1), DecodeWorker(tmp_path, HALVES)
    first, second = described = decode.owner.describe()
    with pytest.raises(PeerUnavailable):
        connect(prefill.memories, described, [BreaksAtRank1()])
    close = MappedSession.close

    def close_badly(session: MappedSession) -> None:
        close(session)
        raise OSError("no memory for a lock")

    monkeypatch.setattr(MappedSession, "close", close_badly)
    with pytest.raises(PeerUnavailable):  # why there is no session, and not what came of it
        connect(prefill.memories, described, [BreaksAtRank1()])
    monkeypatch.undo()
    renewed = msgspec.structs.replace(second, incarnation="i2")
    for wrong in ([first], [second, first], [first, renewed]):
        with pytest.raises(BadMessage, match="expected"):
            connect(prefill.memories, wrong, [ShmTransport()])
    os.unlink(tmp_path / "pullfill-decode-1-1.kv")
    with pytest.raises(IncompatibleError, match="rank 1"):
        connect(prefill.memories, described, [ShmTransport()])
    decode.owner.close()


# ------------------------------------------------------------------ reading blocks


def test_every_replica_can_be_read() -> None:
    worker = RankedWorker(REPLICAS, seed=3)
    assert copies_of(worker.memories) == 2
    assert [copies_of(RankedWorker(s, 3).memories) for s in (WHOLE, HALVES, STAGES)] == [1, 1, 1]
    right = read_pages(worker.memories, range(BLOCKS))
    at = worker.memories[3].layout.block_stride * 5
    worker.data[3][at + PAGE - 1] ^= 1  # head 1, the second copy of it, block 5
    assert (read_pages(worker.memories, range(BLOCKS), copy=0) == right).all()
    seen = read_pages(worker.memories, range(BLOCKS), copy=1)
    assert np.flatnonzero((seen != right).any(axis=1)).tolist() == [5]


class Fake:
    def __init__(self, name: str, why_not: str | None = None) -> None:
        self.name, self.why_not = name, why_not

    def can_reach(self, descriptor: object) -> str | None:
        return self.why_not

    connect = None


@pytest.mark.essential
def test_best_reachable_transport_is_chosen_with_reasons(tmp_path: Path) -> None:
    region = shm_rig(tmp_path).region(dense_layout(2, 8, 2, 64))
    region.owner.close()
    descriptor = msgspec.structs.replace(
        region.descriptor, endpoints={"tcp": "t", "shm": "x", "odd": "o"}
    )
    tcp, cuda, odd = Fake("tcp"), Fake("cuda_ipc"), Fake("odd")
    chosen, why_not = choose(descriptor, [odd, tcp, ShmTransport(), cuda])  # type: ignore[list-item]
    assert chosen is tcp
    assert [name for name, _ in why_not] == ["cuda_ipc", "shm"]
    assert "does not offer" in why_not[0][1]
    assert "endpoint" in why_not[1][1]
    assert choose(descriptor, [odd])[0] is odd  # type: ignore[list-item]
    assert why_not_better(descriptor, [tcp, ShmTransport()], {"nccl": "no GPU"}) == [  # type: ignore[list-item]
        f"shm: {why_not[1][1]}",
        "nccl: no GPU",
    ]
    with pytest.raises(IncompatibleError, match=r"tcp: cut off; .*odd: not available") as caught:
        choose(descriptor, [Fake("tcp", "cut off")])  # type: ignore[list-item]
    assert caught.value.field == "endpoints"


def test_a_reason_of_any_length_fits_a_commit(tmp_path: Path) -> None:
    """What a library says when it cannot be loaded may be pages long; the commit must be read."""
    owner = DecodeWorker(tmp_path, WHOLE).owner
    owner.listen("127.0.0.1")
    absent = {"nccl": "not installed: " + "x" * 10_000, "shm": "y" * 10_000}
    reasons = why_not_better(owner.describe()[0], [StreamTransport(TcpKind())], absent)
    owner.close()
    assert [reason.partition(":")[0] for reason in reasons] == ["shm", "nccl"]
    commit = Commit(
        rid=1, job_id="j", attempt=1, incarnation="i", blocks=1, kv_bytes=1,
        timings=StageTimings(), why_not_better=tuple(reasons),
    )  # fmt: skip
    assert decode_message(encode(commit), Commit) == commit


def test_an_address_to_publish_takes_the_place_of_the_bound_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = DecodeWorker(tmp_path, WHOLE).owner
    assert "tcp" not in owner.endpoints(), "nothing listens yet"
    owner.listen("127.0.0.1", advertise="tcp://10.0.0.1:99")
    # Of NCCL this takes GPU memory, and every peer that connects is told the endpoints.
    monkeypatch.delattr(TcpKind, "detail")
    assert owner.endpoints()["tcp"] == "tcp://10.0.0.1:99"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match="cannot listen"):
            owner.listen("127.0.0.1", taken.getsockname()[1])
    owner.close()
    owner.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asked", [None, frozenset({"cuda_ipc"})])
def test_memory_that_nothing_reaches_is_served_alone_unless_a_transport_was_asked_for(
    tmp_path: Path, asked: frozenset[str] | None
) -> None:
    # GPU memory of a kind that has no IPC handle, on a machine without NCCL.
    parts = WorkerContext("decode-1", RegionFiles("decode-1", tmp_path))
    parts.ranks = [MappedRank(replace(ON_CPU, device=0))]
    options = WorkerOptions(model="m", transports=asked)
    with (
        pytest.raises(ConfigError, match="none of them reaches")
        if asked
        else contextlib.nullcontext()
    ):
        open_to_peers(parts, options, None, decodes=True)
    assert parts.owner.describe() == ()
    assert list(tmp_path.iterdir()) == []


ON_CPU = LocalMemory(0, 64, dense_layout(1, 1, 1, 64))


class _Nixl(TcpKind):
    name = "nixl"


def test_nixl_is_used_and_offered_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_backend, "NixlKind", _Nixl)
    monkeypatch.setenv(agent.ENV, "eth9")
    assert "nixl" not in [transport.name for transport in peer_transports(None, [ON_CPU], None)]
    assert "nixl" not in backends(None, ON_CPU)
    assert "--transports nixl" in why_absent(None, ON_CPU)["nixl"]
    asked = peer_transports(["nixl"], [ON_CPU], None)
    assert [transport.name for transport in asked] == ["nixl"]
    assert list(backends(["nixl"], ON_CPU)) == ["nixl"]
    assert os.environ[agent.ENV] == "eth9", "who runs it has the last word"


def test_nixl_listens_on_loopback_or_where_the_operator_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl_backend, "NixlKind", _Nixl)
    monkeypatch.setenv(agent.ENV, "")
    with pytest.raises(ConfigError, match="UCX_NET_DEVICES"):
        backends(["nixl"], ON_CPU, "0.0.0.0")
    backends(["nixl"], ON_CPU, "127.0.0.1")
    assert os.environ[agent.ENV] == "lo"


@pytest.mark.parametrize("name", ["nccl", "cuda_ipc"])
def test_what_was_asked_for_by_name_and_does_not_work_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--transports {name}"):
        peer_transports([name], [ON_CPU], None)


def test_the_survey_of_this_machine_is_json() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pullfill.transfer.connect"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(json.loads(done.stdout)) == set(TRANSPORTS)
