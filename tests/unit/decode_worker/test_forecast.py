"""How long a remote prefill will take, and what the router makes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.decode_worker.forecast import (
    ASSUMED_BYTES_PER_S,
    ASSUMED_TOKENS_PER_S,
    BELIEVE_LINK_S,
    MAX_TIMEOUT_S,
    Forecast,
    Measured,
    PrefillWorkers,
    Queue,
    span,
    timeouts,
)
from pullfill.prefill_worker.scheduler import Meter
from pullfill.rate import FORGET_S
from pullfill.wire import Load, RouterConfig, StageTimings
from tests.support.fakes import FakeClock

BLOCK, BLOCK_BYTES = 16, 1e6
CONFIG = RouterConfig()


def forecaster() -> tuple[PrefillWorkers, FakeClock]:
    clock = FakeClock()
    return PrefillWorkers(clock), clock


def of(
    made: PrefillWorkers, tokens: int, loads: list[Load], depth: int = 0, own: int = 0
) -> Forecast:
    blocks = tokens // BLOCK
    return made.forecast(
        tokens, blocks, blocks * BLOCK_BYTES,
        workers=len(loads), loads=loads, depth_tokens=depth, own_tokens=own,
    )  # fmt: skip


def measured(made: PrefillWorkers, link: str, seconds: float) -> None:
    """1000 blocks took so long, often enough to believe it."""
    for _ in range(3):
        made.wrote(link, 1000, seconds)


def load(rate: float, done: int = 0) -> Load:
    return Load(tokens_per_s=rate, done_tokens=done)


# ------------------------------------------------------------------ what is expected


def test_the_wait_is_what_is_in_front_over_the_rate_of_all_that_pull() -> None:
    made, _ = forecaster()
    assert of(made, 100, [load(1000)], depth=5000).wait_s == 5
    assert of(made, 100, [load(1000), load(3000)], depth=8000).wait_s == 2
    assert of(made, 100, [load(1000, done=2000)], depth=5000).wait_s == 3
    assert of(made, 100, [load(1000)], depth=0, own=4000).wait_s == 4, "not told to the queue yet"
    assert of(made, 100, [load(1000, done=9000)], depth=5000).wait_s == 0


def test_kv_that_is_not_written_yet_is_in_front_too() -> None:
    made, _ = forecaster()
    measured(made, "p", 10.0)
    told = made.forecast(
        1600, 100, 1e8, workers=2, loads=[load(1000), load(1000)], depth_tokens=4000, own_tokens=0,
        own_unwritten=1200,
    )  # fmt: skip
    assert told.wait_s == pytest.approx(6), "two links, 12 s of writing; 2 s of computation"
    assert told.claim_within_s == pytest.approx(24), "or all of it comes over one of them"


def test_the_link_of_a_worker_that_is_gone_keeps_no_prompt_local() -> None:
    """A slow one did so for five minutes after its worker had left."""
    made, _ = forecaster()
    measured(made, "slow", 100.0)
    measured(made, "fast", 1.0)

    def told(*pulling: str) -> Forecast:
        loads = [load(1000)] * len(pulling)
        return made.forecast(
            1600, 100, 1e8, workers=len(pulling), loads=loads, depth_tokens=0, own_tokens=0,
            pulling=pulling,
        )  # fmt: skip

    assert told("slow", "fast").write_s == pytest.approx(5.05), "either may get the job"
    assert told("fast").write_s == pytest.approx(0.1)
    assert told("fast").commit_within_s == told("slow").commit_within_s, "deadlines are careful"
    assert told("new").write_s == 0


def test_a_worker_that_computed_nothing_yet_counts_as_the_others() -> None:
    made, _ = forecaster()
    assert of(made, 100, [load(1000), load(0)], depth=4000).wait_s == 2


def test_with_nothing_measured_prompts_go_out_and_have_time() -> None:
    made, _ = forecaster()
    told = of(made, 128_000, [load(0)], depth=200_000)
    assert (told.wait_s, told.prefill_s, told.write_s) == (0, 0, 0)
    seconds = (200_000 + 128_000) / ASSUMED_TOKENS_PER_S
    seconds += 128_000 / BLOCK * BLOCK_BYTES / ASSUMED_BYTES_PER_S
    remote, claim = timeouts(told, CONFIG)
    assert remote == pytest.approx(2 * seconds)
    assert claim == pytest.approx(2 * 200_000 / ASSUMED_TOKENS_PER_S)


def test_the_writing_is_measured_by_link_and_the_slowest_sets_the_deadline() -> None:
    made, clock = forecaster()
    measured(made, "fast", 1.0)
    assert of(made, 16_000, [load(1e6)]).write_s == pytest.approx(1)
    measured(made, "slow", 3.0)
    told = of(made, 16_000, [load(1e6)])
    assert told.write_s == pytest.approx(2), "whoever pulls it"
    assert told.commit_within_s == pytest.approx(2 * (3 + 0.016))
    clock.advance(BELIEVE_LINK_S + 1)
    late = of(made, 16_000, [load(1e6)])
    assert late.write_s == 0, "or nobody would ever measure it again"
    assert late.commit_within_s == told.commit_within_s, "but it has the time"
    clock.advance(MAX_TIMEOUT_S)
    forgotten, fresh = (of(one, 16_000, [load(1e6)]) for one in (made, forecaster()[0]))
    assert forgotten == fresh, "a worker that is gone keeps no long prompt local for ever"


def test_a_link_that_became_slow_is_noticed_and_one_hold_up_is_not() -> None:
    made, _ = forecaster()
    made.wrote("p", 10, 2.0)
    told = of(made, 16_000, [load(1000)])
    assert told.write_s == 0, "nor is a new link judged by one write that was held up"
    assert told.commit_within_s == pytest.approx(2 * (16 + 200)), "but there is time for it"
    for _ in range(100):
        made.wrote("p", 1000, 0.1)
    made.wrote("p", 10, 2.0)
    assert of(made, 16_000, [load(1000)]).write_s == pytest.approx(0.1, rel=0.05)
    for _ in range(2):
        made.wrote("p", 100, 6.0)
    assert of(made, 16_000, [load(1000)]).write_s == pytest.approx(60, rel=0.01)


@pytest.mark.parametrize(("blocks", "seconds"), [(0, 1.0), (1, 0.0), (1, -1.0), (1, float("inf"))])
def test_what_measures_nothing_changes_nothing(blocks: int, seconds: float) -> None:
    made, _ = forecaster()
    made.wrote("p", blocks, seconds)
    assert of(made, 16_000, [load(1000)]).write_s == 0


def test_a_small_prompt_keeps_the_timeouts_of_the_settings() -> None:
    made, _ = forecaster()
    assert timeouts(of(made, 2000, [load(5000)], depth=4000), CONFIG) == (30.0, 10.0)


# ------------------------------------------------------------------ the time to a first token

OWN, NOTHING = span(0, 1024), (0.0, 0.0)


def taught(made: PrefillWorkers, clock: FakeClock, **each_s: float) -> None:
    """These workers take so many seconds for each token."""
    for _ in range(8):
        clock.advance(1.0)
        for name, seconds in each_s.items():
            now = clock.monotonic()
            stages = StageTimings(prefill_ms=1024e3 * seconds)
            done = Measured("r", name, stages, now)
            made.observe(done, NOTHING, OWN, now - 1024 * seconds, now)


def test_each_prefill_worker_has_a_rate_of_its_own() -> None:
    made, clock = forecaster()
    taught(made, clock, fast=0.001, slow=0.01)

    def seconds(*names: str) -> float:
        return made.seconds(Queue(names, len(names)), NOTHING, OWN, clock.monotonic())

    assert seconds("fast") == pytest.approx(1.024, rel=0.05)
    assert seconds("slow") == pytest.approx(10.24, rel=0.05)
    # The fast one pulls ten times as many jobs.
    assert seconds("fast") < seconds("fast", "slow") < 2 * seconds("fast")
    assert made.fastest(["slow", "fast"]) == made.fastest(["fast"])
    assert seconds("new") == 0


def test_what_is_in_front_counts_and_a_link_by_what_it_takes_longer() -> None:
    made, clock = forecaster()
    taught(made, clock, p=0.001)
    now = clock.monotonic()
    behind = made.seconds(Queue(("p",)), OWN, OWN, now)
    assert behind == pytest.approx(2 * 1.024, rel=0.05)
    assert made.seconds(Queue(("p",)), OWN, OWN, now, done_s=0.5) == pytest.approx(behind - 0.5)
    measured(made, "p", 3.0)
    assert made.seconds(Queue(("p",), blocks=1000), NOTHING, OWN, now) == pytest.approx(3, rel=0.05)


def test_old_measurements_count_only_if_there_are_no_others() -> None:
    made, clock = forecaster()
    taught(made, clock, slow=0.01)
    clock.advance(FORGET_S + 1)
    assert not made.fresh(["slow"], clock.monotonic())
    assert made.seconds(Queue(("slow",)), NOTHING, OWN, clock.monotonic()) > 9
    taught(made, clock, fast=0.001)
    assert made.seconds(Queue(("slow", "fast"), 2), NOTHING, OWN, clock.monotonic()) < 2


# ------------------------------------------------------------------ what a prefill worker reports


def task(done_blocks: int) -> Any:
    return SimpleNamespace(scheduled=2 + done_blocks, first_target=2, block_size=BLOCK)


def test_the_rate_is_of_the_time_in_which_it_computes() -> None:
    meter = Meter()
    assert meter.load([]) == Load()
    meter.step(0, 0.0, 5.0)
    assert meter.load([]) == Load(), "a step without prompt tokens measures nothing"
    meter.step(1000, 10.0, 11.0)
    meter.step(1000, 50.0, 51.0)
    assert meter.load([]).tokens_per_s == pytest.approx(1000)
    assert meter.load([task(0), task(3)]).done_tokens == 3 * BLOCK


def test_steps_in_flight_together_share_the_time() -> None:
    meter = Meter()
    meter.step(1000, 0.0, 1.0)
    meter.step(1000, 0.0, 2.0)
    assert meter.load([]).tokens_per_s == pytest.approx(1000)
