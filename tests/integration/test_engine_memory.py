"""Memory of a worker's engine on CPU, without the rest of the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys

GROWS_KIB = 4 << 10

STEPS = """
import ctypes, json, random
from pullfill.engine import process
process.prepare(cpu=0, model="none", eager=True)
import torch
from vllm import _custom_ops as ops

class Mallinfo(ctypes.Structure):
    _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(10)]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo
def used():
    info = libc.mallinfo2()
    return (info.field4 + info.field7) >> 10  # mapped by itself, and in use of the arenas

kept = 32  # numbers of tokens, as vllm.model_executor.layers.utils asks for
layers = [
    (k, ops.create_onednn_mm(torch.randn(n, k).t(), kept))
    for n, k in ((192, 64), (64, 64), (256, 64), (64, 128))
]
def step(tokens):
    for k, layer in layers:
        ops.onednn_mm(layer, torch.zeros(tokens, k), None)

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


def test_kernels_for_numbers_of_tokens_do_not_pile_up() -> None:
    """Those of the load come and go for as long as it lasts: some always, others now and then."""
    command = [sys.executable, "-W", "ignore", "-c", STEPS]
    env = {k: v for k, v in os.environ.items() if k != "ONEDNN_PRIMITIVE_CACHE_CAPACITY"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200.0, env=env)
    assert ended.returncode == 0, ended.stderr[-2000:]
    grown = json.loads(ended.stdout.splitlines()[-1])
    assert grown["first"] > GROWS_KIB  # else vLLM does not keep kernels this way any more
    assert grown["then"] < GROWS_KIB
