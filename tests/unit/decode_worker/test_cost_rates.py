"""Rates are learned for each worker and link, and old ones are not believed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pullfill.decode_worker.cost_rates import (
    FORGET_S,
    Bias,
    Handoff,
    LocalRates,
    Queue,
    RemoteRates,
    span,
)

NOTHING = (0.0, 0.0)


def handoff(
    instance: str = "p", tokens: int = 1024, each_s: float = 0.001, **fields: float
) -> Handoff:
    return Handoff(
        instance, "shm", NOTHING, span(0, tokens), int(fields.get("kv_bytes", 0)),
        tokens * each_s, fields.get("write_s", 0.0), fields.get("more_s", 0.0),
    )  # fmt: skip


def queue(*instances: str, workers: int = 1, jobs: int = 0, ahead: int = 0) -> Queue:
    return Queue(instances, workers, jobs, span(0, ahead))


def taught(rates: RemoteRates, now: float, *done: Handoff) -> None:
    for number in range(8):
        for one in done:
            rates.observe(one, now + number)


# ------------------------------------------------------------------ this engine


def test_steps_teach_the_time_of_streams_and_of_prompts() -> None:
    rates = LocalRates()
    for number in range(40):
        streams = number % 8 + 1
        rates.step(streams, NOTHING, 0.005 + 0.001 * streams, number * 0.01)
        rates.step(streams, span(0, 256), 0.005 + 0.001 * streams + 0.1, number * 0.01)
    assert rates.base(4) == pytest.approx(0.009, rel=0.05)
    assert rates.work(span(0, 256)) == pytest.approx(0.1, rel=0.05)


def test_a_chunk_that_fits_takes_the_time_that_there_is() -> None:
    rates = LocalRates()
    for number in range(60):
        start, tokens = 512 * (number % 4), 64 << (number % 3)
        rates.step(0, span(start, tokens), 1e-4 * tokens + 1e-7 * tokens * start, number * 0.1)
    tokens = rates.fits(0.05, 2048)
    assert rates.work(span(2048, int(tokens))) == pytest.approx(0.05, rel=0.1)


def test_an_engine_that_computes_no_prompt_is_taken_to_be_as_fast_as_the_others() -> None:
    """Otherwise it would never be tried, and never measured."""
    rates = LocalRates()
    rates.assume((0.2, 0.0), 0.0)
    assert rates.work(span(0, 512)) == pytest.approx(0.4)
    for number in range(8):
        rates.step(0, span(0, 512), 4.0, float(number))
    rates.assume((0.2, 0.0), 8.0)
    assert rates.work(span(0, 512)) == pytest.approx(4.0, rel=0.05)
    rates.assume((0.2, 0.0), 9.0 + FORGET_S)
    assert rates.work(span(0, 512)) == pytest.approx(0.4)


def test_without_prefill_workers_an_old_measurement_is_kept() -> None:
    """Nothing is assumed then: a prompt would be expected to take no time here."""
    rates, nobody = LocalRates(), RemoteRates()
    for number in range(8):
        rates.step(0, span(0, 512), 4.0, float(number))
    rates.assume(nobody.each(["p"]), 9.0 + FORGET_S)
    assert rates.work(span(0, 512)) == pytest.approx(4.0, rel=0.05)


def test_the_fastest_worker_is_one_worker() -> None:
    """Not the best number of each: one may be learned as all overhead, another as all attention."""
    rates = RemoteRates()
    flat = [handoff("flat", tokens, 0.1 / 256) for tokens in (1024, 8192)]
    steep = [handoff("steep", tokens, 0.3 * tokens / 524_288) for tokens in (1024, 8192)]
    taught(rates, 0.0, *flat, *steep)
    assert rates.each(["flat"]) == pytest.approx((0.1, 0.0), abs=0.01)
    assert rates.each(["steep"]) == pytest.approx((0.0, 0.3), abs=0.01)
    assert rates.each(["steep", "flat"]) == rates.each(["flat"])


# ------------------------------------------------------------------ prefill workers


def test_each_prefill_worker_has_a_rate_of_its_own() -> None:
    rates = RemoteRates()
    taught(rates, 0.0, handoff("fast"), handoff("slow", each_s=0.01))
    own = span(0, 1024)
    fast, slow = (rates.seconds(queue(name), own, 0, 8.0) for name in ("fast", "slow"))
    assert (fast, slow) == (pytest.approx(1.024, rel=0.05), pytest.approx(10.24, rel=0.05))
    # The fast one pulls ten times as many jobs.
    both = rates.seconds(queue("fast", "slow", workers=2), own, 0, 8.0)
    assert fast < both < 2 * fast


def test_what_is_in_front_counts_unless_a_worker_is_free() -> None:
    rates = RemoteRates()
    taught(rates, 0.0, handoff())
    own = span(0, 512)
    alone = rates.seconds(queue("p"), own, 0, 8.0)
    behind = rates.seconds(queue("p", jobs=1, ahead=1024), own, 0, 8.0)
    beside = rates.seconds(queue("p", jobs=1, ahead=1024, workers=2), own, 0, 8.0)
    assert behind == pytest.approx(alone + 1.024, rel=0.1)
    assert beside == alone


def test_a_link_counts_by_what_it_takes_longer_than_the_computation() -> None:
    rates = RemoteRates()
    taught(rates, 0.0, handoff(kv_bytes=1 << 20, write_s=3.0, more_s=0.02))
    seconds = rates.seconds(queue("p"), span(0, 1024), 1 << 20, 8.0)
    assert seconds == pytest.approx(3.02, rel=0.05)


def test_a_worker_that_slowed_down_is_learned_within_seconds() -> None:
    rates = RemoteRates()
    taught(rates, 0.0, handoff())
    for number in range(6):
        rates.observe(handoff(each_s=0.003), 10.0 + number)
    assert rates.seconds(queue("p"), span(0, 1024), 0, 16.0) == pytest.approx(3.07, rel=0.2)


def test_of_many_workers_some_are_asked() -> None:
    rates, names = RemoteRates(), [f"p{number}" for number in range(256)]
    taught(
        rates, 0.0, *(handoff(name, each_s=0.001 + 1e-6 * (i % 7)) for i, name in enumerate(names))
    )
    some = rates.seconds(queue(*names[:64]), span(0, 1024), 0, 8.0)
    assert rates.seconds(queue(*names), span(0, 1024), 0, 8.0) == pytest.approx(some, rel=0.01)
    asked = list[str]()
    for name, worker in rates._workers.items():
        worker.more = SimpleNamespace(of=lambda *_, n=name: asked.append(n) or 0.0)  # type: ignore[assignment,misc]
    rates.seconds(queue(*names), span(0, 1024), 0, 8.0)
    assert 32 <= len(asked) < 64


def test_old_measurements_count_only_if_there_are_no_others() -> None:
    rates = RemoteRates()
    taught(rates, 0.0, handoff("slow", each_s=0.01))
    late = 9.0 + FORGET_S
    assert not rates.fresh(["slow"], late)
    assert rates.seconds(queue("slow"), span(0, 1024), 0, late) > 9
    taught(rates, late, handoff("fast"))
    assert rates.seconds(queue("slow", "fast", workers=2), span(0, 1024), 0, late + 8) < 2
    assert rates.seconds(queue("new"), span(0, 1024), 0, late) == 0


# ------------------------------------------------------------------ errors


def test_what_is_always_too_low_is_corrected_and_forgotten() -> None:
    bias = Bias()
    for number in range(12):
        bias.observe(2.0, 1.0, float(number))
    assert bias.factor(12.0) == pytest.approx(2.0, rel=0.1)
    assert bias.factor(12.0 + 5 * FORGET_S) == pytest.approx(1.0, abs=0.05)
