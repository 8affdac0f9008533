"""libnccl through ctypes: bytes to ourselves within one group, the form that one GPU allows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pullfill.transfer.nccl.nccl_backend import make_kind
from tests.support.gpu_programs import NcclToItself

pytestmark = pytest.mark.gpu


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
