"""What the serving benchmark's systems are made of, without starting one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_rates
from benchmarks.live import BenchError
from benchmarks.serving import model, systems_pairs, systems_vllm
from benchmarks.serving.contract import Name
from benchmarks.serving.systems import FLAGS, SYSTEMS
from benchmarks.serving.workloads import LONG_OUT, SHORT_IN, SHORT_OUT, SWEEP_IN
from pullfill.demo.recipe import MARKUP_TOKENS, SPECIAL_TOKENS
from pullfill.demo.tokenizer import build_tokenizer
from pullfill.deploy.plan import usable_cores


class TestModel:
    def test_prompts_have_no_special_tokens(self) -> None:
        tokenizer = build_tokenizer(model.RECIPE.vocab)
        texts = {tokenizer.id_to_token(token) for token in model.plain_tokens()}
        assert not texts & {*SPECIAL_TOKENS, *MARKUP_TOKENS}
        assert len(texts) == model.RECIPE.vocab - len(SPECIAL_TOKENS) - len(MARKUP_TOKENS)


class TestSystems:
    def test_every_system_that_the_verdicts_know_can_be_started(self) -> None:
        assert set(SYSTEMS) == set(Name)
        assert all(name == system.name and system.note for name, system in SYSTEMS.items())

    def test_who_must_be_beaten(self) -> None:
        aggregated = {name for name, system in SYSTEMS.items() if system.aggregated}
        assert aggregated == {Name.AGGREGATED, Name.AGGREGATED_256, Name.ROUND_ROBIN}
        assert [name for name, system in SYSTEMS.items() if system.ours] == [Name.PULLFILL]

    def test_nixl_that_is_not_there_is_skipped(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(systems_pairs, "nixl_problem", lambda: "not installed")
        with pytest.raises(systems_pairs.Skipped, match="not installed"):
            with systems_pairs.nixl("nixl", (0, 1), FLAGS, tmp_path):
                pass


def test_threads_are_put_on_their_cores_but_those_bound_within_stay() -> None:
    cores = usable_cores()
    if len(cores) < 2:
        pytest.skip("needs two cores")
    code = (
        "import os, sys, threading\n"
        "threading.Thread(target=lambda: (os.sched_setaffinity(0, {int(sys.argv[1])}),"
        " print(flush=True), input())).start()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(cores[1])], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pid = process.pid
        try:
            systems_vllm.pin([pid], cores[:2])
            bound = sorted(sorted(os.sched_getaffinity(t)) for t in systems_vllm.threads(pid))
            assert bound == sorted([cores[:2], [cores[1]]])
            systems_vllm.pin([pid], cores[:1])
            assert systems_vllm.places([pid]) == {pid: {cores[0]}}
        finally:
            process.kill()


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

    @pytest.mark.parametrize("report", [{}, {"benchmarks": []}, {"benchmarks": [{}]}])
    def test_another_report_is_refused(self, report: dict[str, Any]) -> None:
        with pytest.raises(BenchError, match=bench_rates.VERSION):
            bench_rates.parse(report)

    def test_without_guidellm_it_says_how_to_get_it(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with pytest.raises(systems_pairs.Skipped, match="make install-bench"):
            bench_rates.program()


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
