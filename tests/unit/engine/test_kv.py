"""How layers store KV, joined over ranks."""

from __future__ import annotations

from pullfill.engine.kv import NO_ATTENTION, UNSCALED, RankAttention, join_attention

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
