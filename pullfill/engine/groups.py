"""The KV cache groups of a model, and the order in which a job lists the blocks of all groups.

The layers of a group share one table of blocks for each request. All groups take their blocks from
one pool. A block has memory for as many layers as the largest group has. A job lists, for each
group, the blocks from some position on. A position counts blocks of the prompt.

    position        0    1    2    3
    full           11   12   13   14        from position 0
    window          -    -   23   24        from position 2
    the job lists  11   12   13 23   14 24
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# vLLM's id of its null block. It frees the blocks that a sliding window has left behind, and puts
# this one into their places in the table.
EMPTY = 0
# In the settings of our connector: whether vLLM offloads KV, too.
BESIDE_TIER = "beside_tier"


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """The blocks that a job lists: by position in the prompt, and at each position by group.

    begins: for each group, the position of its first block that is listed."""

    begins: tuple[int, ...] = (0,)

    def before(self, position: int) -> int:
        """Return how many of the listed blocks come before this position."""
        return sum(max(0, position - first) for first in self.begins)

    def ids(self, tables: Sequence[Sequence[int]], start: int, stop: int) -> list[int]:
        """Return the listed blocks at the positions from `start` to before `stop`.

        tables: for each group, the block ids of the request by position."""
        if len(self.begins) == 1:
            return list(tables[0][max(start, self.begins[0]) : stop])
        listed: list[int] = []
        marks = sorted({start, stop, *(at for at in self.begins if start < at < stop)})
        for first, last in pairwise(marks):
            groups = [
                table[first:last]
                for table, begin in zip(tables, self.begins, strict=True)
                if begin <= first
            ]
            listed += chain.from_iterable(zip(*groups, strict=True))
        return listed

    def tables(self, listed: Iterable[int], start: int, stop: int) -> list[list[int]]:
        """The inverse of `ids`: for each group, the blocks by position. EMPTY: none is listed.

        listed: the blocks at the positions from `start` to before `stop`."""
        blocks = iter(listed)
        tables = [[EMPTY] * start for _ in self.begins]
        for at in range(start, stop):
            for table, begin in zip(tables, self.begins, strict=True):
                table.append(next(blocks) if begin <= at else EMPTY)
        return tables


@dataclass(frozen=True, slots=True)
class Groups:
    """The KV cache groups of a model.

    kinds: the kind of each group, e.g. `2xFullAttention 4xSlidingWindow(128)`. Workers that
    exchange KV have the same.
    layers: number of layers of each group.
    states: for each group, the parts of a layer's page as (type of its numbers, bytes), one after
    another, if they are a state. Empty: the page holds KV."""

    kinds: str = ""
    layers: tuple[int, ...] = ()
    states: tuple[tuple[tuple[str, int], ...], ...] = ()


ONE_GROUP = Groups()
_KEEP_ALL = ("", "FullAttention", "MLAAttention")


def keeps_all(groups: Groups) -> bool:
    """Whether there is one group, and it keeps the blocks of the whole prompt."""
    return groups.kinds in _KEEP_ALL


Tables = Sequence[Sequence[int]]


def kept_from(kv_cache_manager: Any, block_size: int) -> Callable[[int], tuple[int, ...]]:
    """Return a function that takes a number of prompt tokens and returns a position for each group.

    It is the position of the first block that vLLM still keeps once these tokens are computed.

    kv_cache_manager: vLLM's.
    block_size: number of tokens of a position."""
    managers = kv_cache_manager.coordinator.single_type_managers

    def kept(tokens: int) -> tuple[int, ...]:
        # Of no tokens vLLM says -1 for a state.
        return tuple(max(0, m.get_num_skipped_tokens(tokens)) // block_size for m in managers)

    return kept


def cached_block(pool: Any, block_size: int, request: Any, position: int, group: int) -> Any:
    """Return the request's block at a position of a KV cache group, if it is cached. Else None.

    pool: vLLM's BlockPool.
    block_size: number of tokens of a block.
    request: vLLM's."""
    found = pool.get_cached_block(hash_at(pool, block_size, request, position), [group])
    return found[0] if found else None


def hash_at(pool: Any, block_size: int, request: Any, position: int) -> Any:
    """Return vLLM's hash of the request's tokens up to the end of the block at this position.

    For the parameters see `cached_block`."""
    # With --prefix-match-unit a block has several hashes. The last one is over all its tokens.
    hashes = block_size // pool.hash_block_size
    return request.block_hashes[(position + 1) * hashes - 1]


def cached_run(pool: Any, block_size: int, request: Any, start: int, stop: int) -> list[Any]:
    """Return the request's cached blocks from position `start` on, up to the first that is missing.

    For models with one KV cache group. For the parameters see `cached_block`."""
    found: list[Any] = []
    for position in range(start, stop):
        if (block := cached_block(pool, block_size, request, position, 0)) is None:
            break
        found.append(block)
    return found


