"""Memory of a worker's engine on CPU, without the rest of the engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
GROWS_KIB = 4 << 10

STEPS = """
import ctypes, json, random
from pullfill.engine import environment
os.sched_setaffinity(0, {0})
environment.prepare(model="none", eager=True)
import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

class Mallinfo(ctypes.Structure):
    _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(10)]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo
def used():
    info = libc.mallinfo2()
    return (info.field4 + info.field7) >> 10  # mapped by itself, and in use of the arenas

shapes = ((64, 192), (64, 64), (64, 256), (128, 64))
layers = [torch.nn.Linear(*shape, bias=False).requires_grad_(False) for shape in shapes]
for layer in layers:
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
def step(tokens):
    for layer in layers:
        layer.cpu_linear(torch.zeros(tokens, layer.in_features), layer.weight, None)

rng = random.Random(2)
numbers = rng.sample(range(2, 512), 136)
often, seldom, first = numbers[:12], numbers[12:72], numbers[72:]
begin = used()
for tokens in first:
    step(tokens)
full = used()
for _ in range(3600):
    step(rng.choice(often) if rng.random() < 0.985 else rng.choice(seldom))
print(json.dumps({"first": full - begin, "then": used() - full}))
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="vLLM's CPU build only")
@pytest.mark.parametrize(("capacity", "grows"), [("", False), ("128", True)])
def test_kernels_for_numbers_of_tokens_do_not_pile_up(capacity: str, grows: bool) -> None:
    """Memory does not grow while some token counts come in every step and others now and then.

    With a larger cache of oneDNN's own it does grow. If not, the setting has become useless."""
    command = [sys.executable, "-W", "ignore", "-c", STEPS]
    env = {k: v for k, v in os.environ.items() if k != CAPACITY}
    env |= {CAPACITY: capacity} if capacity else {}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200.0, env=env)
    assert ended.returncode == 0, ended.stderr[-2000:]
    grown = json.loads(ended.stdout.splitlines()[-1])
    print(capacity or "as workers set it", grown)
    assert grown["first"] > GROWS_KIB, "vLLM does not keep kernels this way any more"
    assert (grown["then"] > GROWS_KIB) == grows
