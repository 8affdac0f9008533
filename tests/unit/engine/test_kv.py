"""What the KV of an executor without a model is called, and how layers store KV."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine.kv import (
    NO_ATTENTION,
    UNSCALED,
    Attention,
    attention_of_rank,
    executor_without_model,
    join_attention,
)
from tests.support.late import Late


class Invents:
    """An executor as vLLM's flag may name it: it computes no model."""

    KV_KIND = "invented"


class Computes:
    """One that somebody else wrote: it computes the model."""


BY_PATH = f"{Invents.__module__}.Invents"


@pytest.mark.parametrize(
    ("named", "kind"),
    [
        (BY_PATH, "invented"),
        (Invents, "invented"),
        ("uni", None),
        (None, None),
        (Computes, None),
        (f"{__name__}.Computes", None),
    ],
)
def test_an_executor_without_a_model_says_what_its_kv_is(named: Any, kind: str | None) -> None:
    """Workers of two kinds exchange nothing: it is a field of their compatibility records."""
    parallel = SimpleNamespace(distributed_executor_backend=named)
    found = executor_without_model(SimpleNamespace(parallel_config=parallel))
    assert getattr(found, "KV_KIND", None) == kind


torch: Any = Late("torch")


def layer(k: Any, v: Any, backend: str = "FLASH_ATTN") -> SimpleNamespace:
    """An attention layer of vLLM, as it is once the weights are loaded."""
    kind = SimpleNamespace(get_name=lambda: backend)
    return SimpleNamespace(
        _k_scale=torch.tensor(k), _v_scale=torch.tensor(v), get_attn_backend=lambda: kind
    )


def joined(*ranks: dict[str, Any]) -> Attention:
    """What is told of ranks that have these layers."""
    told = []
    for layers in ranks:
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
        told.append(attention_of_rank(config, [*layers, "shared.with.another"]))
    return join_attention(told)


def test_an_unscaled_cache_says_so_whatever_the_shape() -> None:
    assert joined({}) == Attention(NO_ATTENTION, UNSCALED)
    for ones in (1.0, [1.0] * 4):
        assert joined({"l": layer(ones, 1.0)}) == Attention("FLASH_ATTN", UNSCALED)


def test_other_scales_are_told_apart() -> None:
    scales = (0.25, 0.25), (0.5, 0.25), (0.25, 0.5), ([0.25, 0.5, 0.5, 0.5], 0.25)
    told = {joined({"l.0": layer(1.0, 1.0), "l.1": layer(*pair)}).scales for pair in scales}
    assert len(told - {UNSCALED}) == len(scales)
    assert all(len(digest) == 16 for digest in told)
