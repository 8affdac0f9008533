"""The plan for tensor- and pipeline-parallel splits, against an oracle that moves every page."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

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

Cells = dict[tuple[int, int, int], tuple[int, int]]
"""(rank, layer of the region, head of the region) → (layer, head) of the model."""

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


def contents(rects: list[Rect]) -> Cells:
    return {
        (rank, layer, head): (rect.first_layer + layer, rect.first_head + head)
        for rank, rect in enumerate(rects)
        for layer in range(rect.layers)
        for head in range(rect.heads)
    }


def carry_out(
    routes: list[Route], sources: list[Rect], targets: list[Rect]
) -> tuple[Cells, Counter[tuple[int, int, int]]]:
    """What the targets hold after all routes, and how often each place was written."""
    found, held = {}, contents(sources)
    times: Counter[tuple[int, int, int]] = Counter()
    for route in routes:
        here, to = (
            route.part.within(sources[route.source]),
            route.part.within(targets[route.target]),
        )
        for layer, head in product(range(here.layers), range(here.heads)):
            there = (route.target, to.first_layer + layer, to.first_head + head)
            times[there] += 1
            found[there] = held[route.source, here.first_layer + layer, here.first_head + head]
    return found, times


def check(sources: list[Rect], targets: list[Rect]) -> list[Route]:
    routes = plan_routes(sources, targets)
    found, times = carry_out(routes, sources, targets)
    assert found == contents(targets)
    assert set(times.values()) == {1}
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
