"""The serving benchmark's prompts, figures and targets, compared with values found by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from unittest.mock import Mock

import pytest

from benchmarks import bench_rates, report
from benchmarks.live import BenchError
from benchmarks.serving import stats, workloads
from benchmarks.serving.campaign import Measured, Trouble
from benchmarks.serving.contract import Answer, Ask, Kind, Name, System
from benchmarks.serving.load import Result
from benchmarks.serving.meter import Use
from benchmarks.serving.parts import CONTROL, LONGS
from benchmarks.serving.systems_pairs import Skipped
from benchmarks.serving.verdict import BUSY, Verdict, chat_shares
from benchmarks.serving.window import Window
from benchmarks.serving.workloads import Longs, Prompts, Workload

VOCABULARY = range(5, 300)


def prompts(*seed: object) -> Prompts:
    return Prompts(VOCABULARY, *seed)


def answer(*token_s: float, error: str = "") -> Answer:
    asked = Ask(Kind.SHORT, (1, 2, 3), len(token_s), "lane")
    return Answer(asked, 0.0, 0.0, list(token_s), list(range(len(token_s))), error=error)


ALL = {
    "interference": lambda p: workloads.interference(p, 10.0, Longs()),
    "control": lambda p: workloads.interference(p, 10.0, None),
    "chat": lambda p: workloads.chat(p, 2, 3),
    "warm-up": lambda p: workloads.warm_up(p, (256, 512)),
}


class TestWorkloads:
    @pytest.mark.parametrize("name", ALL)
    def test_a_seed_fixes_everything_and_no_two_prompts_begin_alike(self, name: str) -> None:
        made: Workload = ALL[name](prompts(name, 1))
        assert made == ALL[name](prompts(name, 1))
        other: Workload = ALL[name](prompts(name, 2))
        beginnings = [a.prompt[:16] for w in (made, other) for a in w.asks]
        assert len(set(beginnings)) == len(beginnings)
        assert all(token in VOCABULARY for a in made.asks for token in a.prompt)


class TestGaps:
    def test_tokens_that_came_together_are_one_arrival(self) -> None:
        lumpy = answer(1.0, 2.0, 2.0, 2.0, 2.5)
        assert stats.gaps([lumpy]) == [1.0, 0.5]

    def test_a_stall_at_the_end_of_the_window_is_kept_and_what_began_later_is_not(self) -> None:
        assert stats.timed_gaps([answer(9.0, 9.5, 12.0, 12.5)], 10.0) == [(9.5, 0.5), (12.0, 2.5)]

    def test_time_in_long_gaps_counts_by_length(self) -> None:
        assert stats.stalled([0.25, 0.25, 0.5], 0.3) == 0.5
        assert stats.stalled([0.25], 0.3) == 0.0
        assert math.isnan(stats.stalled([], 0.3))


class TestRates:
    def test_ttft_is_from_when_it_was_due(self) -> None:
        late = Answer(Ask(Kind.LONG, (1,), 1, "l"), sent_s=5.0, due_s=3.0, token_s=[6.0])
        assert stats.ttft(late) == 3.0
        assert stats.ttfts([late, answer(1.0)], Kind.LONG) == [3.0]
        assert stats.ttfts([answer(1.0, error="no")]) == []


# What the serving benchmark's systems are made of, without starting one.


def came(rate: float, good: float, share: float, failed: int = 0) -> bench_rates.Rate:
    return bench_rates.Rate(rate, 9, failed, 0.1, 0.2, 0.01, 0.02, 100.0, good, share)


class TestGoodput:
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
        failed = {"nixl": Skipped("not there"), "pullfill": BenchError("it ended")}
        rows = bench_rates.rows_of({Name.AGGREGATED: rates}, failed)
        kept = {r.metric: r.value for r in rows}
        assert kept["aggregated: highest rate up to which 90 % are good"] == 1.0, (
            "3 came after a miss"
        )
        assert kept["nixl: goodput"] is None
        assert [r.metric for r in rows if not r.ok] == ["pullfill: goodput"]


# Targets of the serving benchmark, both ways, on figures made up here; tables.


def system(name: str) -> System:
    aggregated = name in (Name.AGGREGATED, Name.AGGREGATED_256, Name.ROUND_ROBIN)
    return System(
        name,
        f"note of {name}",
        lambda _: nullcontext(Mock()),
        aggregated,
        name.startswith("pullfill"),
    )


def stream(itl_ms: float) -> Answer:
    times = [0.01 + 1e-3 * itl_ms * n for n in range(101)]
    return Answer(Ask(Kind.SHORT, (1,) * 32, 101, "s"), 0, 0, times, list(range(101)))


def window(name: str, part: str, label: str, answers: Sequence[Answer]) -> Window:
    result = Result(list(answers), 10.0, 0.1, [0.001] * 10)
    seconds = None if part == "chat" else 10.0
    return Window(name, part, label, 0, seconds, result, Use(10.0, {"all": 1.0}))


def interference(name: str, control: float = 10.0, longs: float = 12.0) -> list[Window]:
    """ITL in ms, of streams alone and beside a long prompt."""
    prompt = Answer(Ask(Kind.LONG, (1,) * 3000, 1, "l"), 1.0, 1.0, [1.1], request_id="long")
    told = {"path": "remote", "timings_ms": {"queue": 2.0, "prefill": 80.0, "commit": None}}
    beside = window(name, "interference", LONGS, [*[stream(longs)] * 4, prompt])
    beside.explained = {prompt.request_id: told}
    return [window(name, "interference", CONTROL, [stream(control)] * 4), beside]


def measured(*windows: Window) -> Measured:
    names = list(dict.fromkeys(w.system for w in windows))
    return Measured([system(n) for n in names], list(windows))


def row(made: Measured, metric: str, peer: str = "") -> report.Row:
    (found,) = [r for r in Verdict(made).rows() if metric in r.metric and peer in r.peer]
    return found


class TestInterference:
    @pytest.mark.parametrize(("longs", "ok"), [(14.9, True), (15.1, False)])
    def test_own_control(self, longs: float, ok: bool) -> None:
        made = measured(*interference(Name.PULLFILL, 10.0, longs))
        found = row(made, "(a) ITL p99", "own control")
        assert (found.ok, found.target) == (ok, "ratio <= 1.5")
        assert found.value == pytest.approx(longs)

    @pytest.mark.parametrize(("theirs", "ok"), [(13.0, True), (12.0, False), (11.0, False)])
    def test_every_aggregated_system_must_be_slower(self, theirs: float, ok: bool) -> None:
        ours = interference(Name.PULLFILL)
        far = interference(Name.AGGREGATED, longs=500.0)
        near = interference(Name.ROUND_ROBIN, longs=theirs)
        made = measured(*ours, *far, *near)
        assert row(made, "(a) ITL p99", Name.AGGREGATED).ok
        assert row(made, "(a) ITL p99", Name.ROUND_ROBIN).ok is ok

    def test_medians_over_windows(self) -> None:
        some = [interference(Name.PULLFILL, longs=longs)[1] for longs in (11.0, 12.0, 90.0)]
        control = interference(Name.PULLFILL)[0]
        assert row(measured(control, *some), "(a) ITL p99", "own control").value == 12.0

    def test_a_row_of_a_busy_machine_says_so(self) -> None:
        one, two = interference(Name.PULLFILL)
        two.others = 0.5
        assert row(measured(one, two), "(a) ITL p99", "own control").metric.endswith(BUSY)


class TestChat:
    def made(self, hit: int) -> Window:
        asked, hits = Ask(Kind.TURN, (1,) * 98, 2, "c", grows=True), (0, hit)
        turns = [Answer(asked, 0, 0, [1.0, 2.0], [1, 2], request_id=str(n)) for n in hits]
        found = window(Name.PULLFILL, "chat", "", turns)
        found.explained = {str(n): {"path": "local", "prefix_hit_tokens": n} for n in hits}
        return found

    @pytest.mark.parametrize(("hit", "ok"), [(95, True), (94, False)])
    def test_the_decode_workers_own_account_counts(self, hit: int, ok: bool) -> None:
        assert chat_shares(self.made(hit)) == [hit / 100]
        assert row(measured(self.made(hit)), "lowest turn").ok is ok


class TestTrouble:
    def test_a_system_that_did_not_start_is_a_row_that_fails(self) -> None:
        made = measured(*interference(Name.PULLFILL))
        made.troubles = [Trouble(Name.NIXL, 0, "start", "first\nno NIXL here\n")]
        found = row(made, "nixl: start failed")
        assert (found.ok, found.unit) == (False, "not measured: no NIXL here")
