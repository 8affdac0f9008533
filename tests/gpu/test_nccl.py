"""NCCL on devices: bytes to ourselves within one group, which one GPU always allows, and the
transport between two processes: on two GPUs where there are two, else on one, which NCCL 2.30 and
newer allow with NCCL_MULTI_RANK_GPU_ENABLE=1. Many more faults: contract/test_transfer_nccl.py."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pullfill.transfer.nccl.nccl_backend import make_kind
from tests.support.gpu_programs import GpuProgram, NcclToItself
from tests.support.waiting import eventually

pytestmark = pytest.mark.gpu

SHAPE = 4, 64, 8, 16 << 10
"""Layers, blocks, heads and page bytes of 32 MiB. One block of a layer is 128 KiB."""
FOREIGN = 7


@pytest.fixture
def nccl() -> NcclToItself:
    if (reason := make_kind().why_not()) is not None:
        pytest.skip(reason)
    return NcclToItself(0)


def test_two_communicators_are_freed_in_one_group(nccl: NcclToItself) -> None:
    """And others work afterwards."""
    source = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda:0")
    for _ in range(2):
        other, target = NcclToItself(0), torch.zeros_like(source)
        torch.cuda.synchronize()
        other.move(source.data_ptr(), target.data_ptr(), len(source))
        assert torch.equal(source, target)
        nccl.close(other)
        nccl = NcclToItself(0)
    nccl.close()


def test_torch_and_pullfill_load_the_same_library(nccl: NcclToItself) -> None:
    """Two copies of NCCL in a process would each keep a state of their own."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in mapped if "/libnccl.so" in line}) == 1
    nccl.close()


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuProgram]:
    """Its memory is zero."""
    kind = make_kind()
    if (reason := kind.why_not()) is not None:
        pytest.skip(reason)
    if torch.cuda.device_count() == 1:
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        if not kind.shared:
            pytest.skip("one GPU, and this NCCL is older than 2.30: it allows one rank on each")
    with GpuProgram("owner", tmp_path, *SHAPE, "nccl") as program:
        yield program


@pytest.fixture
def start(owner: GpuProgram, tmp_path: Path) -> Iterator[Callable[[], GpuProgram]]:
    (path := tmp_path / "descriptor").write_text(owner.greeting)
    peers: list[GpuProgram] = []

    def begin() -> GpuProgram:
        peers.append(GpuProgram("writer", path, FOREIGN, torch.cuda.device_count() - 1))
        assert peers[-1].greeting == "ready"
        return peers[-1]

    yield begin
    for peer in peers:
        peer.close()


def test_bytes_go_both_ways(owner: GpuProgram, start: Callable[[], GpuProgram]) -> None:
    token, peer = owner.open(), start()
    assert peer.ask("write", token) == "done"
    assert owner.ask("others", FOREIGN) == "0"
    assert owner.ask("fill", 0x37) == "filled"
    assert peer.ask("read", token) == f"done {0x37}"
    assert owner.revoke(token)
    assert peer.ask("write", token) == "fenced"
    assert owner.ask("others", 0x37) == "0"


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_peer_stopped_or_killed_in_a_transfer_holds_nothing(
    owner: GpuProgram, start: Callable[[], GpuProgram], number: signal.Signals
) -> None:
    token, peer = owner.open(), start()
    peer.tell("loop", token)
    eventually(lambda: owner.ask("others", 0) != "0", "nothing arrives")
    peer.process.send_signal(number)
    eventually(lambda: owner.revoke(token), "its blocks stay in quarantine")
    assert owner.ask("fill", 0) == "filled"
    if number is signal.SIGSTOP:
        peer.process.send_signal(signal.SIGCONT)
        assert peer.answer() == "fenced"
    assert owner.ask("others", 0) == "0"
    fresh, other = owner.open(), start()
    assert other.ask("write", fresh) == "done"
    assert owner.ask("others", FOREIGN) == "0"
