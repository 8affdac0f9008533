"""Which prompts vLLM keeps every block of, asked of vLLM's own cache manager."""

from __future__ import annotations

import json
import subprocess
import sys

ASK = """
import json, torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
)
from pullfill.engine.kv import skipped_of

common = dict(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
specs = {
    "full": FullAttentionSpec(**common),
    "full that stands for a window": FullAttentionSpec(**common, sliding_window=64),
    "window": SlidingWindowSpec(**common, sliding_window=64),
    "chunks": ChunkedLocalAttentionSpec(**common, attention_chunk_size=64),
}
def asked(spec):
    manager = KVCacheManager(
        KVCacheConfig(32, [], [KVCacheGroupSpec(["a", "b"], spec)]),
        max_model_len=512, scheduler_block_size=16, hash_block_size=16,
    )
    skipped = skipped_of(manager)
    return [skipped(tokens) > 0 for tokens in (1, 63, 64, 300)]
print(json.dumps({name: asked(spec) for name, spec in specs.items()}))
"""


def test_a_prompt_beyond_what_a_layer_sees_has_no_blocks_at_its_start() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "full": [False] * 4,
        "full that stands for a window": [False] * 4,
        "window": [False, False, True, True],
        "chunks": [False, False, True, True],
    }
