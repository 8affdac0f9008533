"""The order in which a job names blocks of several KV cache groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pullfill.engine.groups import (
    BESIDE_TIER,
    EMPTY,
    BlockOrder,
    Groups,
    by_position,
    cached_run,
    caches_of,
    groups_of,
    keeps_all,
    kept_from,
    why_local,
)
from tests.support.fakes import FakePool, FakeRequest
from tests.support.late import Late

torch: Any = Late("torch")


def specs_by_name() -> dict[str, list[Any]]:
    """KV cache groups of models, as vLLM describes them."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    common: dict[str, Any] = dict(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    full = FullAttentionSpec(**common)

    def window(**more: Any) -> Any:
        return SlidingWindowSpec(**common | more, sliding_window=64)

    def state(mode: str = "align", tokens: int = 16, **more: Any) -> Any:
        more.setdefault("page_size_padded", full.page_size_bytes)
        shapes, dtypes = ((3, 8), (2, 8)), (torch.bfloat16, torch.float32)
        return MambaSpec(
            block_size=tokens, shapes=shapes, dtypes=dtypes, mamba_cache_mode=mode, **more
        )

    return {
        "full": [full],
        "full that stands for a window": [FullAttentionSpec(**common, sliding_window=64)],
        "window": [window()],
        "chunks": [ChunkedLocalAttentionSpec(**common, attention_chunk_size=64)],
        "both": [full, window()],
        "state": [state()],
        "kv and states": [full, state()],
        "no prefix cache": [state("none", 512), full],
        "states of drafts": [full, state(num_speculative_blocks=2)],
        "every state": [full, state("all")],
        "small states": [full, state(page_size_padded=None)],
        "ranks": [full, state()],
        "tier": [full, state()],
        "heads": [full, window(num_kv_heads=4, head_size=4)],
        "blocks": [full, window(block_size=32)],
    }


