"""A GPU's KV memory outlives vLLM's tensors, as the CPU's does (unit/engine/test_life.py)."""

from __future__ import annotations

import gc

import pytest
import torch

from pullfill.transfer.shm.kv_pool import tell
from tests.gpu.conftest import BLOCKS, HEADS, LAYERS, PAGE

pytestmark = pytest.mark.gpu


def test_gpu_memory_once_told_is_not_given_to_others() -> None:
    raw = torch.full((LAYERS * BLOCKS * HEADS * PAGE,), 7, dtype=torch.int8, device="cuda")
    whole = raw.view(LAYERS, BLOCKS, HEADS, PAGE // 4, 4)
    told = tell(None, {f"layers.{i}": whole[i] for i in range(LAYERS)}, BLOCKS).memory
    assert told is not None
    del raw, whole
    gc.collect()
    torch.cuda.empty_cache()
    others = [torch.empty(told.nbytes, dtype=torch.int8, device="cuda") for _ in range(4)]
    for other in others:
        start = other.data_ptr()
        assert start + told.nbytes <= told.address or told.address + told.nbytes <= start
