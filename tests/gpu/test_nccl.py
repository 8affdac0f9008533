"""libnccl through ctypes: bytes to ourselves within one group, the form that one GPU allows."""

from __future__ import annotations

import pytest
import torch

from pullfill.transfer.nccl.library import Nccl
from pullfill.transfer.nccl.nccl_cuda import CudaGpus
from tests.support.gpu_programs import NcclToItself

pytestmark = pytest.mark.gpu


@pytest.fixture
def nccl() -> NcclToItself:
    if (reason := CudaGpus().why_not()) is not None:
        pytest.skip(reason)
    return NcclToItself(0)


def test_send_to_ourselves(nccl: NcclToItself) -> None:
    source = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda:0")
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    nccl.move(source.data_ptr(), target.data_ptr(), len(source))
    assert torch.equal(source, target)
    nccl.close()


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


def test_the_library_is_the_one_that_torch_has(nccl: NcclToItself) -> None:
    """Two copies of NCCL in a process would each keep a state of their own."""
    major, minor, patch = torch.cuda.nccl.version()
    assert Nccl(nccl.library).version() == 10000 * major + 100 * minor + patch
    nccl.close()
