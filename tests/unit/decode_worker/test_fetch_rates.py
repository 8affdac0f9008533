"""When reading a prefix is cheaper than computing it."""

from __future__ import annotations

from pullfill.decode_worker.fetch_rates import SURE, FetchRates, computed_s
from pullfill.decode_worker.forecast import ASSUMED_TOKENS_PER_S
from pullfill.rate import FORGET_S
from tests.support.fakes import FakeClock

MIB = 1 << 20


def test_a_holder_that_was_not_measured_is_read_and_then_measured() -> None:
    clock = FakeClock()
    rates = FetchRates(clock)
    assert rates.worth("a", 100 * MIB, 0.01)
    for _ in range(SURE - 1):
        rates.observe("a", 100 * MIB, 1.0)
        assert rates.worth("a", 100 * MIB, 0.5), "not sure yet"
    rates.observe("a", 100 * MIB, 1.0)
    assert not rates.worth("a", 100 * MIB, 0.5)
    assert rates.worth("a", 100 * MIB, 2.0)
    assert rates.worth("b", 100 * MIB, 0.5), "each holder for itself"


def test_a_read_has_a_part_that_does_not_depend_on_the_length() -> None:
    rates = FetchRates(FakeClock())
    for mib in (1, 10, 100, 1, 10, 100, 1, 10, 100):
        rates.observe("a", mib * MIB, 0.1 + 0.01 * mib)
    assert 0.05 < rates.expected_s("a", 0) < 0.2
    assert 0.5 < rates.expected_s("a", 50 * MIB) < 0.7


def test_an_old_measurement_is_not_believed() -> None:
    clock = FakeClock()
    rates = FetchRates(clock)
    for _ in range(SURE):
        rates.observe("a", MIB, 9.0)
    assert not rates.worth("a", MIB, 1.0)
    clock.advance(FORGET_S + 1)
    assert rates.worth("a", MIB, 1.0)


def test_what_was_not_measured_here_is_assumed() -> None:
    assert computed_s(0.0, 1000) == 1000 / ASSUMED_TOKENS_PER_S
    assert computed_s(0.3, 1000) == 0.3
