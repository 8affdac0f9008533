"""What the serving benchmark's systems are made of, without starting one."""

from __future__ import annotations

from typing import Any

from benchmarks import bench_rates
from benchmarks.serving import model
from benchmarks.serving.contract import Name
from benchmarks.serving.systems import SYSTEMS
from benchmarks.serving.workloads import LONG_OUT, SHORT_IN, SHORT_OUT, SWEEP_IN
from pullfill.demo.tokenizer import build_tokenizer


class TestSystems:
    def test_every_system_that_the_verdicts_know_can_be_started(self) -> None:
        assert set(SYSTEMS) == set(Name)
        assert all(name == system.name and system.note for name, system in SYSTEMS.items())

    def test_who_must_be_beaten(self) -> None:
        aggregated = {name for name, system in SYSTEMS.items() if system.aggregated}
        assert aggregated == {Name.AGGREGATED, Name.AGGREGATED_256, Name.ROUND_ROBIN}
        assert [name for name, system in SYSTEMS.items() if system.ours] == [Name.PULLFILL]


class TestPublicLoad:
    def test_rows_are_the_same_for_the_same_seed_and_as_long_as_they_say(self) -> None:
        tokenizer = build_tokenizer(model.RECIPE.vocab)
        rows = bench_rates.prompts(tokenizer, 40, 3)
        assert rows == bench_rates.prompts(tokenizer, 40, 3)
        assert rows[0]["prompt"] != bench_rates.prompts(tokenizer, 1, 4)[0]["prompt"]
        for row in rows:
            assert abs(len(tokenizer.encode(row["prompt"]).ids) - row["prompt_tokens_count"]) <= 2
        kinds = {(row["prompt_tokens_count"], row["output_tokens_count"]) for row in rows}
        assert kinds == {(SHORT_IN, SHORT_OUT), (SWEEP_IN, LONG_OUT)}

    def test_a_report_is_read(self) -> None:
        rate = bench_rates.parse(REPORT)
        assert (rate.rate, rate.finished, rate.failed) == (2.0, 8, 3)
        assert (rate.ttft_p50_s, rate.ttft_p99_s) == (0.05, 0.09)
        assert (rate.itl_p50_s, rate.itl_p99_s) == (0.005, 0.009)
        assert (rate.tokens_per_s, rate.good_per_s, rate.good_share) == (40.0, 1.5, 0.75)


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


def percentiles(p50: float, p99: float) -> dict[str, Any]:
    return {"successful": {"percentiles": {"p50": p50, "p99": p99}}}


REPORT = {
    "benchmarks": [
        {
            "config": {"strategy": {"rate": 2.0}},
            "duration": 4.0,
            "metrics": {
                "request_totals": {"successful": 8, "errored": 1, "incomplete": 2},
                "time_to_first_token_ms": percentiles(50.0, 90.0),
                "inter_token_latency_ms": percentiles(5.0, 9.0),
                "output_token_count": {"successful": {"total_sum": 160.0}},
                "slo_attainment": 0.75,
                "slo_determined_requests": 8,
            },
        }
    ]
}
