"""What each choice costs, and which one is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pullfill.decode_worker.cost_choice import (
    HOLD_S,
    ITL_SHARE,
    MIN_CHUNK,
    Choice,
    Expectation,
    Last,
    Prompt,
    Streams,
    choose,
    chunk_tokens,
    local,
    miss,
    remote,
)
from pullfill.decode_worker.cost_rates import LocalRates, span

FOUR = Streams(((0.05, 4),))
PROMPT = Prompt(2000, 0, ttft_s=2.0, step_tokens=1024)


@pytest.fixture
def rates() -> LocalRates:
    """8 ms for a step, and 0.3 ms for each prompt token."""
    made = LocalRates()
    for number in range(50):
        made.step(4, (0.0, 0.0), 0.008, number * 0.01)
        made.step(4, span(64 * number, 128), 0.008 + 0.0384, number * 0.01)
    return made


def both(prompt: Prompt, rates: LocalRates, streams: Streams) -> tuple[Expectation, Expectation]:
    return (
        local(prompt, rates, streams, chunked=False),
        local(prompt, rates, streams, chunked=True),
    )


# ------------------------------------------------------------------ predictions


def test_at_once_is_sooner_and_harms_the_streams(rates: LocalRates) -> None:
    at_once, chunked = both(PROMPT, rates, FOUR)
    assert at_once.ttft_s == pytest.approx(0.6 + 2 * 0.008, rel=0.05)
    assert at_once.ttft_s < chunked.ttft_s
    assert at_once.step_s > 0.05 > ITL_SHARE * 0.05 * 1.05 > chunked.step_s
    assert (at_once.harm_s > 1, chunked.harm_s) == (True, 0)
    # Four streams would miss their target.
    assert at_once.cost > 3 > 1 > chunked.cost


def test_without_streams_both_are_the_same(rates: LocalRates) -> None:
    at_once, chunked = both(PROMPT, rates, Streams())
    assert at_once.ttft_s == chunked.ttft_s
    assert at_once.harm_s == 0


def test_what_others_still_compute_here_comes_first(rates: LocalRates) -> None:
    busy = replace(PROMPT, backlog_s=1.0, backlog_tokens=3000)
    assert local(busy, rates, FOUR, chunked=True).ttft_s > 1.0 + 0.6


def test_the_time_that_a_prompt_has_waited_counts(rates: LocalRates) -> None:
    late = replace(PROMPT, waited_s=3.0)
    assert remote(late, rates, FOUR, 0.5).cost > 0.9 > remote(PROMPT, rates, FOUR, 0.5).cost


def test_a_stream_with_a_loose_target_is_not_harmed(rates: LocalRates) -> None:
    loose = Streams(((1.0, 4),))
    assert local(PROMPT, rates, loose, chunked=False).cost < 0.1


@given(st.floats(1e-6, 1e3), st.floats(1e-3, 1e3))
def test_a_miss_is_a_share(seconds: float, target: float) -> None:
    assert 0 <= miss(seconds, target, 16.0) <= 1
    assert miss(target, target, 16.0) == 0.5


# ------------------------------------------------------------------ chunks


def test_chunks_are_sized_for_the_strictest_stream(rates: LocalRates) -> None:
    strict = Streams(((0.05, 4), (0.03, 1)))
    for streams, target in ((FOUR, 0.05), (strict, 0.03)):
        tokens = chunk_tokens(rates, streams, 0, 1024)
        step_s = rates.base(streams.count) + rates.work(span(0, tokens))
        assert step_s == pytest.approx(ITL_SHARE * target, rel=0.05)


def test_a_stream_whose_target_no_step_meets_makes_no_chunk_smaller(rates: LocalRates) -> None:
    """A client may ask for any target. The other streams and all prompts would pay for it."""
    for streams in (((0.05, 5),), ((0.05, 4), (0.001, 1))):
        assert chunk_tokens(rates, Streams(streams), 0, 1024) > 2 * MIN_CHUNK
    met = Streams(((0.009, 4), (0.2, 1)))  # a step without prompts takes 8 ms
    assert chunk_tokens(rates, met, 0, 1024) == MIN_CHUNK


def test_chunks_double_a_step_if_no_step_meets_any_target() -> None:
    rates = LocalRates()
    rates.step(4, (0.0, 0.0), 0.008, 0.0)
    rates.step(4, span(0, 1024), 0.008 + 0.1024, 0.01)
    count = chunk_tokens(rates, Streams(((0.001, 4),)), 0, 1024)
    assert 0.008 + rates.work(span(0, count)) == pytest.approx(ITL_SHARE * 0.016, rel=0.1)


def test_a_target_that_is_almost_met_keeps_chunks_small(rates: LocalRates) -> None:
    """Otherwise the chunks would fit the target of one stream, and delay the four others more."""
    streams = Streams(((0.007, 4), (0.2, 1)))  # a step without prompts takes 8 ms
    assert chunk_tokens(rates, streams, 0, 1024) == MIN_CHUNK


def test_a_chunk_is_never_too_small_to_end(rates: LocalRates) -> None:
    assert chunk_tokens(rates, Streams(((0.007, 4),)), 0, 1024) == MIN_CHUNK
    assert chunk_tokens(rates, Streams(), 0, 1024) == 1024


# ------------------------------------------------------------------ the choice


def option(choice: Choice, cost: float) -> Expectation:
    return Expectation(choice, 1.0, 0.0, 0.0, cost)


def test_the_cheapest_is_chosen() -> None:
    options = [option(Choice.REMOTE, 0.5), option(Choice.CHUNKED, 0.4)]
    assert choose(options, None, 0.0).choice is Choice.CHUNKED


def test_the_last_choice_is_kept_while_it_costs_little_more() -> None:
    options = [option(Choice.REMOTE, 0.43), option(Choice.CHUNKED, 0.4)]
    last = Last(Choice.REMOTE, 0.0)
    assert choose(options, last, 1.0).choice is Choice.REMOTE
    assert choose(options, last, HOLD_S + 0.1).choice is Choice.CHUNKED
    dear = [option(Choice.REMOTE, 0.6), option(Choice.CHUNKED, 0.4)]
    assert choose(dear, last, 1.0).choice is Choice.CHUNKED


def test_a_last_choice_that_is_no_option_any_more_is_nothing() -> None:
    options = [option(Choice.REMOTE, 0.5), option(Choice.AT_ONCE, 0.4)]
    assert choose(options, Last(Choice.CHUNKED, 0.0), 1.0).choice is Choice.AT_ONCE
