"""NCCL as cupy gives it: bytes to ourselves within one group, the form that one GPU allows."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_send_to_ourselves() -> None:
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    nccl = cupy.cuda.nccl
    source = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda:0")
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    with cupy.cuda.Device(0):
        stream = cupy.cuda.Stream(non_blocking=True)
        world = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
        nccl.groupStart()
        world.send(source.data_ptr(), len(source), nccl.NCCL_UINT8, 0, stream.ptr)
        world.recv(target.data_ptr(), len(target), nccl.NCCL_UINT8, 0, stream.ptr)
        nccl.groupEnd()
        stream.synchronize()
        world.destroy()
    assert torch.equal(source, target)
