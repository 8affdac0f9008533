"""The plan for tensor- and pipeline-parallel splits, against an oracle that moves every page."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pullfill.errors import IncompatibleError
from pullfill.transfer.contract import Rect
from pullfill.transfer.layout import (
    Route,
    head_range,
    plan_routes,
)

LAYERS = 4
SIZES = (1, 2, 3, 4, 6, 8, 16)
HEADS = (1, 2, 3, 4, 8, 12, 16)


def fits(heads: int, tp: int) -> bool:
    return heads % tp == 0 or tp % heads == 0


COMBINATIONS = [(p, d, k) for p, d, k in product(SIZES, SIZES, HEADS) if fits(k, p) and fits(k, d)]


def worker(heads: int, tp: int, stages: tuple[int, ...] = (LAYERS,)) -> list[Rect]:
    """Ranks in vLLM's order: all of one pipeline stage, then the next."""
    rects = []
    for stage, layers in enumerate(stages):
        for rank in range(tp):
            first, count = head_range(heads, tp, rank)
            rects.append(Rect(first, count, sum(stages[:stage]), layers))
    return rects


def part(cells: np.ndarray, rect: Rect) -> np.ndarray:
    """[layer, head] of a rectangle, as a view."""
    return cells[rect.first_layer : rect.end_layer, rect.first_head : rect.end_head]


def check(sources: list[Rect], targets: list[Rect]) -> list[Route]:
    """Carry the routes out. What comes to a place is added up, so it must come once."""
    routes = plan_routes(sources, targets)
    shape = targets[-1].end_layer, targets[-1].end_head
    model = np.arange(1, 1 + np.prod(shape)).reshape(shape)
    found = [np.zeros((rect.layers, rect.heads), int) for rect in targets]
    for route in routes:
        source, target = sources[route.source], targets[route.target]
        to = part(found[route.target], route.part.within(target))
        to += part(part(model, source), route.part.within(source))
    for rect, cells in zip(targets, found, strict=True):
        assert (cells == part(model, rect)).all()
    return routes


def test_a_latent_cache_goes_to_every_rank_whole() -> None:
    for p, d in product(SIZES, SIZES):
        routes = check(worker(1, p), worker(1, d))
        assert [r.target for r in routes] == list(range(d))
        # Holders of the same are used in turn: nobody does two shares while another does none.
        shares = Counter(r.source for r in routes)
        assert max(shares.values()) - min(shares[s] for s in range(min(p, d))) <= 1
        assert len(shares) == min(p, d)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(COMBINATIONS),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.data(),
)
def test_any_split(combination: tuple[int, int, int], ours: list[int], data: st.DataObject) -> None:
    p, d, k = combination
    total = sum(ours)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, total - 1)), max_size=total - 1)))
    edges = [0, *(c for c in cuts if c < total), total]
    theirs = tuple(b - a for a, b in pairwise(edges))
    check(worker(k, p, tuple(ours)), worker(k, d, theirs))


def test_what_nobody_holds_is_named() -> None:
    with pytest.raises(IncompatibleError, match=r"KV head 2 of layers 0\.\.3"):
        plan_routes(worker(2, 1), worker(4, 1))
    with pytest.raises(IncompatibleError, match=r"layers 4\.\.5"):
        plan_routes(worker(2, 1), worker(2, 1, (6,)))


@pytest.mark.parametrize(("heads", "tp"), [(3, 2), (8, 3), (2, 3), (6, 4)])
def test_heads_that_do_not_divide_are_refused(heads: int, tp: int) -> None:
    with pytest.raises(IncompatibleError, match=f"{heads} KV heads .* {tp} tensor-parallel"):
        head_range(heads, tp, 0)
