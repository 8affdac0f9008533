"""vLLM's own end of an engine leaves the KV memory that it once told us."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ctypes, sys
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from pullfill.transfer.shm.kv_pool import SharedKvPool, tell

LAYERS, BLOCKS, HEADS, PAGE = 8, 1024, 2, 4096  # large: freed, it would be mapped anew at once
_set_torch_accelerator_to_noop()
pool = SharedKvPool("decode-a", 0, Path(sys.argv[1]))
with pool:
    raw = torch.zeros(LAYERS * BLOCKS * HEADS * PAGE, dtype=torch.int8, device="cpu")
whole = raw.view(LAYERS, BLOCKS, HEADS, PAGE // 4, 4)
views = {f"layers.{i}": whole[i] for i in range(LAYERS)}
told = tell(pool, views, BLOCKS).memory
raw[: 1 << 20] = 7
runner = SimpleNamespace(
    kv_caches=list(views.values()),
    cache_config=SimpleNamespace(num_gpu_blocks=BLOCKS),
    compilation_config=SimpleNamespace(
        static_forward_context={k: SimpleNamespace(kv_cache=v) for k, v in views.items()}
    ),
)
runner._cleanup_profiling_kv_cache = lambda: GPUModelRunner._cleanup_profiling_kv_cache(runner)
del raw, whole, views
GPUModelRunner.shutdown(runner)
assert runner.kv_caches == [], "vLLM does not drop its KV cache here any more: look where it does"
assert "decode-a-0.kv" in Path("/proc/self/maps").read_text(), "unmapped"
others = [torch.full((told.nbytes + k * 4096,), 65, dtype=torch.int8) for k in range(-3, 1)]
assert ctypes.string_at(told.address, 1 << 20) == bytes([7]) * (1 << 20), "used for something else"
"""


@pytest.mark.long
def test_the_end_of_vllm_s_engine_frees_no_kv_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