def what_is_kept(name: str, specs: list[Any]) -> tuple[str, list[Any], str, list[int], Any]:
    """Kinds of the groups, what vLLM keeps of prompts of several lengths, why prompts stay local,
    the lengths of block tables, and the states."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    parts = [KVCacheGroupSpec([f"{name}{i}"], spec) for i, spec in enumerate(specs)]
    config = KVCacheConfig(32, [], parts)
    ranks = 2 if name == "ranks" else 1
    settings = {BESIDE_TIER: True} if name == "tier" else {}
    vllm_config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=ranks),
        cache_config=SimpleNamespace(block_size=16),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=settings),
    )
    kept: list[Any] = []
    tables: Any = []
    why = why_local(vllm_config, config)
    size = 512 if name == "no prefix cache" else 16
    if not why:
        manager = KVCacheManager(
            config,
            max_model_len=512,
            scheduler_block_size=size,
            hash_block_size=size,
            enable_caching=name != "no prefix cache",
        )
        kept = [list(kept_from(manager, 16)(tokens)) for tokens in (0, 1, 63, 64, 79, 300)]
        tables = by_position(manager, 16)([[7 + i] for i in range(len(parts))])
    groups = groups_of(config)
    return groups.kinds, kept, why, list(map(len, tables)), groups.states


def test_what_vllm_keeps_of_a_prompt_and_which_models_stay_local() -> None:
    told = {name: what_is_kept(name, specs) for name, specs in specs_by_name().items()}
    assert {name: kept for name, (_, kept, *_) in told.items() if kept} == {
        "full": [[0]] * 6,
        "full that stands for a window": [[0]] * 6,
        "window": [[0], [0], [0], [0], [1], [14]],
        "chunks": [[0], [0], [0], [4], [4], [16]],
        "both": [[0, 0], [0, 0], [0, 0], [0, 0], [0, 1], [0, 14]],
        "kv and states": [[0, 0], [0, 0], [0, 3], [0, 3], [0, 4], [0, 18]],
        "no prefix cache": [[0, 0], [0, 0], [3, 0], [3, 0], [4, 0], [18, 0]],
    }
    assert told["kv and states"][3] == [1, 1]
    assert told["no prefix cache"][3] == [512 // 16, 1], "one block for all positions"
    assert told["no prefix cache"][4] == ((("bfloat16", 48), ("float32", 64)), ())
    parts = "3x8:bfloat16,2x8:float32"
    kinds_of_states = {
        "state": f"Mamba(MAMBA2,align,{parts})",
        "no prefix cache": f"1xMamba(MAMBA2,none,{parts}) 1xFullAttention",
        "every state": f"1xFullAttention 1xMamba(MAMBA2,all,{parts})",
    } | dict.fromkeys(
        ("kv and states", "states of drafts", "small states", "ranks", "tier"),
        f"1xFullAttention 1xMamba(MAMBA2,align,{parts})",
    )
    assert {name: kinds for name, (kinds, *_) in told.items()} == kinds_of_states | {
        "full": "FullAttention",
        "full that stands for a window": "FullAttention(64)",
        "window": "SlidingWindow(64)",
        "chunks": "ChunkedLocalAttention(64)",
        "both": "1xFullAttention 1xSlidingWindow(64)",
        "heads": "1xFullAttention 1xSlidingWindow(64)",
        "blocks": "1xFullAttention 1xSlidingWindow(64)",
    }
    assert {name: why for name, (_, _, why, *_) in told.items() if why} == {
        "state": "pullfill moves states of Mamba layers only beside KV of attention layers",
        "states of drafts": "pullfill does not move states of Mamba layers with speculation",
        "every state": "pullfill does not move states of Mamba layers with --mamba-cache-mode all",
        "small states": "its KV cache groups have blocks of different sizes",
        "ranks": "pullfill moves states of Mamba layers only between workers with one rank",
        "tier": "pullfill does not move states of Mamba layers beside --kv-offloading-size",
        "heads": "its KV cache groups have different heads",
        "blocks": "its KV cache groups have blocks of different sizes",
    }


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


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 9))
def test_tables_are_the_inverse_of_ids(kept: list[int], start: int) -> None:
    order = BlockOrder(tuple(kept))
    tables = [[100 * group + at for at in range(1, 11)] for group in range(len(kept))]
    listed = order.ids(tables, start, 10)
    for table, known, first in zip(order.tables(listed, start, 10), tables, kept, strict=True):
        begin = max(start, first)
        assert table == [EMPTY] * begin + known[begin:]


def test_pages_with_states_and_pages_with_kv_are_described_as_bytes() -> None:
    """Whole pages, also where vLLM cuts those with KV for its kernels and some layers have none."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
    )

    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    page, blocks = full.page_size_bytes, 4
    state = MambaSpec(
        block_size=16,
        shapes=((3, 8),),
        dtypes=(torch.float32,),
        page_size_padded=page,
        mamba_cache_mode="align",
    )
    groups = [KVCacheGroupSpec(["kv0"], full), KVCacheGroupSpec(["state0", "state1"], state)]
    memory = torch.zeros((2, blocks, page), dtype=torch.int8)
    kernel = memory[0].view(torch.float32).view(2 * blocks, 2, 8, 16)  # of 8 tokens
    states = [layer[:, None, None, : state.state_content_size_bytes] for layer in memory]
    found = caches_of(
        KVCacheConfig(blocks, [], groups), {"state1": states[1], "state0": states[0], "kv0": kernel}
    )
    for layer, view in enumerate(found.values()):
        view[blocks - 1, 0, 0, page - 1] = layer + 1
    assert [list(view.shape) for view in found.values()] == [[4, 1, 1, page]] * 2
    assert memory[:, -1, -1].tolist() == [1, 2]
    starts = [view.data_ptr() - memory.data_ptr() for view in found.values()]
    assert starts == [0, 4 * page]


def test_only_one_group_that_keeps_everything_can_be_leased() -> None:
    assert keeps_all(Groups("FullAttention", (2,), ((),)))
    assert keeps_all(Groups("MLAAttention", (2,), ((),)))
    assert not keeps_all(Groups("SlidingWindow(128)", (2,), ((),)))
    assert not keeps_all(Groups("FullAttention(128)", (2,), ((),)))
    assert not keeps_all(Groups("2xFullAttention 4xSlidingWindow(128)", (2, 4), ((), ())))


def test_cached_blocks_in_a_row_end_at_the_first_that_is_missing() -> None:
    pool = FakePool(8, hash_block_size=4)
    request = FakeRequest("r", [], block_hashes=list("abcdef"))
    pool.cached = {("b", 0): 5, ("c", 0): 2, ("e", 0): 3, ("d", 1): 4}
    assert [block.block_id for block in cached_run(pool, 4, request, 1, 6)] == [5, 2]
    assert cached_run(pool, 4, request, 0, 6) == []
    assert [block.block_id for block in cached_run(pool, 4, request, 1, 2)] == [5]
    # Two hashes for each block: the last one names it.
    assert [block.block_id for block in cached_run(pool, 8, request, 0, 3)] == [5]
