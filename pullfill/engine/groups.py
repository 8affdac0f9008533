"""Models whose KV cache vLLM splits into groups, and the order in which a job names their blocks.

The layers of a group share one table of blocks for each request. A model with windows, for example,
has a group of the layers that see the whole prompt, and groups of the layers that see its end. All
groups take their blocks from one pool, so a block id names one block, whatever its group. A block
has memory for as many layers as the largest group has.

vLLM drops the blocks that a window has left behind. In a request's table their places hold the id
of an empty block. So a job names, for each group, only the blocks from some position on. A position
counts blocks of the prompt.

    position        0    1    2    3
    all tokens     11   12   13   14        from position 0
    a window        -    -   23   24        from position 2
    the job names  11   12   13 23   14 24
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

EMPTY = 0
"""vLLM's id of the empty block."""


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """Which blocks are named: by position in the prompt, at one position by group.

    begins: for each group, the position of its first block that is named."""

    begins: tuple[int, ...] = (0,)

    def before(self, position: int) -> int:
        """Return how many blocks come before this position."""
        return sum(max(0, position - first) for first in self.begins)

    def ids(self, tables: Sequence[Sequence[int]], start: int, stop: int) -> list[int]:
        """Return the blocks at the positions from `start` to before `stop`.

        tables: for each group, the block ids of the request by position."""
        if len(self.begins) == 1:
            return list(tables[0][max(start, self.begins[0]) : stop])
        named: list[int] = []
        marks = sorted({start, stop, *(at for at in self.begins if start < at < stop)})
        for first, last in pairwise(marks):
            groups = [
                table[first:last]
                for table, begin in zip(tables, self.begins, strict=True)
                if begin <= first
            ]
            named += chain.from_iterable(zip(*groups, strict=True))
        return named


ONE_TABLE = BlockOrder()


@dataclass(frozen=True, slots=True)
class Groups:
    """The KV cache groups of a model.

    kinds: what the layers of each group see. Workers that exchange KV have the same.
    layers: number of layers of each group."""

    kinds: str = ""
    layers: tuple[int, ...] = ()


ONE_GROUP = Groups()


def kept_from(kv_cache_manager: Any) -> Callable[[int], tuple[int, ...]]:
    """Return a function from a number of prompt tokens to a position for each group.

    Once all these tokens are computed, vLLM keeps the blocks of the group from there on."""
    managers = kv_cache_manager.coordinator.single_type_managers

    def kept(tokens: int) -> tuple[int, ...]:
        return tuple(m.get_num_skipped_tokens(tokens) // m.block_size for m in managers)

    return kept


def groups_of(kv_cache_config: Any) -> Groups:
    """Return what vLLM has made of the model's layers."""
    groups = kv_cache_config.kv_cache_groups
    layers = tuple(len(group.layer_names) for group in groups)
    kinds = [_kind(group.kv_cache_spec) for group in groups]
    if len(groups) == 1:  # a pipeline stage has a part of the layers
        return Groups(kinds[0], layers)
    return Groups(" ".join(map("{}x{}".format, layers, kinds)), layers)


def _kind(spec: Any) -> str:
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    name = type(spec).__name__.removesuffix("Spec")
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
    if len(specs) == 1 and not isinstance(specs[0], MambaSpec):
        return ""
    for spec in specs:
        if not isinstance(spec, (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)):
            return f"pullfill does not move the state of {_kind(spec)} layers yet"
    if len({spec.page_size_bytes for spec in specs}) > 1:
        return "its KV cache groups have blocks of different sizes"
    sizes = {spec.block_size for spec in specs}
    if sizes != {vllm_config.cache_config.block_size}:
        return f"its KV cache groups have blocks of {sorted(sizes)} tokens"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "pullfill moves several KV cache groups only without pipeline parallelism"
    return ""


def apart(kv_caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return one layer for each piece of memory, by address: layers of several groups share it."""
    found = {cache.data_ptr(): name for name, cache in kv_caches.items()}
    return {found[address]: kv_caches[found[address]] for address in sorted(found)}