def by_position(kv_cache_manager: Any, block_size: int) -> Callable[[Tables], Tables]:
    """Return a function that takes a request's block tables and gives each position its entry.

    Without prefix caching vLLM's table of a state has one entry, for as many tokens as a prompt can
    have. For the parameters see `kept_from`."""
    managers = kv_cache_manager.coordinator.single_type_managers
    spans = [-(-m.block_size // block_size) for m in managers]

    def spread(tables: Tables) -> Tables:
        if max(spans) == 1:
            return tables
        return [
            [block for block in table for _ in range(span)]
            for table, span in zip(tables, spans, strict=True)
        ]

    return spread


def groups_of(kv_cache_config: Any) -> Groups:
    """Return the groups of vLLM's KVCacheConfig."""
    groups = kv_cache_config.kv_cache_groups
    layers = tuple(len(group.layer_names) for group in groups)
    kinds = [_kind(group.kv_cache_spec) for group in groups]
    states = tuple(_state(group.kv_cache_spec) for group in groups)
    if len(groups) == 1:  # the number is left out: pipeline stages may differ in it
        return Groups(kinds[0], layers, states)
    return Groups(" ".join(map("{}x{}".format, layers, kinds)), layers, states)


# Layers such as Mamba's have a state instead of KV. It stands for all tokens computed so far, and
# each step replaces it. vLLM keeps the one after the last token, in the block at its position. So
# such a group is like a window of one token: a job lists its last block, which is written when the
# last token is computed. The decode worker computes at least the last token of a prompt itself. So
# the job ends before that token, and so does the prefill worker's state.
def _state(spec: Any) -> tuple[tuple[str, int], ...]:
    parts = zip(getattr(spec, "shapes", ()), getattr(spec, "dtypes", ()), strict=True)
    return tuple((_name(dtype), prod(shape) * dtype.itemsize) for shape, dtype in parts)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(spec: Any) -> str:
    name = type(spec).__name__.removesuffix("Spec")
    if hasattr(spec, "mamba_cache_mode"):
        # The order of a shape's dimensions is that of the bytes: vLLM stores conv states in two.
        parts = [
            "x".join(map(str, shape)) + f":{_name(dtype)}"
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        ]
        return f"{name}({','.join([spec.mamba_type.name, spec.mamba_cache_mode, *parts])})"
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return f"{name}({window})" if window else name


def why_local(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return why the KV of this model cannot be moved between workers. Empty: it can."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    caches = [spec for spec in specs if not isinstance(spec, MambaSpec)]
    if len(specs) == 1 and caches:
        return ""
    for spec in caches:
        if not isinstance(spec, (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)):
            return f"pullfill does not move the KV of {_kind(spec)} layers yet"
    if not caches:
        return "pullfill moves states of Mamba layers only beside KV of attention layers"
    if len({spec.page_size_bytes for spec in specs}) > 1:
        return "its KV cache groups have blocks of different sizes"
    if len({(spec.num_kv_heads, spec.head_size) for spec in caches}) > 1:
        return "its KV cache groups have different heads"  # ranks could not split them alike
    sizes = {spec.block_size for spec in caches}
    sizes |= {spec.block_size for spec in states if spec.mamba_cache_mode != "none"}
    if sizes != {vllm_config.cache_config.block_size}:
        return f"its KV cache groups have blocks of {sorted(sizes)} tokens"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "pullfill moves several KV cache groups only without pipeline parallelism"
    return _why_states_stay(vllm_config, states) if states else ""


def _why_states_stay(vllm_config: Any, states: Sequence[Any]) -> str:
    if vllm_config.parallel_config.tensor_parallel_size > 1:
        # A state has its own heads. Ranks do not split it as they split KV.
        return "pullfill moves states of Mamba layers only between workers with one rank"
    for mode in {spec.mamba_cache_mode for spec in states} - {"align", "none"}:
        return f"pullfill does not move states of Mamba layers with --mamba-cache-mode {mode}"
    if any(spec.num_speculative_blocks for spec in states):
        return "pullfill does not move states of Mamba layers with speculation"
    if vllm_config.kv_transfer_config.kv_connector_extra_config.get(BESIDE_TIER):
        # A load from there ends at a state in the middle, which has no block of its own.
        return "pullfill does not move states of Mamba layers beside --kv-offloading-size"
    return ""


def caches_of(
    kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Return the tensors that describe the memory of vLLM's KV caches, each address once.

    kv_caches: of each layer, as vLLM registers them."""
    groups = kv_cache_config.kv_cache_groups
    states = [group for group in groups if _state(group.kv_cache_spec)]
    if states:
        page = states[0].kv_cache_spec.page_size_bytes
        return as_bytes(kv_caches, kv_caches[states[0].layer_names[0]], page)
    return apart(kv_caches) if len(groups) > 1 else kv_caches


def apart(kv_caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return one tensor for each address. Layers of different groups share their memory."""
    found = {cache.data_ptr(): name for name, cache in kv_caches.items()}
    return {found[address]: kv_caches[found[address]] for address in sorted(found)}


def as_bytes(
    kv_caches: Mapping[str, torch.Tensor], state: torch.Tensor, page_bytes: int
) -> dict[str, torch.Tensor]:
    """Return views of whole pages as bytes, [block, 1, 1, byte], one for each address.

    So pages with KV and pages with states, which share their memory, are moved alike.

    state: the cache of a layer with a state. vLLM gives its pages as bytes, without their padding.
    It may cut pages with KV for its kernels, but not these."""
    import torch

    shape = (state.shape[0], 1, 1, page_bytes)
    strides = (state.stride(0), page_bytes, page_bytes, 1)
    return {
        name: torch.empty(0, dtype=state.dtype, device=state.device).set_(
            cache.untyped_storage(), cache.storage_offset() * cache.element_size(), shape, strides
        )
        for name, cache in apart(kv_caches).items()
    }
