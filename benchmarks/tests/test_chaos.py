"""The arithmetic of the fault benchmarks: rates, recovery, slopes, tables. No cluster."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from benchmarks import (
    chaos_load,
    chaos_memory,
    chaos_release,
    chaos_report,
    chaos_soak,
    chaos_tables,
    report,
)
from benchmarks.chaos_cluster import logged_at
from benchmarks.chaos_load import Ask, Load, Work
from benchmarks.chaos_rates import Slope, back_after, longest_gap, rate_at, rates, slope
from benchmarks.chaos_scenarios import (
    DECODE_BACK,
    FRONTEND_GONE,
    ONLY_DECODE_BACK,
    PREFILL_BACK,
    Run,
    Scenario,
)
from tests.support.listening import serving
from tests.support.waiting import eventually


def steady(rate: float, begin: float, end: float) -> list[float]:
    """`rate` events per second, evenly."""
    return [begin + i / rate for i in range(int((end - begin) * rate))]


class TestRates:
    def test_a_window_holds_its_begin_and_not_its_end(self) -> None:
        assert rate_at([0.0, 0.5, 1.0], 0.0) == 2
        assert rate_at([0.0, 0.5, 1.0], 0.0, width=0.5) == 2

    def test_only_whole_windows_count(self) -> None:
        assert rates(steady(10, 0, 3), 0, 2.9) == [10, 10]
        assert rates([], 0, 0.9) == []

    def test_back_at_once(self) -> None:
        assert back_after(steady(100, 0, 10), 5.0, 100, 10.0) == 0

    def test_a_second_that_ended_before_the_fault_does_not_count(self) -> None:
        """Full rate until the kill, silence for three seconds, full rate again."""
        times = steady(100, 0, 5) + steady(100, 8, 20)
        found = back_after(times, 5.0, 100, 20.0)
        assert found == pytest.approx(2.8, abs=0.06)  # from 7.8 on, 80 of 100 in a second

    def test_never_back(self) -> None:
        times = steady(100, 0, 5) + steady(70, 5, 20)
        assert back_after(times, 5.0, 100, 20.0) is None
        assert back_after(times, 5.0, 80, 20.0) == 0

    def test_too_little_left_to_say(self) -> None:
        assert back_after(steady(100, 0, 10), 9.5, 100, 10.0) is None

    def test_the_longest_gap_may_be_at_either_end(self) -> None:
        assert longest_gap([1.0, 1.5], 0.0, 4.0) == 2.5
        assert longest_gap([], 0.0, 4.0) == 4.0


class TestSlope:
    def test_a_straight_line_has_its_slope_and_no_error(self) -> None:
        found = slope([float(t) for t in range(120)], [100 + t / 60 for t in range(120)])
        assert found.per_minute == pytest.approx(1.0)
        assert found.error == pytest.approx(0.0, abs=1e-9)
        assert not found.within_noise()

    def test_noise_around_a_level_is_noise(self) -> None:
        rng = random.Random(1)
        missed = 0
        for _ in range(50):
            values = [100 + rng.gauss(0, 1) for _ in range(300)]
            missed += not slope([float(t) for t in range(300)], values).within_noise()
        assert missed <= 8  # 5 % would be 2.5

    def test_a_leak_in_noise_is_found(self) -> None:
        rng = random.Random(2)
        values = [100 + 2 * t / 60 + rng.gauss(0, 1) for t in range(300)]
        found = slope([float(t) for t in range(300)], values)
        assert abs(found.per_minute - 2) < 3 * found.error
        assert not found.within_noise(0.5)

    def test_the_floor_forgives_what_is_small(self) -> None:
        assert Slope(0.4, 0.01).within_noise(0.5)
        assert not Slope(0.6, 0.01).within_noise(0.5)
        assert Slope(-3.0, 2.0).within_noise()
        assert Slope(-3.0, 0.1).within_noise()

    def test_a_leak_under_a_heap_that_is_trimmed_is_found(self) -> None:
        times = [float(t) for t in range(300)]
        flat = [100 + t % 30 for t in times]
        leaks = [100 + t % 30 + t / 60 for t in times]
        assert slope(times, flat, 10, of=min).within_noise()
        assert not slope(times, leaks, 10, of=min).within_noise(0.5)

    def test_too_few_points(self) -> None:
        with pytest.raises(ValueError, match="three points"):
            slope([0.0, 1.0], [1.0, 1.0])


def ask(began: float, ended: float, *, error: str = "", url: str = "a") -> Ask:
    at = [] if error else [began + 0.1]
    return Ask(0, url, began, "id", [7] * len(at), at, error, False, ended)


def run_of(scenario: Scenario, asks: list[Ask], **seen: object) -> Run:
    run = Run(scenario, asks, [], 0.0, max(a.ended for a in asks))
    run.times = steady(100, 0, run.ended)
    run.wanted = 100.0
    for name, value in seen.items():
        setattr(run, name, value)
    return run


class TestRows:
    def rows(self, run: Run) -> dict[str, chaos_tables.Row]:
        return {r.metric.partition(": ")[2]: r for r in chaos_tables.report_rows("1P1D", run)}

    def test_a_good_run_misses_nothing(self) -> None:
        asks = [ask(t, t + 1) for t in range(20)]
        run = run_of(PREFILL_BACK, asks, killed=10.0, noticed_s=0.01, freed_s=0.02, restarted_s=6.0)
        rows = self.rows(run)
        assert all(r.ok for r in rows.values())
        assert rows["throughput back after"].value == 0
        assert rows["failed"].peer_value == 2
        assert {run.rate(p) for p in ("before", "during", "after")} == {100}

    def test_a_failed_request_is_a_miss(self) -> None:
        rows = self.rows(run_of(DECODE_BACK, [ask(0, 1), ask(1, 9, error="500: gone")], killed=4.0))
        assert (rows["failed"].value, rows["failed"].ok) == (1, False)

    def test_what_was_open_at_a_killed_frontend_may_fail_and_nothing_else(self) -> None:
        own, other = ask(3, 4.1, error="broke", url="b"), ask(3, 4.2, error="broke")
        run = run_of(FRONTEND_GONE, [ask(0, 9), own], killed=4.0, noticed_s=0.1, excused=[own])
        assert self.rows(run)["failed"].ok
        assert self.rows(run)["of them failed"].value == 1
        run.asks.append(other)
        assert not self.rows(run)["failed"].ok

    def test_in_an_outage_errors_must_come_soon(self) -> None:
        slow = ask(3, 10, error="503")
        run = run_of(ONLY_DECODE_BACK, [ask(0, 20), slow], killed=6.0, excused=[slow])
        assert self.rows(run)["slowest error"].value == 4
        assert all(r.ok for r in self.rows(run).values())
        slow.ended = 11.5
        assert not self.rows(run)["slowest error"].ok

    def test_never_back_and_never_free_are_misses(self) -> None:
        run = run_of(PREFILL_BACK, [ask(t, t + 1) for t in range(20)], killed=10.0, noticed_s=0.1)
        run.times = steady(100, 0, 10)
        rows = self.rows(run)
        assert not rows["throughput back after"].ok
        assert not rows["its blocks free after"].ok

    def test_the_table_has_a_line_per_scenario(self) -> None:
        asks = [ask(t, t + 1) for t in range(20)]
        run = run_of(PREFILL_BACK, asks, killed=10.0, noticed_s=0.1, freed_s=0.025)
        rows = [r for name in ("1P1D", "2P2D") for r in chaos_tables.report_rows(name, run)]
        lines = chaos_tables.report_table(rows).splitlines()
        assert len(lines) == 4
        assert len({line.count("|") for line in lines}) == 1
        assert "| 0 of 20 | 0 | 100 ms | 25 ms | 0.00 s | 100, 100, – | 100 |" in lines[-1]

    def test_what_may_fail_is_told_with_its_excuse(self) -> None:
        own = ask(3, 4.1, error="broke", url="b")
        run = run_of(FRONTEND_GONE, [ask(0, 9), own], killed=4.0, noticed_s=0.1, excused=[own])
        rows = chaos_tables.report_rows("1P1D", run)
        run = run_of(ONLY_DECODE_BACK, [ask(0, 9), own], killed=2.0, excused=[own])
        rows += chaos_tables.report_rows("1P1D", run)
        text = chaos_tables.report_table(rows)
        assert "| 1 of 2, 1 were open there |" in text
        assert "| 1 of 2, each within 1.1 s |" in text

    def test_killed_writers_get_a_sentence(self) -> None:
        seen = chaos_release.Released([0.01] * 9, [0.02] * 9, [ask(0, 1)])
        text = chaos_tables.report_table(chaos_tables.release_rows(seen, 9))
        assert "9 writers killed while they wrote, one after the other" in text
        assert "20 ms (p50), 20 ms (p99)" in text

    def test_a_part_measured_again_replaces_only_itself(self) -> None:
        def rows(value: float, *names: str) -> list[chaos_tables.Row]:
            return [report.row(f"{n}: {m}", value, "") for n in names for m in ("x", "y")]

        found = chaos_tables.merged(rows(1, "a", "b", "c"), rows(2, "b", "d"))
        assert [(r.metric[0], r.value) for r in found[::2]] == [
            ("a", 1), ("b", 2), ("c", 1), ("d", 2)
        ]  # fmt: skip


class TestWork:
    work = Work([[1], [2]], [[7, 8, 9], [4, 5, 6]], 3)

    @pytest.mark.parametrize(
        ("tokens", "error", "cut", "right"),
        [
            ([7, 8, 9], "", False, True),
            ([7, 8, 0], "", False, False),
            ([7, 8], "", False, False),
            ([7, 8, 9, 9], "", False, False),
            ([7, 8], "broke", False, True),
            ([7, 0], "broke", False, False),
            ([], "", True, True),
            ([8], "", True, False),
        ],
    )
    def test_only_an_unfinished_answer_may_be_short(
        self, tokens: list[int], error: str, cut: bool, right: bool
    ) -> None:
        one = Ask(0, "u", 0.0, "id", tokens, [], error, cut, 1.0)
        assert (self.work.wrong([one]) == []) is right


class TestDocs:
    def test_the_place_between_the_comments_is_replaced(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text("a\n<!-- x: written by the benchmark -->\nold\n<!-- end of x -->\nb\n")
        chaos_tables.write_docs("x", "| new \\1 |", page)
        chaos_tables.write_docs("x", "| newer \\1 |", page)
        assert page.read_text() == (
            "a\n<!-- x: written by the benchmark -->\n\n| newer \\1 |\n\n<!-- end of x -->\nb\n"
        )

    def test_a_page_without_a_place_is_an_error(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text("a\n")
        with pytest.raises(ValueError, match="no place for x"):
            chaos_tables.write_docs("x", "t", page)

    def test_the_real_page_has_a_place(self, tmp_path: Path) -> None:
        copy = tmp_path / "page.md"
        copy.write_text(chaos_tables.DOC.read_text())
        chaos_tables.write_docs(chaos_report.NAME, "t", copy)


def test_the_first_matching_log_line_after_a_moment(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    lines = [f"2026-01-01 00:00:0{i},500 W frontend pullfill.x: lost d{i % 2}" for i in range(4)]
    log.write_text("\n".join(["noise", *lines, ""]))
    first = logged_at(log, "lost d0", 0.0)
    assert first is not None
    assert logged_at(log, "lost d1", first) == first + 1
    assert logged_at(log, "lost d0", first + 1) == first + 2
    assert logged_at(log, "lost d9", 0.0) is None


def test_scenarios_are_chosen_by_name() -> None:
    def names(*only: str) -> list[tuple[str, int]]:
        return [(t.name, len(t.scenarios)) for t in chaos_report.chosen(list(only))]

    assert names() == [("1P1D", 5), ("2P2D", 4)]
    assert names("2P2D") == [("2P2D", 4)]
    assert names("decode-restarted", "1P1D/none") == [("1P1D", 1), ("2P2D", 1)]
    assert names("nonsense") == []


Answer = Callable[[web.Request], AsyncIterator[bytes]]


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async for event in answer(request):
            await response.write(b"data: " + event + b"\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    async with serving(app) as url:
        yield url


def chunk(*tokens: int, end: bool = False) -> bytes:
    choice = {"token_ids": list(tokens), "finish_reason": "length" if end else None}
    return json.dumps({"id": "cmpl-1", "choices": [choice]}).encode()


async def ask_once(answer: Answer, **options: float) -> Ask:
    async with server(answer) as url:
        work = Work([[1, 2]], [[7, 8, 9]], 3)
        load = Load(work, lambda: [url], clients=1, each=1, **options)  # type: ignore[arg-type]
        with load:
            await asyncio.to_thread(load.join, 10.0)
    (one,) = load.ended
    assert not work.wrong([one])
    return one


class TestLoad:
    async def test_a_whole_answer(self) -> None:
        async def answer(_: web.Request) -> AsyncIterator[bytes]:
            yield chunk(7)
            yield chunk(8, 9, end=True)
            yield b"[DONE]"

        one = await ask_once(answer)
        assert (one.tokens, one.error, one.request_id, len(one.at)) == ([7, 8, 9], "", "cmpl-1", 3)

    @pytest.mark.parametrize(
        ("last", "said"),
        [
            (b'{"error": {"message": "worker lost"}}', "worker lost"),
            (b"[DONE]", "without a finish reason"),
            (b'{"id": "cmpl-1", "choices": []}', "broke off"),
        ],
    )
    async def test_a_stream_that_ends_early_has_failed(self, last: bytes, said: str) -> None:
        async def answer(_: web.Request) -> AsyncIterator[bytes]:
            yield chunk(7)
            yield last

        assert said in (await ask_once(answer)).error

    async def test_an_abandoned_request_has_not_failed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chaos_load, "PATIENCE_S", 0.1)

        async def answer(_: web.Request) -> AsyncIterator[bytes]:
            yield chunk(7)
            await asyncio.sleep(0.3)

        one = await ask_once(answer, cut_share=1.0)
        assert (one.cut, one.error) == (True, "")

    async def test_a_frontend_that_is_not_there_is_passed_over(self) -> None:
        async def answer(_: web.Request) -> AsyncIterator[bytes]:
            yield chunk(7, 8, 9, end=True)
            yield b"[DONE]"

        async with server(answer) as url:
            nobody = "http://127.0.0.1:1"
            load = Load(Work([[1]], [[7, 8, 9]], 3), lambda: [nobody, url], clients=1, each=2)
            with load:
                await asyncio.to_thread(load.join, 10.0)
        assert [a.error for a in load.ended] == ["", ""]
        assert load.turned_away == 2


def test_memory_rows_judge_the_last_half() -> None:
    samples = chaos_memory.Samples()
    for second in range(240):
        samples.at.append(float(second))
        samples.private.append(500 + min(second, 120) / 2)  # grows, then level
        samples.fds.append(30)
    assert all(r.ok for r in chaos_memory.memory_rows("decode", samples, 0.0))
    samples.private = [500 + second / 10 for second in range(240)]
    assert not all(r.ok for r in chaos_memory.memory_rows("decode", samples, 0.5))


def test_samples_are_kept(tmp_path: Path) -> None:
    with chaos_memory.Sampler({"me": os.getpid()}, every_s=0.01) as sampler:
        eventually(lambda: bool(sampler.of["me"].fds), "no sample")
    sampler.look_at_maps()
    sampler.write(tmp_path / "memory.csv")
    samples = sampler.of["me"]
    assert samples.private[0] > 1
    assert samples.dead_maps == 0
    assert len((tmp_path / "memory.csv").read_text().splitlines()) == len(samples.at) + 1


@pytest.mark.parametrize("module", [chaos_report, chaos_soak])
def test_help_says_what_is_measured(
    module: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["chaos", "--help"])
    with pytest.raises(SystemExit) as stopped:
        module.main()  # type: ignore[attr-defined]
    assert stopped.value.code == 0
    assert "--save" in capsys.readouterr().out
