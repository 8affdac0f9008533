"""A mock executor whose KV and states can be checked.

It has the KV cache groups of the model that a worker is given, with pages of vLLM's sizes, but no
weights. A page of KV holds its tokens. A state holds how many tokens it stands for, and a number
made of them one after the other. Both are where vLLM's model runner keeps them: a state is in the
block of the last token that a step computes.

The next token follows from the number, if all layers hold what the tokens say. Else it is WRONG.
So an answer shows that each block of a remote prefill was written, in the right place, and with
the state after the right token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from pullfill.testing.mock_executor import MockExecutor, MockModel, MockSettings

WRONG = 3
_ORDINARY = range(32, 332)
_PRIME = (1 << 61) - 1


def number_of(tokens: Iterable[int], before: int = 0) -> int:
    """The number of tokens that come after others."""
    for token in tokens:
        before = (before * 1_000_003 + token + 1) % _PRIME
    return before


def answer_to(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that follow a prompt."""
    number, answer = number_of(prompt), list[int]()
    for _ in range(count):
        answer.append(_ORDINARY[number % len(_ORDINARY)])
        number = number_of(answer[-1:], number)
    return answer


@dataclass(slots=True)
class Row:
    """A request in the engine. tables: its blocks, for each KV cache group."""

    tokens: list[int]
    tables: list[list[int]]


@dataclass(slots=True)
class Group:
    """The memory of a KV cache group. pages: [layer, block, byte]."""

    index: int
    spec: Any
    pages: torch.Tensor

    @property
    def is_state(self) -> bool:
        return isinstance(self.spec, MambaSpec)

    @property
    def parts(self) -> list[int]:
        """Where the parts of a state begin in a page."""
        spec = self.spec
        sizes = [
            prod(shape) * dtype.itemsize
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        ]
        return [sum(sizes[:index]) for index in range(len(sizes))]

    def numbers(self, row: Row, position: int, at: int = 0) -> Any:
        """What all layers hold at a byte of the block at a position, as [layer, int64]."""
        block = row.tables[self.index][position]
        assert block, f"group {self.index} has no block at position {position}"
        page = self.pages[:, block, at:]
        return page[:, : page.shape[1] // 8 * 8].numpy().view(np.int64)

    def compute(self, row: Row, first: int, last: int) -> None:
        """Do what a step does that computes the tokens from `first` to before `last`."""
        size = self.spec.block_size
        if not self.is_state:
            for at in range(first, last):
                self.numbers(row, at // size)[:, at % size] = row.tokens[at] + 1
            return
        for at in self.parts:
            done, number = 0, 0
            if first:
                done, number = self.numbers(row, (first - 1) // size, at)[0, :2].tolist()
            number = number_of(row.tokens[first:last], number)
            self.numbers(row, (last - 1) // size, at)[:, :2] = done + last - first, number

    def holds(self, row: Row) -> bool:
        """Whether all layers hold what the tokens of a request say."""
        size, count = self.spec.block_size, len(row.tokens)
        if self.is_state:
            said = [count, number_of(row.tokens)]
            last = (count - 1) // size
            return all((self.numbers(row, last, at)[:, :2] == said).all() for at in self.parts)
        return all(
            (self.numbers(row, at // size)[:, at % size] == token + 1).all()
            for at, token in enumerate(row.tokens)
        )

    def views(self) -> list[torch.Tensor]:
        """What vLLM registers for each layer: [block, head, token, K and V], or bytes of states."""
        blocks, spec = self.pages.shape[1], self.spec
        if self.is_state:
            used = spec.state_content_size_bytes
            return [layer[:, None, None, :used] for layer in self.pages]
        shape = (blocks, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
        return [layer.view(spec.dtype).view(shape) for layer in self.pages]


class Recurrence(MockModel):
    """Computes tokens, KV and states of the requests that vLLM schedules."""

    def __init__(self, settings: MockSettings, groups: Sequence[Group]) -> None:
        super().__init__(settings)
        self._groups = groups
        self._rows: dict[str, Row] = {}

    def step(self, scheduled: Any) -> dict[str, list[int]]:
        for request in scheduled.finished_req_ids:
            self._rows.pop(request, None)
        computed: dict[str, int] = {}
        for new in scheduled.scheduled_new_reqs:
            self._rows[new.req_id] = Row(list(new.prompt_token_ids), list(map(list, new.block_ids)))
            computed[new.req_id] = new.num_computed_tokens
        old = scheduled.scheduled_cached_reqs
        assert not old.resumed_req_ids, "nothing is preempted here"
        for request, more, done in zip(
            old.req_ids, old.new_block_ids, old.num_computed_tokens, strict=True
        ):
            for table, blocks in zip(self._rows[request].tables, more or (), strict=False):
                table.extend(blocks)
            computed[request] = done
        return {request: self._next(request, done, scheduled) for request, done in computed.items()}

    def _next(self, request: str, done: int, scheduled: Any) -> list[int]:
        row, last = self._rows[request], done + scheduled.num_scheduled_tokens[request]
        for group in self._groups:
            group.compute(row, done, last)
        if last < len(row.tokens):
            return []
        right = all(group.holds(row) for group in self._groups)
        row.tokens += answer_to(row.tokens, 1) if right else [WRONG]
        return row.tokens[-1:]


class RecurrentExecutor(MockExecutor):
    """See the module. For one rank on a CPU."""

    KV_KIND = "recurrent mock"

    def _init_executor(self) -> None:
        super()._init_executor()
        platform: Any = current_platform
        # vLLM does that with the attention backend of the layers, which are not here.
        platform._align_hybrid_block_size(self.vllm_config, CPUAttentionBackend)

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        """Those of the model's attention layers and of its layers with a state."""
        config, cache = self.vllm_config, self.cache_config
        model, parallel = config.model_config, config.parallel_config
        found: tuple[Any, str] = ModelRegistry.resolve_model_cls(
            model.architecture, model_config=model
        )
        spec = FullAttentionSpec(
            block_size=cache.block_size,
            num_kv_heads=model.get_num_kv_heads(parallel),
            head_size=model.get_head_size(),
            dtype=model.dtype,
        )
        state = MambaSpec(
            block_size=cache.mamba_block_size,
            shapes=found[0].get_mamba_state_shape_from_config(config),
            dtypes=found[0].get_mamba_state_dtype_from_config(config),
            page_size_padded=cache.mamba_page_size_padded,
            mamba_cache_mode=cache.mamba_cache_mode,
        )
        layers = range(model.get_num_layers(parallel))
        kv = {f"layers.{layer}.attention": spec for layer in layers}
        return [{**kv, **{f"layers.{layer}.state": state for layer in layers}}]

    def _allocate(self, config: Any) -> dict[str, Any]:
        """Groups share their memory, as vLLM's do."""
        groups = config.kv_cache_groups
        page = groups[0].kv_cache_spec.page_size_bytes
        shape = (max(len(group.layer_names) for group in groups), config.num_blocks, page)
        buffer = torch.zeros(torch.Size(shape).numel(), dtype=torch.int8).view(shape)
        memory = [
            Group(index, group.kv_cache_spec, buffer[: len(group.layer_names)])
            for index, group in enumerate(groups)
        ]
        self._model = Recurrence(self._settings, memory)
        names = [name for group in groups for name in group.layer_names]
        return dict(zip(names, [view for some in memory for view in some.views()], strict=True))
