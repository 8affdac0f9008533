"""The simulation of workers with both sides: what it simulates, and that this is no accident."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.sim_sides import Options
from benchmarks.sim_splits import (
    MACHINE,
    MEASURED,
    STEP,
    System,
    closed,
    conversations,
    recovery,
    run,
    splits,
)
from pullfill.wire import DecodePolicy

BOTH = System("both sides", STEP)
SYSTEMS = [
    *(system for system, *_ in MEASURED),
    *splits(2),
    *splits(4),
    System("pack", Options("cost", DecodePolicy.PACK)),
    System("kv", Options("cost", DecodePolicy.KV)),
]


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: f"{len(system.sides)} {system.name}")
@pytest.mark.parametrize("rate", [5.0, 40.0])
def test_every_request_is_answered(system: System, rate: float) -> None:
    asks = conversations(1, rate, 120)
    run(system, asks, 1)
    assert [ask.name for ask in asks if ask.made != ask.output] == []


def test_the_same_seed_gives_the_same_result() -> None:
    first, second = (run(BOTH, conversations(3, 8.8), 3) for _ in range(2))
    assert first == second


def test_half_of_the_prompt_tokens_are_found_in_one_cache() -> None:
    asks = conversations(1, 8.8)
    run(System("one", Options("plain"), ("both",)), asks, 1)
    found = sum(ask.hit for ask in asks) / sum(ask.prompt for ask in asks)
    assert 0.35 < found < 0.6


@pytest.mark.parametrize("place", [2, 3])
def test_what_was_measured_comes_out_about_right(place: int) -> None:
    system, *measured = MEASURED[place]
    for rate, was in zip((4.4, 8.8), measured, strict=True):
        good = statistics.mean(run(system, conversations(s, rate), s).good for s in (1, 2, 3, 4))
        assert good == pytest.approx(was, abs=0.13)


def test_prompts_go_to_the_worker_without_streams() -> None:
    asks = conversations(1, 8.8)
    run(BOTH, asks, 1)
    away = [ask.prompt - ask.hit for ask in asks if ask.remote]
    assert len(away) > len(asks) / 4


def test_a_worker_with_streams_pulls_if_a_full_step_fits_between_two_tokens() -> None:
    """Under the policy `conditional`."""
    took = []
    for times in (0.3, 0.6):
        asks = conversations(1, 12.0)
        options = Options("conditional", DecodePolicy.KV)
        run(System("kv", options, machine=MACHINE.times(times, 1.0)), asks, 1)
        took.append(sum(bool(ask.remote) for ask in asks))
    assert took[0] > 2 * took[1]


def test_both_sides_keep_what_one_side_each_keeps() -> None:
    both, each, plain = (
        statistics.mean(run(one, conversations(s, 8.8), s).good for s in (1, 2, 3))
        for one in splits(2)
    )
    assert both > 0.97
    assert both > each - 0.02
    assert both > plain + 0.3


def test_streams_are_spread_when_prompts_are_few() -> None:
    """Clients that ask again at once, with long answers: all workers are needed for streams."""
    both, each, plain = (closed(one, 32, 1024, 1024, 1, 20.0, 60.0).tokens_s for one in splits(2))
    assert both > 1.2 * each
    assert both > 0.85 * plain


def test_no_worker_sleeps_while_its_own_prompts_wait() -> None:
    """All prompts of a planned step may go to the queue. Then the next step is planned at once."""
    both = System("kv", Options("cost", DecodePolicy.KV))
    made, plain = (closed(one, 16, 1024, 1024, 1, 10.0, 40.0) for one in (both, splits(2)[-1]))
    assert made.tokens_s > 0.9 * plain.tokens_s


def test_after_twice_the_load_all_is_well_again() -> None:
    # With other seeds there may be a burst at the end, which is late by itself.
    both, plain = (recovery(one, 4) for one in (splits(2)[0], splits(2)[2]))
    assert both[0] < 38.0
    # Prompts that are late anyway come last. vLLM computes the first first, and all are late.
    assert both[1] < 30.0
    assert both[2] > 0.95 * plain[2]
