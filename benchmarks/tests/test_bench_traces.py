"""How the cost of traces is judged."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.bench_traces import PEER, rows_of
from benchmarks.live import BenchError

OPTIONS = Namespace(rounds=2, streams=2, prompt=600, tokens=100)


@pytest.mark.parametrize(("ms", "ok"), [(101.0, True), (103.0, False)])
def test_more_than_two_percent_is_too_much(ms: float, ok: bool) -> None:
    cost = {"with traces": [ms, 500.0, ms, 1.0, ms], PEER: [100.0] * 5}
    first, *_ = rows_of(cost, 60, OPTIONS)
    assert first.ok is ok
    assert first.ratio == pytest.approx(ms / 100)


def test_nothing_is_compared_if_no_spans_came() -> None:
    with pytest.raises(BenchError, match="was tracing on"):
        rows_of({"with traces": [1.0], PEER: [1.0]}, 0, OPTIONS)
