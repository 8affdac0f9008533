"""The order in which a job names blocks of several KV cache groups."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pullfill.engine.groups import EMPTY, BlockOrder, in_pieces

GROUPS = """
import json, torch
from types import SimpleNamespace
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec,
    SlidingWindowSpec,
)
from pullfill.engine.groups import groups_of, kept_from, why_local

common = dict(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
full = FullAttentionSpec(**common)
specs = {
    "full": [full],
    "full that stands for a window": [FullAttentionSpec(**common, sliding_window=64)],
    "window": [SlidingWindowSpec(**common, sliding_window=64)],
    "chunks": [ChunkedLocalAttentionSpec(**common, attention_chunk_size=64)],
    "both": [full, SlidingWindowSpec(**common, sliding_window=64)],
    "state": [MambaSpec(block_size=16, shapes=((2, 8),), dtypes=(torch.float32,))],
    "heads": [
        full, SlidingWindowSpec(**common | {"num_kv_heads": 4, "head_size": 4}, sliding_window=64)
    ],
    "blocks": [full, SlidingWindowSpec(**common | {"block_size": 32}, sliding_window=64)],
}
def told(name):
    groups = [KVCacheGroupSpec([f"{name}{i}"], spec) for i, spec in enumerate(specs[name])]
    config = KVCacheConfig(32, [], groups)
    parallel = SimpleNamespace(pipeline_parallel_size=1)
    cache = SimpleNamespace(block_size=16)
    kept = []
    if name not in ("state", "blocks", "heads"):
        manager = KVCacheManager(
            config, max_model_len=512, scheduler_block_size=16, hash_block_size=16
        )
        kept = [kept_from(manager)(tokens) for tokens in (1, 63, 64, 79, 300)]
    why = why_local(SimpleNamespace(parallel_config=parallel, cache_config=cache), config)
    return [groups_of(config).kinds, kept, why]
print(json.dumps({name: told(name) for name in specs}))
"""


def test_what_vllm_keeps_of_a_prompt_and_which_models_stay_local() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROUPS], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert {name: kept for name, (_, kept, _) in told.items() if kept} == {
        "full": [[0]] * 5,
        "full that stands for a window": [[0]] * 5,
        "window": [[0], [0], [0], [1], [14]],
        "chunks": [[0], [0], [4], [4], [16]],
        "both": [[0, 0], [0, 0], [0, 0], [0, 1], [0, 14]],
    }
    assert {name: kinds for name, (kinds, _, _) in told.items()} == {
        "full": "FullAttention",
        "full that stands for a window": "FullAttention(64)",
        "window": "SlidingWindow(64)",
        "chunks": "ChunkedLocalAttention(64)",
        "both": "1xFullAttention 1xSlidingWindow(64)",
        "state": "Mamba",
        "heads": "1xFullAttention 1xSlidingWindow(64)",
        "blocks": "1xFullAttention 1xSlidingWindow(64)",
    }
    assert {name: why for name, (_, _, why) in told.items() if why} == {
        "state": "pullfill does not move the state of Mamba layers yet",
        "heads": "its KV cache groups have different heads",
        "blocks": "its KV cache groups have blocks of different sizes",
    }


@pytest.mark.parametrize(
    ("start", "stop", "named"),
    [(0, 4, [11, 12, 13, 23, 14, 24]), (1, 3, [12, 13, 23]), (3, 4, [14, 24]), (2, 2, [])],
)
def test_blocks_are_named_by_position_and_then_by_group(
    start: int, stop: int, named: list[int]
) -> None:
    order = BlockOrder((0, 2))
    tables = [[11, 12, 13, 14], [EMPTY, EMPTY, 23, 24]]
    assert order.ids(tables, start, stop) == named
    assert order.before(stop) - order.before(start) == len(named)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 9), st.integers(0, 9))
def test_parts_of_a_prompt_name_the_blocks_of_the_whole(kept: list[int], a: int, b: int) -> None:
    order, (first, second) = BlockOrder(tuple(kept)), sorted((a, b))
    tables = [[100 * group + at for at in range(10)] for group in range(len(kept))]
    whole = order.ids(tables, 0, 10)
    parts = [order.ids(tables, *ends) for ends in ((0, first), (first, second), (second, 10))]
    assert [block for part in parts for block in part] == whole
    assert whole == [
        100 * group + at for at in range(10) for group in range(len(kept)) if at >= kept[group]
    ]
    assert order.before(second) - order.before(first) == len(parts[1])


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.integers(0, 9),
    st.integers(1, 4),
    st.integers(0, 40),
)
def test_pieces_are_named_like_blocks(kept: list[int], start: int, pieces: int, end: int) -> None:
    order = BlockOrder(tuple(kept))
    tables = [[100 * group + at for at in range(1, 11)] for group in range(len(kept))]
    listed = order.ids(tables, start, 10)
    for table, known, first in zip(order.tables(listed, start, 10), tables, kept, strict=True):
        begin = max(start, first)
        assert table == [EMPTY] * begin + known[begin:]
    fine = [in_pieces(table, pieces) for table in tables]
    stop = max(start * pieces, min(end, 10 * pieces))
    part = order.ids(tables, start, -(-stop // pieces))
    assert order.cut_ids(part, pieces, start, stop) == order.cut(pieces).ids(
        fine, start * pieces, stop
    )
