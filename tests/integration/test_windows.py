"""Models in which every layer has a window: for which prompts vLLM's cache manager keeps every
block, and how workers use that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.oracle import Oracle
from tests.support.prompts import ask, random_prompt, truth

WINDOW = 128
HIT = 128
STEPS = 6

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


@pytest.mark.engine
def test_no_block_outside_the_window_is_taken_for_the_prefix(
    model_path: Path, tmp_path: Path
) -> None:
    """The decode worker has the prefix, the prefill worker has nothing; beyond the window vLLM's
    table names one empty block where the prefix was."""
    layers = json.loads((model_path / "config.json").read_text())["num_hidden_layers"]
    change = {"layer_types": ["sliding_attention"] * layers, "sliding_window": WINDOW}
    prompts = [random_prompt(length, seed=length) for length in (WINDOW - 1, 200, 220, 240)]
    cluster = Cluster(tmp_path, model_path)
    with Oracle(model_path, block_size=32, enforce_eager=True, hf_overrides=change) as oracle:
        expected = [tokens for tokens, _ in truth(oracle, prompts, STEPS)]
    try:
        cluster.start_servers()
        for role in ("decode", "prefill", "frontend"):
            cluster.launch(role, f"--hf-overrides={json.dumps(change)}")
        cluster.wait_ready(*cluster.workers)
        cluster.set_router(policy="always_local")
        for prompt in prompts[1:]:
            ask(cluster, prompt[:HIT], 1)
        cluster.set_router(policy="always_remote")
        answers = [ask(cluster, prompt, STEPS) for prompt in prompts]
        assert [answer.tokens for answer in answers] == expected
        told = [cluster.explain(answer.request_id) for answer in answers]
        assert [(t["path"], t["prefix_hit_tokens"] > 0) for t in told] == [
            ("remote", False),
            *[("local", True)] * 3,
        ]
        cluster.assert_clean()
    finally:
        cluster.stop()
