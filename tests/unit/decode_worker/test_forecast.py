"""How long a remote prefill will take, and what the router makes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.decode_worker.forecast import (
    BELIEVE_LINK_S,
    MAX_TIMEOUT_S,
    Forecast,
    Links,
)
from pullfill.prefill_worker.scheduler import Meter, StepPlan
from pullfill.wire import Load
from tests.support.fakes import FakeClock

BLOCK, BLOCK_BYTES = 16, 1e6


def forecaster() -> tuple[Links, FakeClock]:
    clock = FakeClock()
    return Links(clock), clock


def of(
    made: Links, tokens: int, depth: int = 0, own: int = 0, unwritten: int = 0, **loads: Load
) -> Forecast:
    """loads: of the prefill workers that pull, by name."""
    blocks = tokens // BLOCK
    return made.forecast(
        tokens, blocks, blocks * BLOCK_BYTES, loads=loads,
        done_tokens=sum(load.done_tokens for load in loads.values()), depth_tokens=depth,
        own_tokens=own, own_unwritten=unwritten,
    )  # fmt: skip


def measured(made: Links, link: str, seconds: float) -> None:
    """1000 blocks took so long, often enough to believe it."""
    for _ in range(3):
        made.wrote(link, 1000, seconds)


def load(rate: float, done: int = 0) -> Load:
    return Load(tokens_per_s=rate, done_tokens=done)


def test_the_wait_is_what_is_in_front_over_the_rate_of_all_that_pull() -> None:
    made, _ = forecaster()
    assert of(made, 100, p=load(1000), depth=5000).wait_s == 5
    assert of(made, 100, p=load(1000), q=load(3000), depth=8000).wait_s == 2
    assert of(made, 100, p=load(1000, done=2000), depth=5000).wait_s == 3
    assert of(made, 100, p=load(1000), own=4000).wait_s == 4, "not told to the queue yet"
    assert of(made, 100, p=load(1000, done=9000), depth=5000).wait_s == 0


def test_kv_that_is_not_written_yet_is_in_front_too() -> None:
    made, _ = forecaster()
    measured(made, "p", 10.0)
    told = of(made, 1600, depth=4000, unwritten=1200, p=load(1000), q=load(1000))
    assert told.wait_s == pytest.approx(6), "two links, 12 s of writing; 2 s of computation"
    assert told.claim_within_s == pytest.approx(24), "or all of it comes over one of them"


def test_the_writing_is_measured_by_link_and_the_slowest_sets_the_deadline() -> None:
    made, clock = forecaster()
    both = {"fast": load(1e6), "slow": load(1e6)}
    measured(made, "fast", 1.0)
    assert of(made, 16_000, **both).write_s == pytest.approx(1)
    measured(made, "slow", 3.0)
    told = of(made, 16_000, **both)
    assert told.write_s == pytest.approx(2), "whoever pulls it"
    assert told.commit_within_s == pytest.approx(2 * (3 + 0.016))
    alone = of(made, 16_000, fast=both["fast"])
    # A slow link kept prompts local for five minutes after its worker had left.
    assert alone.write_s == pytest.approx(1), "the other worker is gone"
    assert alone.commit_within_s == told.commit_within_s, "deadlines are careful"
    clock.advance(BELIEVE_LINK_S + 1)
    late = of(made, 16_000, **both)
    assert late.write_s == 0, "or nobody would ever measure it again"
    assert late.commit_within_s == told.commit_within_s, "but it has the time"
    clock.advance(MAX_TIMEOUT_S)
    forgotten, fresh = (of(one, 16_000, **both) for one in (made, forecaster()[0]))
    assert forgotten == fresh, "a worker that is gone keeps no long prompt local for ever"


def task(done_blocks: int, *, ended: bool = False) -> Any:
    return SimpleNamespace(scheduled=2 + done_blocks, first_target=2, block_size=BLOCK, ended=ended)


def test_the_rate_is_of_the_time_in_which_it_computes() -> None:
    meter = Meter()
    assert meter.load([], [], 0.0) == Load()
    meter.step(0, 0.0, 5.0)
    assert meter.load([], [], 5.0) == Load(), "a step without prompt tokens measures nothing"
    meter.step(1000, 10.0, 11.0)
    meter.step(1000, 50.0, 51.0)
    assert meter.load([], [], 51.0).tokens_per_s == pytest.approx(1000)


def test_what_is_done_of_steps_that_run_is_told_by_the_time() -> None:
    meter = Meter()
    meter.step(1000, 50.0, 51.0)
    tasks = [task(0), task(3), task(9, ended=True)]
    assert meter.load(tasks, [], 51.0).done_tokens == 3 * BLOCK, "what has ended is committed"
    steps = [StepPlan(tokens=2 * BLOCK, planned=50.5), StepPlan(tokens=BLOCK, planned=51.0)]
    assert meter.load(tasks, steps, 51.0).done_tokens == 0, "all is planned, and nothing has run"
    part_s = BLOCK / 1000
    assert meter.load(tasks, steps, 51.0 + part_s).done_tokens == BLOCK
    assert meter.load(tasks, steps, 60.0).done_tokens == 2 * BLOCK, "the first step takes longer"
