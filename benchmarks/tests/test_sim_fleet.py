"""The simulation of GPU fleets: its machine is the published one, and a fleet is compared whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.sim_fleet import HUGE, LOADS, PUBLISHED, SATURATED, both, plain, split, value


@pytest.mark.parametrize(("clients", "published"), PUBLISHED)
def test_the_machine_is_as_fast_as_the_published_one(clients: int, published: float) -> None:
    found = value(plain(1), replace(SATURATED, clients=clients))
    assert found == pytest.approx(published, rel=0.06)


def test_requests_of_all_phases_count() -> None:
    changing = replace(LOADS[0], warm_s=0.0, seconds=4.0)
    asked = [one.prompt for one in changing.asks(8, 1)]
    assert {4096, 300} == set(asked)
    assert 0.0 < value(both(8), changing) <= len(asked) / 4.0


def test_too_few_prefill_workers_lose() -> None:
    load = replace(HUGE, seconds=5.0)
    few, enough = (value(split(8, m, "conditional"), load) for m in (1, 5))
    assert few < enough / 2
