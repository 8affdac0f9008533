"""The nccl transport between two processes: on two GPUs where there are two, else on one, which
NCCL 2.30 and newer allow with NCCL_MULTI_RANK_GPU_ENABLE=1. The same with a fake of NCCL, and many
more faults, in tests/contract/test_transfer_nccl.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from pullfill.transfer.layout import dense_layout
from pullfill.transfer.nccl.nccl_backend import make_kind
from pullfill.transfer.owners import MappedRank, Owner
from pullfill.transfer.shm.files import RegionFiles
from tests.support.gpu_programs import GpuMemory, GpuProgram
from tests.support.transfer_rigs import COMPAT
from tests.support.waiting import eventually

pytestmark = pytest.mark.gpu

LAYOUT = dense_layout(4, 64, 8, 16 << 10)  # 32 MiB; one block of a layer is 128 KiB
FOREIGN = 0xEE


class Place:
    """The owner's side: GPU memory, fences, a port."""

    def __init__(self, directory: Path) -> None:
        self.kv = GpuMemory(LAYOUT, 0)
        memory = self.kv.memory
        kind = make_kind()
        self.owner = Owner(
            RegionFiles("nccl-owner", directory / "shm"),
            [MappedRank(memory)],
            "i1",
            instance_id="nccl-owner",
            kinds={"nccl": kind},
            stall_s=60.0,
        )
        self.owner.listen("127.0.0.1")
        (descriptor,) = self.owner.describe(COMPAT)
        self.path = directory / "descriptor.json"
        self.path.write_bytes(msgspec.json.encode(descriptor))

    def fill(self, value: int) -> None:
        self.kv.buffer.view(torch.uint8).fill_(value)
        torch.cuda.synchronize(0)

    def foreign(self) -> int:
        torch.cuda.synchronize(0)
        return int((self.kv.buffer.view(torch.uint8) == FOREIGN).sum())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    if torch.cuda.device_count() == 1:
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    kind = make_kind()
    if (reason := kind.why_not()) is not None:
        pytest.skip(reason)
    if torch.cuda.device_count() == 1 and not kind.shared:
        pytest.skip("one GPU, and this NCCL is older than 2.30: it allows one rank on each")
    (tmp_path / "shm").mkdir()
    made = Place(tmp_path)
    made.fill(0)
    yield made
    made.owner.close()


@pytest.fixture
def start(place: Place) -> Iterator[Callable[[], GpuProgram]]:
    peers: list[GpuProgram] = []

    def begin() -> GpuProgram:
        last = torch.cuda.device_count() - 1
        peers.append(GpuProgram("writer", place.path, FOREIGN, last, "nccl"))
        assert peers[-1].greeting == "ready"
        return peers[-1]

    yield begin
    for peer in peers:
        peer.__exit__()


def test_bytes_go_both_ways(place: Place, start: Callable[[], GpuProgram]) -> None:
    token, peer = place.owner.fences.open(range(64)), start()
    peer.tell("write", token)
    assert peer.answer() == "done"
    assert place.foreign() == LAYOUT.num_layers * LAYOUT.layer_stride
    place.fill(0x37)
    peer.tell("read", token)
    assert peer.answer() == f"done {0x37}"
    assert place.owner.fences.try_revoke(token)
    peer.tell("write", token)
    assert peer.answer() == "fenced"
    assert place.foreign() == 0


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_peer_stopped_or_killed_in_a_transfer_holds_nothing(
    place: Place, start: Callable[[], GpuProgram], number: signal.Signals
) -> None:
    fences = place.owner.fences
    token, peer = fences.open(range(64)), start()
    peer.tell("loop", token)
    eventually(lambda: place.foreign() > 0, "nothing arrives")
    os.kill(peer.process.pid, number)
    eventually(lambda: fences.try_revoke(token), "its blocks stay in quarantine")
    place.fill(0)
    if number is signal.SIGSTOP:
        os.kill(peer.process.pid, signal.SIGCONT)
        assert peer.answer() == "fenced"
    assert place.foreign() == 0
    fresh, other = fences.open(range(64)), start()
    other.tell("write", fresh)
    assert other.answer() == "done"
    assert place.foreign() == LAYOUT.num_layers * LAYOUT.layer_stride
