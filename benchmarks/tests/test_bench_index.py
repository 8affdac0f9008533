"""The parts of bench_index, at a small scale: they measure what they say."""

from __future__ import annotations

from benchmarks import bench_index
from benchmarks.bench_index import PROMPT, Plan, Scale

SMALL = Scale(prompts=32, workers=3, churned=40_000, lookups=50)


def test_every_number_is_measured() -> None:
    rows, _ = bench_index.measure(SMALL)
    names = [row.metric for row in rows]
    assert len(set(names)) == len(names)
    # The kernel may take back memory of this process meanwhile: it can be less than before.
    memory = [row.value for row in rows if row.metric.startswith("resident memory")]
    assert len(memory) == 2
    assert all(row.value is not None and (row.value >= 0 or row.value in memory) for row in rows)
    assert sum(bool(row.target) for row in rows) == 11


def test_the_plan_says_the_same_both_ways() -> None:
    plan = Plan(SMALL)
    assert plan.prompts.shape == (32, PROMPT)
    assert len(set(plan.prompts.ravel().tolist())) == SMALL.blocks
    for worker in range(SMALL.workers):
        held = set(plan.of(worker).tolist())
        for number, prompt in enumerate(plan.prompts):
            assert (worker in plan.at(number)) == (set(prompt.tolist()) <= held)
    assert plan.at(0) == [0, 1, 2]


def test_the_longest_call_is_kept() -> None:
    held = bench_index.Held()
    assert held.time("a", lambda: sum(range(10_000))) == 49_995_000
    before = held.longest["a"]
    held.time("a", lambda: None)
    assert held.longest["a"] == before
