"""What makes the same KV bytes mean something else: the attention backend, and the scales."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine.attention import (
    NO_ATTENTION,
    UNSCALED,
    Attention,
    RankAttention,
    join,
    of_rank,
)
from tests.support.late import Late
from tests.support.workers import compat

torch: Any = Late("torch")

HEADS = 4


def layer(k: Any, v: Any, backend: str = "FLASH_ATTN") -> SimpleNamespace:
    """An attention layer of vLLM, as it is once the weights are loaded."""
    kind = SimpleNamespace(get_name=lambda: backend)
    return SimpleNamespace(
        _k_scale=torch.tensor(k), _v_scale=torch.tensor(v), get_attn_backend=lambda: kind
    )


def rank(layers: dict[str, Any]) -> RankAttention:
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    return of_rank(config, [*layers, "shared.with.another"])


def alone(k: Any, v: Any, backend: str = "FLASH_ATTN") -> Attention:
    return join({(0, 0): rank({"l.0": layer(k, v, backend), "l.1": layer(k, v, backend)})}, HEADS)


def test_an_unscaled_cache_says_so_whatever_the_shape() -> None:
    assert alone(1.0, 1.0) == alone([1.0] * HEADS, [1.0]) == Attention("FLASH_ATTN", UNSCALED)


def test_without_a_model_there_is_nothing() -> None:
    assert join({(0, 0): rank({})}, HEADS) == Attention(NO_ATTENTION, UNSCALED)


@pytest.mark.parametrize(("k", "v"), [(0.5, 0.25), (0.25, 0.5), ([0.25, 0.5, 0.5, 0.5], 0.25)])
def test_other_scales_are_told_apart(k: Any, v: Any) -> None:
    other = alone(k, v)
    assert other.scales != alone(0.25, 0.25).scales != UNSCALED
    assert len(other.scales) == 16


def test_a_layer_with_other_scales_is_seen() -> None:
    layers = {"l.0": layer(0.5, 0.5), "l.1": layer(0.5, 0.5)}
    swapped = {"l.0": layer(0.5, 0.5), "l.1": layer(0.5, 0.75)}
    assert join({(0, 0): rank(layers)}, HEADS) != join({(0, 0): rank(swapped)}, HEADS)


def test_backends_of_all_layers_count() -> None:
    mixed = {"l.0": layer(1.0, 1.0, "TRITON_ATTN"), "l.1": layer(1.0, 1.0, "FLASHINFER")}
    assert join({(0, 0): rank(mixed)}, HEADS).backend == "FLASHINFER+TRITON_ATTN"


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_split_model_has_the_scales_of_the_whole(tp: int) -> None:
    """Per tensor every rank has the same number; per head each has its own heads', and with more
    ranks than heads neighbours have the same head."""
    k, v = [0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]

    def mine(values: list[float], number: int) -> list[float]:
        count = max(1, HEADS // tp)
        first = number * HEADS // tp
        return values[first : first + count]

    split = {(0, n): rank({"l": layer(mine(k, n), mine(v, n))}) for n in range(tp)}
    assert join(split, HEADS) == join({(0, 0): rank({"l": layer(k, v)})}, HEADS)
    one = {(0, n): rank({"l": layer(0.5, 0.25)}) for n in range(tp)}
    assert join(one, HEADS) == join({(0, 0): rank({"l": layer(0.5, 0.25)})}, HEADS)


def test_pipeline_stages_add_up() -> None:
    layers = {"l.0": layer(0.5, 0.5), "l.1": layer(0.25, 0.5)}
    stages = {(n, 0): rank({name: made}) for n, (name, made) in enumerate(layers.items())}
    assert join(stages, HEADS) == join({(0, 0): rank(layers)}, HEADS)


@pytest.mark.parametrize(
    "change", [{"attention": "TRITON_ATTN"}, {"kv_scales": "0123456789abcdef"}]
)
def test_workers_that_differ_do_not_fit(change: dict[str, str]) -> None:
    assert [name for name, *_ in compat().differs_from(compat(**change))] == list(change)
    assert compat().hash() != compat(**change).hash()
