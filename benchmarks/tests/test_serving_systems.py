"""What the serving benchmark's systems are made of, without starting one."""

from __future__ import annotations

from benchmarks import bench_rates
from benchmarks.serving.contract import Name
from benchmarks.serving.systems import SYSTEMS


class TestSystems:
    def test_every_system_that_the_verdicts_know_can_be_started(self) -> None:
        assert set(SYSTEMS) == set(Name)
        assert all(name == system.name and system.note for name, system in SYSTEMS.items())


def came(rate: float, good: float, share: float, failed: int = 0) -> bench_rates.Rate:
    return bench_rates.Rate(rate, 9, failed, 0.1, 0.2, 0.01, 0.02, 100.0, good, share)


class TestRates:
    def test_ours_is_held_against_the_best_aggregated_of_the_run(self) -> None:
        rows = bench_rates.rows_of(
            {
                Name.PULLFILL: [came(1, 1.0, 1.0), came(4, 3.0, 0.75)],
                Name.AGGREGATED: [came(1, 0.5, 0.5), came(4, 1.0, 0.25)],
                Name.ROUND_ROBIN: [came(1, 1.0, 1.0), came(4, 1.5, 0.4)],
                Name.NIXL: [came(1, 9.0, 1.0)],
            },
            {},
        )
        (best,) = [row for row in rows if row.peer]
        assert (best.value, best.peer, best.peer_value) == (3.0, Name.ROUND_ROBIN, 1.5)

    def test_a_rate_is_sustained_when_nothing_failed_and_enough_was_good(self) -> None:
        rates = [came(3, 2.9, 0.95), came(1, 1.0, 0.95), came(2, 1.9, 0.95, failed=1)]
        row = bench_rates.rows_of({Name.AGGREGATED: rates}, {"nixl": "not there"})
        kept = {r.metric: r.value for r in row}
        assert kept["aggregated: highest rate up to which 90 % are good"] == 1.0, (
            "3 came after a miss"
        )
        assert kept["nixl: goodput"] is None
