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
    caches_of,
    groups_of,
    keeps_all,
    kept_from,
    why_local,
)
from tests.support.late import Late

torch: Any = Late("torch")
caches: Any = Late("vllm.v1.kv_cache_interface")


LENGTHS = (0, 1, 63, 64, 79, 300)


def models() -> dict[str, tuple[list[Any], str, Any]]:
    """KV cache groups of models, as vLLM describes them, and their kinds.

    The last is where the blocks begin that vLLM keeps of prompts of LENGTHS tokens, for each group,
    or why the prompts stay local."""
    common: dict[str, Any] = dict(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    full = caches.FullAttentionSpec(**common)

    def window(**more: Any) -> Any:
        return caches.SlidingWindowSpec(**common | more, sliding_window=64)

    def state(mode: str = "align", tokens: int = 16, **more: Any) -> Any:
        more.setdefault("page_size_padded", full.page_size_bytes)
        shapes, dtypes = ((3, 8), (2, 8)), (torch.bfloat16, torch.float32)
        return caches.MambaSpec(
            block_size=tokens, shapes=shapes, dtypes=dtypes, mamba_cache_mode=mode, **more
        )

    def mamba(mode: str = "align") -> str:
        return f"Mamba(MAMBA2,{mode},3x8:bfloat16,2x8:float32)"

    drafts, small = state(num_speculative_blocks=2), state(page_size_padded=None)
    both, beside = "1xFullAttention 1xSlidingWindow(64)", f"1xFullAttention 1x{mamba()}"
    in_full, in_window = [0] * 6, [0, 0, 0, 0, 1, 14]
    at_end = [0, 0, 3, 3, 4, 18]
    return {
        "full": ([full], "FullAttention", [in_full]),
        "full that stands for a window": (
            [caches.FullAttentionSpec(**common, sliding_window=64)], "FullAttention(64)", [in_full],
        ),
        "window": ([window()], "SlidingWindow(64)", [in_window]),
        "chunks": (
            [caches.ChunkedLocalAttentionSpec(**common, attention_chunk_size=64)],
            "ChunkedLocalAttention(64)", [[0, 0, 0, 4, 4, 16]],
        ),
        "both": ([full, window()], both, [in_full, in_window]),
        "state": ([state()], mamba(), "only beside KV of attention layers"),
        "kv and states": ([full, state()], beside, [in_full, at_end]),
        "no prefix cache": (
            [state("none", 512), full], f"1x{mamba('none')} 1xFullAttention", [at_end, in_full],
        ),
        "states of drafts": ([full, drafts], beside, "states of Mamba layers with speculation"),
        "every state": (
            [full, state("all")], f"1xFullAttention 1x{mamba('all')}", "--mamba-cache-mode all",
        ),
        "small states": ([full, small], beside, "blocks of different sizes"),
        "ranks": ([full, state()], beside, "only between workers with one rank"),
        "tier": ([full, state()], beside, "beside --kv-offloading-size"),
        "heads": ([full, window(num_kv_heads=4, head_size=4)], both, "different heads"),
        "blocks": ([full, window(block_size=32)], both, "blocks of different sizes"),
    }  # fmt: skip


def test_what_vllm_keeps_of_a_prompt_and_which_models_stay_local() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    for name, (specs, kinds, expected) in models().items():
        groups = [caches.KVCacheGroupSpec([f"{i}"], spec) for i, spec in enumerate(specs)]
        config, cached = caches.KVCacheConfig(32, [], groups), name != "no prefix cache"
        vllm_config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(
                pipeline_parallel_size=1, tensor_parallel_size=2 if name == "ranks" else 1
            ),
            cache_config=SimpleNamespace(block_size=16),
            kv_transfer_config=SimpleNamespace(
                kv_connector_extra_config={BESIDE_TIER: name == "tier"}
            ),
        )
        told, why = groups_of(config), why_local(vllm_config, config)
        assert told.kinds == kinds, name
        if isinstance(expected, str):
            assert expected in why, name
            continue
        assert why == "", name
        size = 16 if cached else 512
        manager = KVCacheManager(
            config, max_model_len=512, scheduler_block_size=size, hash_block_size=size,
            enable_caching=cached,
        )  # fmt: skip
        kept = [kept_from(manager, 16)(tokens) for tokens in LENGTHS]
        assert list(map(list, zip(*kept, strict=True))) == expected, name
        # Without a prefix cache a state has one block for all positions.
        tables = by_position(manager, 16)([[7 + i] for i in range(len(specs))])
        assert [len(table) for table in tables] == [1 if cached else 512 // 16, 1][: len(specs)]
        if not cached:
            assert told.states == ((("bfloat16", 48), ("float32", 64)), ())


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
    full = caches.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    page, blocks = full.page_size_bytes, 4
    state = caches.MambaSpec(
        block_size=16,
        shapes=((3, 8),),
        dtypes=(torch.float32,),
        page_size_padded=page,
        mamba_cache_mode="align",
    )
    groups = [
        caches.KVCacheGroupSpec(["kv0"], full),
        caches.KVCacheGroupSpec(["state0", "state1"], state),
    ]
    memory = torch.zeros((2, blocks, page), dtype=torch.int8)
    kernel = memory[0].view(torch.float32).view(2 * blocks, 2, 8, 16)  # of 8 tokens
    states = [layer[:, None, None, : state.state_content_size_bytes] for layer in memory]
    found = caches_of(
        caches.KVCacheConfig(blocks, [], groups),
        {"state1": states[1], "state0": states[0], "kv0": kernel},
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
