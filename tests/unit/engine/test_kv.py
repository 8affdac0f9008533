"""What the KV of an executor without a model is called, and how layers store KV."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine.kv import (
    NO_ATTENTION,
    UNSCALED,
    RankAttention,
    executor_without_model,
    join_attention,
)


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


Scale = tuple[float, ...]


def told(k: Scale, v: Scale) -> tuple[str, str]:
    """What is told of two layers, one of them without scales."""
    layers = {("l.0", (1.0,), (1.0,)), ("l.1", k, v)}
    return join_attention([RankAttention(frozenset({"FLASH_ATTN"}), frozenset(layers))])


def test_scales_are_told_apart_and_ones_are_none_whatever_the_shape() -> None:
    assert join_attention([RankAttention()]) == (NO_ATTENTION, UNSCALED)
    for ones in ((1.0,), (1.0,) * 4):
        assert told(ones, (1.0,)) == ("FLASH_ATTN", UNSCALED)
    low, high = (0.25,), (0.5,)
    found = {told(*pair)[1] for pair in ((low, low), (high, low), (low, high), (low * 4, low))}
    assert len(found - {UNSCALED}) == 4
    assert all(len(digest) == 16 for digest in found)
